"""A data set: three splits of one kind, and how arrays become one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dohyo.errors import DohyoError

Kind = Literal["binary", "grey", "real"]
SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Three splits, one row for each datum, float32.

    Grey values in [0, 1] are the probabilities that a pixel is one, as in Burda et al. (2016): the pixels are sampled anew for
    each minibatch (dynamic binarisation), and once for validation and test data.

    Attributes:
        name: The name or the file it was loaded from.
        train: (n, d): 0 and 1 if binary, probabilities if grey, any numbers if real.
        valid, test: (n, d): 0 and 1 if binary or grey, any numbers if real.
        shape: The shape of one datum before it was flattened: (28, 28), (37,).

    Example:
        >>> from dohyo.lab.data import load
        >>> digits = load("digits")
        >>> digits
        Dataset(name='digits', kind='grey', shape=(8, 8))
        >>> len(digits.train), len(digits.valid), len(digits.test)
        (1297, 200, 300)
        >>> digits.train_batch(torch.arange(100)).unique()
        tensor([0., 1.])
    """

    name: str
    train: Tensor = dataclasses.field(repr=False)
    valid: Tensor = dataclasses.field(repr=False)
    test: Tensor = dataclasses.field(repr=False)
    kind: Kind
    shape: tuple[int, ...]

    def train_batch(self, index: Tensor) -> Tensor:
        """The training data of these rows; grey data are binarised anew with torch's RNG of their device."""
        batch = self.train[index]
        return torch.bernoulli(batch) if self.kind == "grey" else batch

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data on `device`."""
        return dataclasses.replace(self, **{split: getattr(self, split).to(device) for split in SPLITS})


def from_arrays(name: str, arrays: Mapping[str, NDArray[Any]], wanted: Kind | Literal["auto"], seed: int) -> Dataset:
    """A data set of the arrays `train`, `valid` and `test`, each (n, ...), which `check_array` has accepted.

    The kind "auto" depends on the values: 0 and 1 alone are binary, whole numbers from 0 to 255 and floats in [0, 1] are grey,
    and other floats are real. Grey whole numbers are divided by 255.
    """
    arrays = {split: arrays[split] for split in SPLITS}
    _check_agreement(arrays)
    kind, scale = _kind_and_scale(arrays, wanted)
    tensors = {split: torch.from_numpy(_flat(array)).div_(scale) for split, array in arrays.items()}
    if kind == "grey":
        for stream, split in ((1, "valid"), (2, "test")):
            tensors[split] = _binarised(tensors[split], random_state(seed, stream))
    shape = arrays["train"].shape[1:] or (1,)
    return Dataset(name, tensors["train"], tensors["valid"], tensors["test"], kind, shape)


def random_state(seed: int, stream: int) -> np.random.RandomState:
    """Random numbers that no later version changes: NumPy froze RandomState's, torch promises nothing."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, stream))))


def check_array(what: str, array: NDArray[Any]) -> None:
    """An error if this is not data; places are counted from one, in the array as in its file."""
    if array.dtype.kind not in "fiub":
        raise DohyoError(f"{what} holds {array.dtype}; data are real numbers")
    if array.ndim == 0 or array.size == 0:
        raise DohyoError(f"{what} is empty, of shape {array.shape}; the shape must be (data, ...), with no 0 in it")
    flat = _flat(array)  # float32: a float64 beyond its range becomes infinite here
    bad = np.flatnonzero(~np.isfinite(flat))
    if len(bad):
        datum, place = divmod(int(bad[0]), flat.shape[1])
        where = f"{len(bad)} of {flat.size} numbers in {what}, first in datum {datum + 1}, place {place + 1},"
        raise DohyoError(f"{where} are NaN, infinite or beyond float32; remove or replace them")


def _check_agreement(arrays: Mapping[str, NDArray[Any]]) -> None:
    train = arrays["train"]
    for split, array in arrays.items():
        if array.shape[1:] != train.shape[1:]:
            raise DohyoError(f"one datum has shape {array.shape[1:]} in {split} and {train.shape[1:]} in train; make them equal")
        if (array.dtype.kind == "f") != (train.dtype.kind == "f"):
            raise DohyoError(f"{split} holds {array.dtype} and train {train.dtype}; make both floats or both whole numbers")


def _kind_and_scale(arrays: Mapping[str, NDArray[Any]], wanted: Kind | Literal["auto"]) -> tuple[Kind, int]:
    """What kind the data are, and what to divide them by."""
    low = min(array.min().item() for array in arrays.values())
    high = max(array.max().item() for array in arrays.values())
    whole = arrays["train"].dtype.kind != "f"
    binary = low >= 0 and high <= 1 and (whole or all(((a == 0) | (a == 1)).all() for a in arrays.values()))
    top = 255 if whole and high > 1 else 1
    grey = low >= 0 and high <= top
    came = f"these are {'whole numbers' if whole else 'floats'} from {low:.6g} to {high:.6g}"
    if wanted == "auto" and whole and not grey:
        raise DohyoError(f"whole numbers must be 0 and 1, or grey from 0 to 255, but {came}; for real-valued data give floats")
    kind: Kind = wanted if wanted != "auto" else "binary" if binary else "grey" if grey else "real"
    if kind == "binary" and not binary:
        raise DohyoError(f"binary data must be 0 and 1 only, but {came}; threshold them, or use kind grey or real")
    if kind == "grey" and not grey:
        raise DohyoError(f"grey data must be in [0, 1], or whole numbers from 0 to 255, but {came}; rescale, or use kind real")
    return kind, top if kind == "grey" else 1


def _flat(array: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return array.reshape(len(array), -1).astype(np.float32)


def _binarised(probability: Tensor, random: np.random.RandomState) -> Tensor:
    uniform = random.random_sample(probability.shape)  # in [0, 1), so that 0 stays 0 and 1 stays 1
    return torch.from_numpy(uniform < probability.numpy()).float()
