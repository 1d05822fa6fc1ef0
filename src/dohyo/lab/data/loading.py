"""`load`: a data set by its name, or from a user's file."""

from pathlib import Path
from typing import Literal, get_args

import numpy as np

from dohyo.errors import DohyoError, whole
from dohyo.lab.data.dataset import SPLITS, Dataset, Kind, check_array, from_arrays, random_state
from dohyo.lab.data.public import SETS
from dohyo.lab.data.readers import Arrays, read_numpy
from dohyo.names import named, nearest

NAMES = tuple(SETS)
_FEWEST = 10  # data, a tenth of which is one


def load(name: str, data_dir: Path | None = None, kind: Kind | Literal["auto"] = "auto", seed: int = 0) -> Dataset:
    """A data set by its name, or from a .npy or .npz file.

    Args:
        name: digits, mnist, mnist-static, omniglot, or the path of a file.
        data_dir: The folder of the named sets; by default DOHYO_DATA, or a cache that is filled from the network.
        kind: binary, grey or real; auto depends on the values.
        seed: For splitting a single array, and for the binarisation of validation and test data.

    Example:
        >>> load("digits", kind="real").kind
        'real'
        >>> load("digit")
        Traceback (most recent call last):
        dohyo.DohyoError: unknown data set 'digit': did you mean 'digits'? the names are digits, ..., or a .npy or .npz file
    """
    named(dict.fromkeys(["auto", *get_args(Kind)]), kind, "kind of data")
    whole("the seed of the data", seed, 0)
    path = Path(name).expanduser()
    if name not in SETS and path.suffix not in (".npy", ".npz"):
        if path.is_file():
            raise DohyoError(f"{name}: the ending must be .npy or .npz; save an array with numpy.save")
        raise DohyoError(f"unknown data set {name!r}: {nearest(name, SETS)}, or a .npy or .npz file")
    if name not in SETS and not path.is_file():
        raise DohyoError(f"{path}: there is no such file")
    arrays = SETS[name](data_dir) if name in SETS else None
    try:
        return from_arrays(path.name, _split(read_numpy(path, _splits), seed) if arrays is None else arrays, kind, seed)
    except DohyoError as error:
        raise DohyoError(f"{path}: {error}") from error


def _splits(names: list[str]) -> list[str]:
    """train, test and perhaps valid if a file has them, else all of its arrays."""
    return [split for split in SPLITS if split in names] if {"train", "test"} <= set(names) else names


def _split(arrays: Arrays, seed: int) -> Arrays:
    """The splits in a user's file; those that it lacks are a tenth of the data each, chosen at random."""
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
