"""Devices and processes, through Lightning Fabric."""

import atexit
import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor

from dohyo.errors import DohyoError
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
