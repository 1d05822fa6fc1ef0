"""`load`: a data set by its name, or from a user's file."""

from pathlib import Path
from typing import Any

import numpy as np

from dohyo.errors import DohyoError
from dohyo.lab.data.dataset import KINDS, SPLITS, Dataset, check_array, from_arrays, random_state
from dohyo.lab.data.mirrors import Progress
from dohyo.lab.data.public import SETS
from dohyo.lab.data.readers import Arrays, UnusableError, decoded
from dohyo.names import named

NAMES = tuple(SETS)
_FEWEST = 10  # data, so that a tenth of them is one


def load(
    name: str, data_dir: Path | None = None, kind: str = "auto", seed: int = 0, *, progress: Progress | None = None
) -> Dataset:
    """A data set by its name, or from a .npy or .npz file.

    Args:
        name: digits, mnist, mnist-static, omniglot, or the path of a file.
        data_dir: The folder that named sets are in; else what DOHYO_DATA says; else a cache that is filled from the network.
        kind: binary, grey or real; auto goes by the values.
        seed: Of the split of a single array, and of the binarisation of validation and test data.
        progress: Called during a download with the bytes done and their total, None where the mirror does not tell.

    Example:
        >>> load("digits", kind="real").kind
        'real'
        >>> load("digit")
        Traceback (most recent call last):
        ValueError: unknown data set 'digit': did you mean 'digits'? the names are digits, ..., or a .npy or .npz file
    """
    named(dict.fromkeys(KINDS), kind, "kind of data")
    if seed < 0:
        raise DohyoError(f"the seed of the data is {seed}; it must be 0 or more")
    path = Path(name).expanduser()
    if path.suffix not in (".npy", ".npz"):
        return _named_set(name, data_dir, kind, seed, progress)
    if not path.is_file():
        raise DohyoError(f"{path}: there is no such file")
    try:
        return from_arrays(path.name, _split(_read_numpy(path), seed), kind, seed)
    except ValueError as error:
        raise DohyoError(f"{path}: {error}") from error


def _named_set(name: str, data_dir: Path | None, kind: str, seed: int, progress: Progress | None) -> Dataset:
    if name not in SETS and Path(name).is_file():
        raise DohyoError(f"{name}: the ending must be .npy or .npz; save an array with numpy.save")
    try:
        make = named(SETS, name, "data set")
    except ValueError as error:
        raise DohyoError(f"{error}, or a .npy or .npz file") from None
    arrays = make(data_dir, progress)
    try:
        return from_arrays(name, arrays, kind, seed)
    except ValueError as error:
        raise DohyoError(f"{name}: {error}") from error


def _read_numpy(path: Path) -> Arrays:
    """The arrays `train`, `test` and perhaps `valid` of a file that has them, else all of its arrays."""
    try:
        return decoded(_arrays_of, path)
    except UnusableError as error:
        raise DohyoError(f"{error}; save plain arrays of numbers with numpy.save or numpy.savez") from error


def _arrays_of(path: Path) -> Arrays:
    with path.open("rb") as file:
        if not file.read(6).startswith((b"\x93NUMPY", b"PK")):  # NumPy would take it for a pickle and advise to trust it
            raise DohyoError("it does not begin as .npy and .npz files do")
        file.seek(0)
        loaded: Any = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"the array": loaded}
        keys = [key for key in SPLITS if key in loaded.files]
        return {key: loaded[key] for key in (keys if {"train", "test"} <= set(keys) else loaded.files)}


def _split(arrays: Arrays, seed: int) -> Arrays:
    """The splits that a user's file names; of those it does not name, each is a tenth of the data, chosen at random."""
    if len(arrays) != 1 and not {"train", "test"} <= set(arrays):
        raise DohyoError(f"holds {len(arrays)} arrays ({', '.join(arrays)}); keep one, or name them train, valid and test")
    for key, array in arrays.items():
        check_array(key, array)
    if len(arrays) == 1:
        arrays = {"train": next(iter(arrays.values()))}
    x = arrays["train"]
    if len(x) < _FEWEST:
        raise DohyoError(f"shape {x.shape} is {len(x)} data; at least {_FEWEST} to train on are needed, as (data, ...)")
    order = random_state(seed, 0).permutation(len(x))
    missing = [split for split in SPLITS if split not in arrays]
    for split in missing:
        chosen, order = np.split(order, [len(x) // 10])
        arrays = arrays | {split: x[chosen]}
    return arrays | {"train": x[order]} if missing else arrays
