"""One writer for each folder: a lock of the operating system, which ends with the process that holds it.

The lock is `flock` by way of `filelock`, on a file that is never removed, because removing it would let two processes hold it
at once. Linux passes `flock` on to NFS and to the parallel file systems of clusters; where a file system has no such locks,
filelock creates a marker file in its place, which a kill on another machine leaves behind, and the message says what to remove.
Nobody needs a lock to read: every file is replaced as a whole.
"""

import contextlib
import datetime
import os
import platform
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout
from lightning_fabric import Fabric

from dohyo.errors import DohyoError
from dohyo.lab.folder import LOCK, check_places
from dohyo.lab.training.processes import on_first


class Busy(DohyoError):  # noqa: N818
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock with this file, and sign it; a `Busy` that names the holder if another process has it.

    Whoever holds it may lock it again. If `wait`, there is no `Busy`: the lock is waited for.
    """
    check_places(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.resolve(), is_singleton=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is only a marker file
            lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        stale = f"; if it is gone, remove {path}" if isinstance(lock, SoftFileLock) else ""
        raise Busy(
            f"{path.parent} is being written by {_holder(path)}{stale}; wait for it to end, or choose another folder"
        ) from None
    native = not isinstance(lock, SoftFileLock)
    try:
        if native:
            now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
            path.write_text(f"process {os.getpid()} on {platform.node()} since {now}\n", encoding="utf-8")
        yield
    finally:
        if native and lock.lock_counter == 1:
            with contextlib.suppress(OSError):
                os.truncate(path, 0)
        lock.release()


@contextlib.contextmanager
def only_writer(*folders: Path, fabric: Fabric | None = None) -> Iterator[None]:
    """Hold the locks of these folders, the first process for all that torchrun has started."""
    with contextlib.ExitStack() as held:

        def hold() -> None:
            for folder in folders:
                held.enter_context(locked(folder / LOCK))

        on_first(fabric, hold)
        yield


def _holder(path: Path) -> str:
    """Who has signed the lock; a moment passes between holding it and signing it."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            if name := " ".join(path.read_text(encoding="utf-8", errors="replace").split())[:200]:
                return name
        time.sleep(0.05)
    return "another process"
