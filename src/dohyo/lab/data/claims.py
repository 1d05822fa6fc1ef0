"""What a .npy or .npz file claims to hold, checked before memory is taken for it."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from dohyo.errors import DohyoError

_SHARE = 4  # of the memory: the arrays are copied while they are split and converted


def check_claims(path: Path, choose: Callable[[list[str]], list[str]]) -> None:
    """A DohyoError if an array would be larger than what follows its header, or all that are chosen than the memory allows."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return _check("the array", _claimed(file), path.stat().st_size - file.tell())
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        chosen = [name for name in choose(list(members)) if name in members]
        for name in chosen:
            with archive.open(members[name]) as part:
                _check(name, _claimed(part), members[name].file_size - part.tell())
        total, memory = sum(members[name].file_size for name in chosen), _memory()
        if total > memory / _SHARE:
            most = f"{memory / _SHARE / 1e9:.1f} GB is the most on this machine"
            raise DohyoError(f"its arrays take {total / 1e9:.1f} GB, and {most}; give fewer data, or name a smaller array")
    return None


def _claimed(file: IO[bytes]) -> int:
    """The bytes that the header of an array promises."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    if kind.hasobject:
        raise DohyoError("it holds Python objects, which are not read here")
    if any(size < 0 for size in shape):
        raise DohyoError(f"its shape is {shape}")
    size = kind.itemsize
    for each in shape:
        size *= int(each)
    return size


def _check(name: str, claimed: int, there: int) -> None:
    if claimed > there:
        raise DohyoError(f"{name} should have {claimed} bytes, but {there} follow its header")


def _memory() -> float:
    """The machine's memory in bytes; no limit where the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")
