"""A data set: three splits of one kind, and how arrays become one."""

import dataclasses
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dohyo.errors import DohyoError

Arrays = dict[str, NDArray[Any]]
Kind = Literal["binary", "grey", "real"]
AnyKind = Literal["auto", "binary", "grey", "real"]
SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class Source:
    """What was read: arrays (n, ...) by name, and what is known about them beside their numbers."""

    arrays: Arrays
    white: float | None = None  # what stands for it where the file's format says so, as with images; else the numbers must tell
    columns: tuple[str, ...] = ()  # the names of a table's columns


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Three splits, one row for each datum, float32.

    Grey values in [0, 1] are the probabilities that a pixel is one, as in Burda et al. (2016): the pixels are sampled anew for
    each minibatch (dynamic binarisation), and once for validation and test data.

    Attributes:
        name: The name or the file it was loaded from.
        train: `(n, *shape)`, or (n, d) after `flat`: 0 and 1 if binary, probabilities if grey, any numbers if real.
        valid, test: The same, but 0 and 1 if grey.
        shape: The shape of one datum: (1, 28, 28) for images, which are (channels, height, width); (37,) for a table.
        columns: The names of a table's columns; empty for other data.
        about: How the numbers were read, in a few words.

    Example:
        >>> from dohyo.lab.data import load
        >>> digits = load("digits")
        >>> digits
        Dataset(name='digits', kind='grey', shape=(1, 8, 8))
        >>> len(digits.train), len(digits.valid), len(digits.test)
        (1297, 200, 300)
        >>> digits.train_batch(torch.arange(100)).unique()
        tensor([0., 1.])
        >>> digits.train.shape, digits.flat().train.shape
        (torch.Size([1297, 1, 8, 8]), torch.Size([1297, 64]))
    """

    name: str
    train: Tensor = dataclasses.field(repr=False)
    valid: Tensor = dataclasses.field(repr=False)
    test: Tensor = dataclasses.field(repr=False)
    kind: Kind
    shape: tuple[int, ...]
    columns: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    about: str = dataclasses.field(default="", repr=False)

    def train_batch(self, index: Tensor) -> Tensor:
        """The training data of these rows; grey data are binarised anew with torch's RNG of their device."""
        batch = self.train[index]
        return torch.bernoulli(batch) if self.kind == "grey" else batch

    def flat(self) -> "Dataset":
        """The same data as (n, d); `shape` remains that of a datum."""
        return dataclasses.replace(self, **{split: getattr(self, split).flatten(1) for split in SPLITS})

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data on `device`."""
        return dataclasses.replace(self, **{split: getattr(self, split).to(device) for split in SPLITS})


def from_arrays(
    name: str, source: Source, wanted: AnyKind, seed: int, white: float | None, shape: tuple[int, ...] | None
) -> Dataset:
    """A data set of the arrays `train`, `valid` and `test`, each (n, ...), which `check_array` has accepted.

    The kind "auto" depends on the values: 0 and 1 alone are binary; whole numbers from 0 to 255 that reach 255 are grey, as are
    floats in [0, 1] outside tables; colour images, other floats, and whole numbers below 0 or above 255 are real. Where that
    leaves two readings it is an error. Grey whole numbers are divided by `white`, or 255.
    """
    arrays = {split: source.arrays[split] for split in SPLITS}
    _check_agreement(arrays)
    own = arrays["train"].shape[1:] or (1,)
    if shape is not None and np.prod(shape) != np.prod(own):
        raise DohyoError(f"a datum is {own}, {np.prod(own)} numbers, and the shape asked for is {shape}; it must have as many")
    kind, scale, about = _kind_and_scale(arrays, wanted, source, white)
    shape = shape or own
    tensors = {split: torch.from_numpy(_flat(array)).div_(scale).view(-1, *shape) for split, array in arrays.items()}
    if kind == "grey":
        for stream, split in ((1, "valid"), (2, "test")):
            uniform = random_state(seed, stream).random_sample(tensors[split].shape)  # in [0, 1): 0 stays 0, and 1 stays 1
            tensors[split] = torch.from_numpy(uniform < tensors[split].numpy()).float()
    columns = source.columns if len(source.columns) == shape[-1] and len(shape) == 1 else ()
    return Dataset(name, tensors["train"], tensors["valid"], tensors["test"], kind, shape, columns, about)


def random_state(seed: int, stream: int) -> np.random.RandomState:
    """Random numbers that no later version changes: NumPy froze RandomState's, torch promises nothing."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, stream))))


def check_array(what: str, array: NDArray[Any], columns: tuple[str, ...] = ()) -> None:
    """An error if this is not data; places are counted from one, in the array as in its file."""
    if array.dtype.kind not in "fiub":
        raise DohyoError(f"{what} holds {array.dtype}; data are real numbers")
    if array.ndim == 0 or array.size == 0:
        raise DohyoError(f"{what} is empty, of shape {array.shape}; the shape must be (data, ...), with no 0 in it")
    flat = _flat(array)  # float32: a float64 beyond its range becomes infinite here
    bad = np.flatnonzero(~np.isfinite(flat))
    if len(bad):
        datum, place = divmod(int(bad[0]), flat.shape[1])
        name = columns[place] if columns else f"place {place + 1}"
        where = f"{len(bad)} of {flat.size} numbers in {what}, first in datum {datum + 1}, {name},"
        raise DohyoError(f"{where} are NaN, infinite or beyond float32; remove or replace them")


def _check_agreement(arrays: Arrays) -> None:
    train = arrays["train"]
    for split, array in arrays.items():
        if array.shape[1:] != train.shape[1:]:
            raise DohyoError(f"one datum has shape {array.shape[1:]} in {split} and {train.shape[1:]} in train; make them equal")
        if (array.dtype.kind == "f") != (train.dtype.kind == "f"):
            raise DohyoError(f"{split} holds {array.dtype} and train {train.dtype}; make both floats or both whole numbers")


def _kind_and_scale(arrays: Arrays, wanted: AnyKind, source: Source, white: float | None) -> tuple[Kind, float, str]:
    """What kind the data are, what to divide them by, and both in words."""
    low = min(array.min().item() for array in arrays.values())
    high = max(array.max().item() for array in arrays.values())
    whole = arrays["train"].dtype.kind != "f"
    binary = low >= 0 and high <= 1 and (whole or all(((a == 0) | (a == 1)).all() for a in arrays.values()))
    came = f"{'whole numbers' if whole else 'floats'} from {low:.6g} to {high:.6g}"
    wanted = "grey" if wanted == "auto" and white is not None else wanted
    white = source.white if white is None else white
    if white is not None and not (low >= 0 and high <= white < np.inf):
        raise DohyoError(f"white is {white:g}, but these are {came}; white is the largest number there can be, and black is 0")
    top = white or (255 if whole and high > 1 else 1)
    grey = low >= 0 and high <= top
    colour = source.white is not None and arrays["train"].shape[1] == 3
    table = bool(source.columns)
    kind: Kind = wanted if wanted != "auto" else "real" if colour else "binary" if binary else "grey" if grey else "real"
    unclear = white is None and (1 < high < 255 if whole else table and wanted == "auto")
    if kind == "grey" and grey and unclear:
        raise DohyoError(
            f"these are {came}: grey values if {max(high, 1):.6g} is white, then give --data-white {max(high, 1):.6g} (in Python "
            "white=); or quantities to keep as they are, then give --data-kind real (kind=)"
        )
    if kind == "binary" and not binary:
        raise DohyoError(f"binary data must be 0 and 1 only, but these are {came}; threshold them, or use kind grey or real")
    if kind == "grey" and not grey:
        raise DohyoError(
            f"grey data must be in [0, 1], or whole numbers from 0 to 255, but these are {came}; rescale, or use kind real"
        )
    scale = top if kind == "grey" or (source.white is not None and kind == "real") else 1
    return kind, scale, f"{came}{f', divided by {scale:g}' if scale != 1 else ''}, read as {kind}"


def _flat(array: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return array.reshape(len(array), -1).astype(np.float32)
