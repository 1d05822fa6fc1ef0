"""Files that are either complete or absent, and values that JSON can hold."""

import contextlib
import math
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dohyo.errors import DohyoError

_LARGEST = 2**26  # bytes of a file that is read as a whole
_TEMPORARY = re.compile(r"\.dohyo-[0-9a-f]{16}-(.+)", re.DOTALL)  # nobody else's file has such a name


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` if the block succeeds and is deleted if it fails."""
    path = output_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".dohyo-{secrets.token_hex(8)}-{path.name}")
    with temporary.open("xb") as held:  # with the permissions that the user's umask gives to any new file
        with contextlib.suppress(OSError):  # a file system without locks
            _lock(held)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """The same for a new folder with everything in it."""
    temporary = path.with_name(f".dohyo-{secrets.token_hex(8)}-{path.name}")
    temporary.mkdir()
    try:
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_whole(path: Path, largest: int = _LARGEST) -> bytes:
    """What a file holds; a DohyoError if it is a device or a pipe, or too large."""
    size = regular(path).stat().st_size
    if size > largest:
        raise DohyoError(f"{path}: has {size} bytes, and {largest} is the most; is it the right file?")
    return path.read_bytes()


def regular(path: Path) -> Path:
    """The same path; a DohyoError if a device or a pipe is there, which may never end, or never begin."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DohyoError(f"{path}: is no regular file; put a file there, or remove it")
    return path


def output_file(path: Path) -> Path:
    """Where a file is to be written: behind symbolic links. A DohyoError if something other than a file is there."""
    found = resolved(path)
    if found.exists() and not found.is_file():
        kind = "a folder" if found.is_dir() else "no regular file, but a device, a pipe or a socket"
        raise DohyoError(f"{path}: is {kind}; choose another name for the file")
    return found


def resolved(path: Path) -> Path:
    """The absolute path behind symbolic links; a DohyoError if they lead in a circle."""
    try:
        found = path.resolve()
        circle = found.is_symlink()
    except ValueError as error:
        raise DohyoError(f"{str(path)!r:.80} is not a path ({error}); name a file") from error
    except (RuntimeError, OSError):  # RuntimeError: what pathlib raises for a circle before Python 3.13
        circle = True
    if circle:
        raise DohyoError(f"{path}: is a symbolic link that leads to itself; name the file itself")
    return found


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete the temporary files of killed processes, of one file or of all; folders too, so be the only one who makes them."""
    for path in folder.glob(".dohyo-*"):
        ours = _TEMPORARY.fullmatch(path.name)
        if not ours or name not in (None, ours[1]) or path.is_symlink():
            continue
        with contextlib.suppress(OSError):  # somebody else has removed it, or is writing it
            if path.is_dir():
                shutil.rmtree(path)
            else:
                with path.open("rb") as file:
                    _lock(file)
                    path.unlink()


def _lock(file: IO[bytes]) -> None:
    """Mark a temporary file as one that is being written, until it is closed or the process ends; an OSError if it is one."""
    if sys.platform != "win32":  # which does not let anybody delete an open file
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: null for numbers that are not finite, lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value
