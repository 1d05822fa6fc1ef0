"""Cells on a Dask cluster whose machines share the study's folder: `dask scheduler` and `dask worker`, started by the user.

Each thread of a Dask worker does one cell at a time, in a process of its own as on one machine. If a Dask worker is lost, Dask
gives its cells to others, which go on from the checkpoints.
"""

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from distributed import Client, KilledWorker, Security, get_worker
from distributed.comm import connect

from dohyo.errors import DohyoError, in_one_line
from dohyo.lab.folder import STUDY, versions
from dohyo.lab.studies.side_by_side import CellError, Job, Submit, Workers
from dohyo.lab.studies.study import Advance, Study
from dohyo.lab.training.processes import quiet

_CONNECT = 5.0  # seconds to wait for a scheduler


@contextmanager
def on_cluster(study: Study[Any], folder: Path, address: str, say: Callable[[str], None]) -> Iterator[Submit]:
    """Connect to a scheduler, and submit cells to its workers; `say` is called with what the user should know."""
    with (
        quiet("distributed", logging.CRITICAL),  # what concerns the user is said in one line
        quiet("distributed.client", logging.CRITICAL),
        closing(_connect(address)) as client,
    ):
        if not _check_versions(client):
            say(f"there is no Dask worker yet, and the cells wait for one; start some with `dask worker {address}`")
        cells = _Cells(client, Job.of(study, folder), address)
        try:
            yield cells.submit
        finally:
            cells.stop()


class _Cells:
    """The cells that were submitted."""

    def __init__(self, client: Client, job: Job, address: str) -> None:
        self.client, self.job, self.address = client, job, address
        self.label = f"dohyo-{uuid4().hex}"
        self.pending: dict[str, tuple[Any, Advance]] = {}
        client.subscribe_topic(self.label, lambda event: self._advance(*event[1]))

    def submit(self, name: str, advance: Advance) -> "Future[bool]":
        ours: Future[bool] = Future()
        theirs = self.client.submit(_do, self.job, name, self.label, pure=False)
        self.pending[name] = theirs, advance
        theirs.add_done_callback(partial(self._settle, name, ours))
        return ours

    def stop(self) -> None:
        """Take back what has not begun, and end the processes of the rest."""
        if self.pending and self.client.status == "running":
            self.client.cancel([theirs for theirs, _ in self.pending.values()])
            while any(self.client.run(_stop, self.label, on_error="ignore").values()):
                time.sleep(0.1)

    def _advance(self, name: str, share: float) -> None:
        if name in self.pending:
            self.pending[name][1](share)

    def _settle(self, name: str, ours: "Future[bool]", theirs: Any) -> None:
        """Dask's future has ended."""
        self.pending.pop(name)
        error = theirs.exception() if theirs.status == "error" else None
        if theirs.status == "finished":
            ours.set_result(theirs.result())
        elif isinstance(error, KilledWorker):
            ours.set_exception(CellError("every Dask worker that tried it died"))
        elif error is not None:
            ours.set_exception(error if isinstance(error, CellError) else CellError(in_one_line(error)))
        else:
            ours.set_exception(
                DohyoError(f"the scheduler at {self.address} is gone; once it is back, the same command continues")
            )


def _connect(address: str) -> Client:
    try:
        asyncio.run(asyncio.wait_for(_greet(address), _CONNECT + 1))
        return Client(address, timeout=_CONNECT, set_as_default=False)
    except Exception as error:  # whatever another kind of server may answer
        raise DohyoError(
            f"no Dask scheduler answers at {address} ({in_one_line(error)[:120]}); start one with `dask scheduler`, and give the "
            "address that it prints"
        ) from error


async def _greet(address: str) -> None:
    """Connect and part, because a client would wait for ever for another kind of server to answer."""
    greeted = await connect(address, timeout=_CONNECT, **Security().get_connection_args("client"))
    await greeted.close()


def _check_versions(client: Client) -> int:
    """How many workers there are; a DohyoError if one has another dohyo, or none."""
    answers = client.run(_version, on_error="return")
    for address, found in answers.items():
        if found != _version():
            what = f"cannot run dohyo ({in_one_line(found)[:200]})" if isinstance(found, Exception) else f"has dohyo {found}"
            raise DohyoError(f"the Dask worker {address} {what}; it needs dohyo {_version()}, as this machine has")
    return len(answers)


def _version() -> str:
    return versions()["dohyo"]


def _do(job: Job, name: str, label: str) -> bool:
    """On a Dask worker: do a cell in a process of its own."""
    worker = get_worker()
    if _version() != job.version:  # it came late
        raise CellError(f"the Dask worker {worker.address} has dohyo {_version()}; it needs {job.version}")
    if not (job.folder / STUDY).exists():
        raise CellError(f"the Dask worker {worker.address} does not see {job.folder}; all machines must share the study's folder")
    multiprocessing.current_process().daemon = False  # Dask's are, and may not begin processes
    return Workers(job, label).do(name, lambda share: worker.log_event(label, (name, share)))


def _stop(label: str) -> int:
    """On a Dask worker: how many processes with this name are still there; they are told to end."""
    processes = [process for process in multiprocessing.active_children() if process.name == label]
    for process in processes:
        process.terminate()
    return len(processes)
