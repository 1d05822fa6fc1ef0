"""`load`: a data set by its name, or from a user's file or folder."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dohyo.errors import DohyoError, whole
from dohyo.lab.data.dataset import SPLITS, AnyKind, Dataset, Source, check_array, from_arrays, random_state
from dohyo.lab.data.images import read_images
from dohyo.lab.data.public import SETS
from dohyo.lab.data.readers import read_numpy
from dohyo.lab.data.tables import read_csv, read_parquet
from dohyo.names import check_choice, nearest

NAMES = tuple(SETS)
_FEWEST = 10  # data, a tenth of which is one


def load(
    name: str,
    data_dir: Path | None = None,
    kind: AnyKind = "auto",
    seed: int = 0,
    *,
    white: float | None = None,
    shape: tuple[int, ...] | None = None,
) -> Dataset:
    """A data set by its name, or from a user's file or folder.

    Args:
        name: digits, mnist, mnist-static, omniglot; a .npy, .npz, .csv or .parquet file; or a folder of images.
        data_dir: The folder of the named sets; by default DOHYO_DATA, or a cache that is filled from the network.
        kind: binary, grey or real; auto depends on the values.
        seed: For splitting a single array, and for the binarisation of validation and test data.
        white: The grey value that is white, by which grey data are divided; by default 1, 255, or an error if it is unclear.
        shape: The shape of one datum if it is not the file's own, such as (1, 8, 8) for a table with 64 columns.

    Example:
        >>> load("digits", kind="real").kind
        'real'
        >>> load("digit")
        Traceback (most recent call last):
        dohyo.DohyoError: unknown data set 'digit': did you mean 'digits'? the names are digits, ...; your own is a file ...
    """
    check_choice(kind, AnyKind, "kind of data")
    whole("the seed of the data", seed, 0)
    path = Path(name).expanduser()
    if name in SETS:  # (n, height, width): they get a dimension for the one channel, as convolutions expect it
        images = {split: x[:, None] for split, x in SETS[name](data_dir).items()}
    else:
        read = _reader(name, path)
    try:
        source = Source(images) if name in SETS else _divided(read(path), seed)
        return from_arrays(path.name, source, kind, seed, white, shape)
    except DohyoError as error:
        raise DohyoError(f"{path}: {error}") from error


def _reader(name: str, path: Path) -> Callable[[Path], Source]:
    """What reads a user's file or folder."""
    if name and path.is_dir():
        return read_images
    suffix = path.suffix.lower()
    if path.is_file() and suffix not in _READERS:
        raise DohyoError(f"{name}: the ending must be {', '.join(_READERS)}; or give a folder of images")
    if path.is_file():
        return _READERS[suffix]
    if suffix or path.name != name:
        raise DohyoError(f"{path}: there is no such file or folder")
    raise DohyoError(f"unknown data set {name!r}: {nearest(name, SETS)}; your own is a file ({', '.join(_READERS)}) or a folder")


def _read_arrays(path: Path) -> Source:
    """The arrays train, test and perhaps valid if a file has them, else all of its arrays."""

    def splits(names: list[str]) -> list[str]:
        return [split for split in SPLITS if split in names] if {"train", "test"} <= set(names) else names

    return Source(read_numpy(path, splits))


_READERS: dict[str, Callable[[Path], Source]] = {
    ".npy": _read_arrays,
    ".npz": _read_arrays,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}


def _divided(source: Source, seed: int) -> Source:
    """The splits of a user's data; those that are missing are a tenth of the data each, chosen at random."""
    arrays = dict(source.arrays)
    if len(arrays) != 1 and not {"train", "test"} <= set(arrays):
        raise DohyoError(f"holds {len(arrays)} arrays ({', '.join(arrays)}); keep one, or name them train, valid and test")
    for key, array in arrays.items():
        check_array(key, array, source.columns)
    if len(arrays) == 1:
        arrays = {"train": next(iter(arrays.values()))}
    x = arrays["train"]
    if len(x) < _FEWEST:
        raise DohyoError(f"shape {x.shape} is {len(x)} data; at least {_FEWEST} to train on are needed, as (data, ...)")
    order = random_state(seed, 0).permutation(len(x))
    missing = [split for split in SPLITS if split not in arrays]
    for split in missing:
        chosen, order = np.split(order, [len(x) // 10])
        arrays[split] = x[chosen]
    return dataclasses.replace(source, arrays=arrays | {"train": x[order]} if missing else arrays)
