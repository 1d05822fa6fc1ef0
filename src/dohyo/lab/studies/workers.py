"""Each cell in a process of its own, on this machine (`--workers`) or on another (`--scheduler`).

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
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

from dohyo.errors import DohyoError, in_one_line
from dohyo.lab.folder import versions
from dohyo.lab.studies.study import LOOK_EVERY, Advance, Study, do_cell

_SAY_EVERY = 0.2  # seconds from one share of a cell to the next
_GRACE = 10.0  # seconds for a process to end in order
_FORKS = hasattr(os, "fork")
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
_LOCK = threading.Lock()  # multiprocessing loses the status of a process that two threads ask for at a time


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
    stopped: list[int] = []
    said = 0.0

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    def advance(share: float) -> None:
        nonlocal said
        if stopped:  # the exception was lost in a callback
            raise KeyboardInterrupt
        if time.monotonic() - said > _SAY_EVERY:
            said = time.monotonic()
            news.send(float(share))

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, who stops all
    try:
        signal.signal(signal.SIGTERM, stop)
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
