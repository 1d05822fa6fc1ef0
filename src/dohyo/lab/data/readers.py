"""How files of arrays are read and checked; errors do not name the file: the caller knows if it is a path or an address."""

import gzip
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dohyo.errors import DohyoError
from dohyo.files import read_whole
from dohyo.lab.claims import check_claims, check_memory
from dohyo.lab.data.dataset import Arrays

Reader = Callable[[Path], Arrays]

PICTURE = (28, 28)
_LARGEST = 2**27  # bytes of a file of a public data set, once decompressed


class UnusableError(DohyoError):
    """A file, or what a mirror sent in its place, is damaged or not the right one."""


def decoded(read: Reader, path: Path) -> Arrays:
    """`read(path)`; decoders raise almost anything on damaged bytes, and all of it becomes UnusableError."""
    try:
        return read(path)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnusableError(f"cannot be read ({reason})") from error


def read_numpy(path: Path, choose: Callable[[list[str]], list[str]]) -> Arrays:
    """The arrays of a .npy file ("the array") or, of those in a .npz file, the ones chosen among their names."""

    def read(path: Path) -> Arrays:
        with path.open("rb") as file:
            if not file.read(6).startswith((b"\x93NUMPY", b"PK")):  # NumPy would advise to load it as a pickle
                raise DohyoError("it does not begin like a .npy or .npz file")
            file.seek(0)
            check_claims(path, choose)
            loaded: Any = np.load(file, allow_pickle=False)
            return {"the array": loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in choose(loaded.files)}

    try:
        return decoded(read, path)
    except UnusableError as error:
        raise DohyoError(f"{error}; is it truncated? Save plain arrays of numbers with numpy.save or numpy.savez") from error


def read_idx(path: Path, sha256: str) -> Arrays:
    """Pictures in MNIST's gzipped idx format: 16 bytes of header, then pixels.
    The checksum is that of the decompressed bytes, header included, because mirrors compress them differently."""
    with gzip.open(path) as file:
        raw = file.read(_LARGEST)
    _check(raw, sha256)
    return {"x": np.frombuffer(raw, np.uint8, offset=16).reshape(-1, *PICTURE) / np.float32(255)}


def read_mat(path: Path, sha256: str) -> Arrays:
    """Binary pictures in a MATLAB file under the key X. The checksum is of the pixels as bytes, row by row."""
    return _binary(_loadmat(path, ["X"])["X"], sha256)


def read_amat(path: Path, sha256: str) -> Arrays:
    """Binary pictures as text, "0 1 0 ...", one line each. The checksum is the same as for a MATLAB file."""
    text = np.frombuffer(read_whole(path, _LARGEST), np.uint8)
    digits = text[text > ord(" ")]
    if len(digits) % 784 or ((digits != ord("0")) & (digits != ord("1"))).any():
        raise DohyoError("holds something other than lines of 784 zeros and ones")
    return _binary((digits - np.uint8(ord("0"))).reshape(-1, 784), sha256)


def read_omniglot(path: Path, sha256: str) -> Arrays:
    """Grey pictures, uint8, in a .npz file under `train` and `test`. The checksum is that of both as bytes."""
    splits = ["train", "test"]
    check_claims(path, lambda names: splits)
    with path.open("rb") as file, np.load(file, allow_pickle=False) as loaded:
        arrays = {split: np.ascontiguousarray(loaded[split]) for split in splits}
    _check(arrays["train"].tobytes() + arrays["test"].tobytes(), sha256)
    return {split: array.reshape(-1, *PICTURE) / np.float32(255) for split, array in arrays.items()}


def read_chardata(path: Path, train: int, test: int) -> Arrays:
    """Burda's OMNIGLOT: floats in [0, 1], one picture in each column, itself stored column by column.
    Its checksum is not known here; only sizes and range are checked."""
    loaded = _loadmat(path, ["data", "testdata"])
    arrays = {}
    for split, key, count in (("train", "data", train), ("test", "testdata", test)):
        columns = loaded[key]
        if columns.shape != (784, count) or not (columns.min() >= 0 and columns.max() <= 1):
            raise DohyoError(f"{key} is not a matrix of 784 by {count} numbers in [0, 1]")
        arrays[split] = np.ascontiguousarray(columns.T.reshape(-1, *PICTURE).transpose(0, 2, 1))
    return arrays


def _loadmat(path: Path, names: list[str]) -> dict[str, Any]:
    from scipy.io import loadmat, whosmat  # type: ignore[import-untyped]  # here, because it is slow to import

    for name, shape, _ in whosmat(path):
        if name in names:
            check_memory(math.prod(shape), 8)
    return dict(loadmat(path, variable_names=names))


def _binary(pixels: NDArray[Any], sha256: str) -> Arrays:
    pixels = np.ascontiguousarray(pixels, dtype=np.uint8)
    _check(pixels.tobytes(), sha256)
    return {"x": pixels.reshape(-1, *PICTURE)}


def _check(content: bytes, sha256: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DohyoError(f"the sha256 of its content is {found[:12]}... and must be {sha256[:12]}...")
