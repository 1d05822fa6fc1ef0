"""What a stranger's file claims to hold, checked before memory is taken for it: arrays, checkpoints, and numbers in general."""

import contextlib
import functools
import math
import os
import pickletools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from dohyo.errors import DohyoError

_COPIES, _SMALLEST = 4, 3  # of the data while they are split and made float32; whole numbers of one byte grow in that
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container

_MADE = re.compile(r"torch \w+Storage|torch Size|torch._utils _rebuild_(tensor_v2|parameter)|collections OrderedDict")


def check_memory(numbers: int, itemsize: int, instead: str = "give fewer data") -> None:
    """A DohyoError if so many numbers of so many bytes are too many for this machine."""
    needed, memory = _COPIES * numbers * max(itemsize, _SMALLEST) / 1e9, _memory() / 1e9
    if needed > memory:
        raise DohyoError(f"{numbers} numbers take up to {needed:.1f} GB of memory, and there are {memory:.1f}; {instead}")


def check_claims(path: Path, choose: Callable[[list[str]], list[str]]) -> None:
    """A DohyoError if an array would be larger than what follows its header, or all that are chosen than the memory allows."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return check_memory(*_claimed("the array", file, path.stat().st_size))
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        claims = []
        for name in choose(list(members)):
            if name in members:
                with archive.open(members[name]) as part:
                    claims.append(_claimed(name, part, members[name].file_size))
    most = max((size for _, size in claims), default=1)
    return check_memory(sum(numbers for numbers, _ in claims), most, "give fewer data, or name a smaller array")


def check_checkpoint(path: Path) -> None:
    """A DohyoError if a file is not as `torch.save` writes tensors in plain containers, of no more bytes than the file has.
    `torch.load` with `weights_only` runs no code, but it unpacks what is compressed, and makes a `bytearray` of any length."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise DohyoError("it is compressed, as no checkpoint is")
        check_memory(sum(member.file_size for member in members), 1)
        for member in members:
            if member.filename.endswith(".pkl"):
                for operation, name, _ in pickletools.genops(archive.read(member)):
                    kind = str(name) if operation.name == "GLOBAL" else ""
                    if operation.name == "STACK_GLOBAL" or (kind and not _MADE.fullmatch(kind)):
                        raise DohyoError(f"it holds {kind or 'objects'!r:.80}, as no checkpoint does")


def _claimed(name: str, file: IO[bytes], length: int) -> tuple[int, int]:
    """How many numbers the header of an array promises, and the bytes of each."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    if kind.hasobject:
        raise DohyoError("it holds Python objects, which are not read here")
    if any(size < 0 for size in shape):
        raise DohyoError(f"its shape is {shape}")
    numbers = math.prod(map(int, shape))
    there = length - file.tell()
    if numbers * kind.itemsize > there:
        raise DohyoError(f"{name} should have {numbers * kind.itemsize} bytes, but {there} follow its header")
    return numbers, kind.itemsize


@functools.cache
def _memory() -> float:
    """The machine's memory in bytes, or that of a container in it; no limit where the system does not tell."""
    found = [float("inf")]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        found.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    for name in _LIMITS:
        with contextlib.suppress(ValueError, OSError):  # ValueError: "max", which is no limit
            found.append(float(Path(name).read_text(encoding="utf-8")))
    return min(found)
