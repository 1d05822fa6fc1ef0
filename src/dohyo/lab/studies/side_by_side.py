"""Several cells of a study at a time, on this machine or wherever else a cell can be submitted."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from dohyo.errors import DohyoError, whole
from dohyo.lab.studies.study import Advance, Reproduction, Study
from dohyo.lab.studies.workers import CellError, Job, Workers


class Watcher(Protocol):
    """Sees how far the cells are, and how they end."""

    def advance(self, name: str, share: float) -> None: ...

    def end(self, name: str, problem: str | None) -> None: ...


Submit = Callable[[str, Advance], "Future[bool]"]


def reproduce_side_by_side(work: Reproduction, submit: Submit, watcher: Watcher) -> dict[str, str]:
    """Do the cells that are not done yet, and write study.json after each; returns why those failed that did.

    Args:
        submit: Begins a cell, or puts it into a queue; a result of False says that somebody else is doing it.
    """
    news: SimpleQueue[tuple[str, Any]] = SimpleQueue()

    def begin(name: str) -> None:
        submit(name, lambda share: news.put((name, share))).add_done_callback(lambda future: news.put((name, future)))

    left, failed = [name for name in work.wanted if name not in work.done], dict[str, str]()
    for name in left:
        begin(name)
    if not left:
        work.write(last=True)
    while left:
        name, found = news.get()
        if isinstance(found, float):
            watcher.advance(name, found)
            continue
        problem = _problem(found)
        if problem is None and not found.result():
            begin(name)  # behind the others
            continue
        left.remove(name)
        if problem is not None:
            failed[name] = problem
        watcher.end(name, problem)
        work.write(last=not left)
    return failed


def _problem(future: "Future[bool]") -> str | None:
    """Why a cell failed; other errors than a cell's concern all, and are raised."""
    error = future.exception()
    if error is not None and not isinstance(error, CellError):
        raise error
    return None if error is None else str(error)


@contextmanager
def on_this_machine(study: Study[Any], folder: Path, workers: int) -> Iterator[Submit]:
    """So many processes, between which torch's threads are divided."""
    whole("workers", workers)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DohyoError("--workers starts processes of its own; leave torchrun out")
    processes = Workers(Job.of(study, folder, threads=max(1, torch.get_num_threads() // workers)))
    with ThreadPoolExecutor(workers) as threads:
        try:
            yield lambda name, advance: threads.submit(processes.do, name, advance)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            processes.stop()
