"""Devices and processes, through Lightning Fabric, one writer for each folder, and how a signal ends the work."""

import atexit
import contextlib
import datetime
import logging
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, SoftFileLock, Timeout
from lightning_fabric import Fabric
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.folder import LOCK, check_places
from dohyo.lab.training.config import Device
from dohyo.names import check_choice

T = TypeVar("T")
_LATEST = 65.0  # seconds: NFS may remember for a minute that there was no such file


def launch(device: str = "auto") -> Fabric:
    """A Fabric on one device, or in one of the processes that torchrun has started."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // processes
    check_choice(device, Device, "device")
    for name, there, kind in (("cuda", torch.cuda.is_available, "CUDA"), ("mps", torch.backends.mps.is_available, "Apple")):
        if device == name and not there():
            raise DohyoError(f"device is {name}, but torch sees no {kind} GPU; use device 'cpu'")
    with warnings.catch_warnings(), quiet("lightning_fabric", logging.WARNING):  # it advises to set what `programs` sets
        warnings.simplefilter("ignore")  # advice on strategies that are not used here
        strategy = "ddp" if processes > 1 else "auto"
        fabric = Fabric(accelerator=device, devices=processes, num_nodes=nodes, strategy=strategy)
        fabric.launch()
    if fabric.world_size > 1:
        atexit.register(_part)  # gloo's threads abort a process that ends before them
    return fabric


@contextlib.contextmanager
def setting(read: Callable[[], T], write: Callable[[T], object], value: T) -> Iterator[None]:
    """Give a global setting this value, and then the one it had."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def quiet(name: str, level: int) -> contextlib.AbstractContextManager[None]:
    """Silence a library's logger below a level."""
    log = logging.getLogger(name)
    return setting(lambda: log.level, log.setLevel, level)


def _part() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(fabric: Fabric) -> None:
    """Wait for the other processes, then disconnect, so that none ends while another is still communicating with it."""
    if fabric.world_size > 1:
        fabric.barrier()
        _part()


def on_first(fabric: Fabric | None, act: Callable[[], None]) -> None:
    """Call `act` on the first process; an error that it raises there is raised on all, so that none waits for the others."""
    problem: Exception | None = None
    if fabric is None or fabric.is_global_zero:
        try:
            act()
        except (DohyoError, OSError) as error:
            problem = error
    if fabric is not None and fabric.world_size > 1:
        problem = fabric.broadcast(problem)
    if problem is not None:
        raise problem


def check_common(fabric: Fabric, path: Path) -> None:
    """A DohyoError on every process unless all of them see a file that the first has made; on some machines it comes late."""
    if fabric.world_size == 1:
        return
    end = time.monotonic() + _LATEST
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.2)
    if not all(gather(fabric, path.exists())):
        raise DohyoError(f"{path.parent} is not the same folder for all processes; give one that all machines share")


def one_thread() -> contextlib.AbstractContextManager[None]:
    """Run torch's CPU code on this thread only, for small work while a GPU waits: waking up other threads has taken 15 ms."""
    return setting(torch.get_num_threads, torch.set_num_threads, 1)


def sum_over_processes(fabric: Fabric, tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor summed over the processes, in one flat all-reduce."""
    if fabric.world_size == 1:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    total: Tensor = fabric.all_reduce(flat, reduce_op="sum")  # type: ignore[assignment]
    parts = total.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def gather(fabric: Fabric, value: T) -> list[T]:
    """The values of all processes, in order, on every process."""
    if fabric.world_size == 1:
        return [value]
    values: list[T | None] = [None] * fabric.world_size
    torch.distributed.all_gather_object(values, value)
    return [v for v in values if v is not None]


@contextlib.contextmanager
def interruptible(*signals: signal.Signals) -> Iterator[list[int]]:
    """These signals raise KeyboardInterrupt; those seen are listed, because a library's callback may swallow it.

    Where Python itself lets no exception through, as in `__del__`, the signal comes again a moment later.
    """
    seen: list[int] = []
    again: list[threading.Timer] = []
    ours = threading.get_ident()

    def interrupt(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def lost(what: Any) -> None:
        if seen and isinstance(what.exc_value, KeyboardInterrupt):
            again.append(threading.Timer(0.01, signal.pthread_kill, (ours, seen[-1])))
            again[-1].daemon = True
            again[-1].start()
        else:
            hook_before(what)

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.signal(number, interrupt) for number in signals}
    hook_before, sys.unraisablehook = sys.unraisablehook, lost
    try:
        yield seen
    finally:
        for timer in again:
            timer.cancel()
        sys.unraisablehook = hook_before
        for number, handler in before.items():
            signal.signal(number, handler)


class Busy(DohyoError):  # noqa: N818
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock with this file, and sign it; a `Busy` that names the holder if another process has it, unless it may `wait`.

    It is a lock of the operating system, which ends with the process that holds it; whoever holds it may lock it again. It is
    `flock` by way of `filelock`, on a file that is never removed, because removing it would let two processes hold it at once.
    Linux passes `flock` on to NFS and to the parallel file systems of clusters; where a file system has no such locks, filelock
    creates a marker file in its place, which a kill on another machine leaves behind, and the message says what to remove. Nobody
    needs a lock to read: every file is replaced as a whole.
    """
    check_places(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.resolve(), is_singleton=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is only a marker file
            lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        holder = _holder(path) + (f"; if it is gone, remove {path}" if isinstance(lock, SoftFileLock) else "")
        raise Busy(f"{path.parent} is being written by {holder}; wait for it to end, or choose another folder") from None
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


def matmul_precision(config: Any, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Use TF32 in matrix products on a CUDA GPU if the config asks for it."""
    read = torch.get_float32_matmul_precision
    return setting(read, torch.set_float32_matmul_precision, "high" if device.type == "cuda" and config.tf32 else read())
