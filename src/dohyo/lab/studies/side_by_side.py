"""Several cells of a study at a time, each in a process of its own, on this machine (`--workers`) or on others (`--scheduler`).

The processes are forked from one that has imported everything and done nothing yet; where nothing can be forked, they are new. A
process that dies is noticed by the end of its pipe, and harms no other. If its parent dies, it stops.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, Self

import torch

from dohyo.errors import DohyoError, in_one_line, whole
from dohyo.lab.folder import versions
from dohyo.lab.studies.study import LOOK_EVERY, Advance, Reproduction, Study, do_cell
from dohyo.lab.training.processes import interruptible

_SAY_EVERY = 0.2  # seconds from one share of a cell to the next
_GRACE = 10.0  # seconds for a process to end in order
_FORKS = hasattr(os, "fork")
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
_LOCK = threading.Lock()  # multiprocessing loses the status of a process that two threads ask for at a time


class Watcher(Protocol):
    """Sees how far the cells are, and how they end."""

    def advance(self, name: str, share: float) -> None: ...

    def end(self, name: str, problem: str | None) -> None: ...


# Begins a cell, or puts it into a queue; a result of False says that somebody else is doing it.
Submit = Callable[[str, Advance], "Future[bool]"]


def reproduce_side_by_side(work: Reproduction, submit: Submit, watcher: Watcher) -> dict[str, str]:
    """Do the cells that are not done yet, and write study.json after each; returns why those failed that did."""
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
        try:
            if not found.result():
                begin(name)  # behind the others
                continue
        except CellError as error:  # other errors concern all cells, and are raised
            failed[name] = str(error)
        left.remove(name)
        watcher.end(name, failed.get(name))
        work.write(last=not left)
    return failed


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


class CellError(DohyoError):
    """A cell failed, or its process died."""


@dataclass(frozen=True)
class Job:
    """A study, for processes that may be on other machines.

    Attributes:
        study: Pickled, because only the process of a cell must be able to import the study's module.
        threads: Of torch in each process; None for torch's own choice.
        here: What relative paths begin at.
        version: Of dohyo.
    """

    study: bytes
    folder: Path
    threads: int | None
    here: Path
    version: str

    @classmethod
    def of(cls, study: Study[Any], folder: Path, threads: int | None = None) -> Self:
        return cls(pickle.dumps(study), folder.resolve(), threads, Path.cwd(), versions()["dohyo"])


class Workers:
    """Does cells, one in each thread that calls `do`; the processes can be found by their name, the label."""

    def __init__(self, job: Job, label: str = "dohyo") -> None:
        self.job, self.label = job, label
        self._running, self._stopped = set[Any](), False
        if _FORKS:
            _CONTEXT.set_forkserver_preload([__name__])
            resource_tracker.ensure_running()  # else it would be started below, and let Ctrl-C through again
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the server inherits it, and imports in peace
            try:
                forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def do(self, name: str, advance: Advance) -> bool:
        """Do a cell; False if somebody else's process is doing it. A `CellError` if it fails, or if its process dies."""
        (news, ours), (errors, theirs) = (_CONTEXT.Pipe(duplex=False) for _ in range(2))
        process = _CONTEXT.Process(target=_run, args=(self.job, name, ours, theirs), name=self.label)
        with _LOCK, ours, theirs:  # closed here, so that the pipes end with the process
            if self._stopped:
                raise CellError("stopped")
            process.start()
            self._running.add(process)
        found: Any = None
        with news, errors, suppress(EOFError):
            repeating = threading.Thread(target=_repeat, args=(os.dup(errors.fileno()),), daemon=True)
            repeating.start()
            while isinstance(found := news.recv(), float):
                advance(found)
                found = None
        status = self._ended(process)
        repeating.join(1.0)  # no longer, for it may have left processes of its own
        if not isinstance(found, bool):
            raise CellError(found or ("stopped" if self._stopped else _how(status)))
        if not found:
            time.sleep(LOOK_EVERY)
        return found

    def stop(self) -> None:
        """End all processes, in order if they can, and begin no more."""
        with _LOCK:
            self._stopped = True
            running = list(self._running)
        for process in running:
            process.terminate()
        end = time.monotonic() + _GRACE
        try:
            while self._running and time.monotonic() < end:
                time.sleep(0.01)
        finally:  # also after a second Ctrl-C
            for process in running:
                process.kill()

    def _ended(self, process: Any) -> int:
        """Its exit status."""
        while True:
            with _LOCK:
                if (status := process.exitcode) is not None:
                    self._running.discard(process)
                    return int(status)
            time.sleep(0.01)


def _how(status: int) -> str:
    """How a process died."""
    if status < 0:
        return f"its process was killed by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _repeat(errors: int) -> None:
    """What a process writes, on our own standard error, where a progress bar makes room for it."""
    with open(errors, "rb") as lines:
        for line in lines:
            sys.stderr.write(line.decode(errors="replace"))


def _run(job: Job, name: str, news: Connection, errors: Connection) -> None:
    """The process of a cell: sends the share that is done, and then whether it was done or why it failed."""
    os.dup2(errors.fileno(), 2)
    os.dup2(2, 1)
    said = 0.0

    def advance(share: float) -> None:
        nonlocal said
        if stopped:  # the exception was lost in a callback
            raise KeyboardInterrupt
        if time.monotonic() - said > _SAY_EVERY:
            said = time.monotonic()
            news.send(float(share))

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, who stops all
    try:
        with interruptible(signal.SIGTERM) as stopped:
            threading.Thread(target=_end_with_parent, daemon=True).start()
            news.send(_outcome(job, name, advance))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(128 + signal.SIGTERM)


def _outcome(job: Job, name: str, advance: Advance) -> bool | str:
    try:
        if job.here.is_dir():  # the machine may be another
            os.chdir(job.here)
            sys.path.insert(0, str(job.here))
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        return do_cell(pickle.loads(job.study), name, job.folder, advance)
    except (DohyoError, OSError) as error:
        return " ".join(str(error).split())
    except Exception as error:
        traceback.print_exc()
        return in_one_line(error)[:300]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
