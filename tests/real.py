"""Real processes, the folders they leave, and the pictures in them."""

import atexit
import json
import os
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import server
from dohyo.lab.folder import read_records
from dohyo.lab.plots import densities, divergence, rewards, runs, tables
from dohyo.lab.training.state import load_checkpoint

NOWHERE = Path(os.devnull)
_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63600000000200"
    "0148afa4710000000049454e44ae426082"
)


def write_unrendered(figure: Any, path: Path, dpi: int) -> None:
    """In place of `Figure.savefig`: a file of the right kind with one pixel."""
    path.write_bytes(_PIXEL if path.suffix == ".png" else b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>')


class Unplotted:
    """In place of the figure of a run and of its parts: Matplotlib takes nearly half the time of a short run."""

    savefig = write_unrendered

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def subplots(self, rows: int = 1, columns: int = 1, squeeze: bool = True, **options: Any) -> Any:
        panels = np.full((rows, columns), self, dtype=object)
        return panels if not squeeze else panels.squeeze() if panels.size > 1 else self

    def subplot_mosaic(self, names: list[list[str]], **options: Any) -> Any:
        return {name: self for row in names for name in row}

    def get_size_inches(self) -> tuple[float, float]:
        return 1.0, 1.0

    def get_legend_handles_labels(self) -> tuple[list[Any], list[Any]]:
        return [], []


def leave_unplotted(replace: Callable[[Any, str, Any], None]) -> None:
    """Write the pictures of runs without plotting them; their numbers are as ever."""
    for module in (densities, divergence, rewards, runs, tables):
        replace(module, "Figure", Unplotted)
    replace(densities, "_TERMS", 100)  # a mean over fewer z is a density, too


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dohyo", *arguments]


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]


def fresh(line: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A process that has ended, of an interpreter of its own."""
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=300, env=environment())


def started(
    line: list[str],
    folder: Path,
    out: Path = NOWHERE,
    error: Path = NOWHERE,
    largest: int | None = None,
    drawn: bool = False,
    **variables: str,
) -> BaseProcess:
    """A forked process of Python. The system refuses it files larger than `largest`; pictures have one pixel, unless `drawn`."""
    server.ensure_running()
    process = server.CONTEXT.Process(target=_run, args=(line[1:], folder, out, error, largest, drawn, environment() | variables))
    process.start()
    return process


def _run(
    line: list[str], folder: Path, out: Path, error: Path, largest: int | None, drawn: bool, variables: dict[str, str]
) -> None:
    for descriptor, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    server.ensure_running()  # also for processes of its own
    torch.set_num_threads(1)
    encoding = variables.get("PYTHONIOENCODING", "utf-8")  # which an interpreter reads when it starts
    sys.stdout, sys.stderr = (open(descriptor, "w", encoding=encoding) for descriptor in (1, 2))  # noqa: SIM115
    if not drawn:
        Figure.savefig = write_unrendered  # type: ignore[assignment]
        leave_unplotted(setattr)
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    try:
        if line[0] == "-c":
            sys.argv = ["-c", *line[2:]]
            exec(compile(line[1], "<string>", "exec"), {"__name__": "__main__"})
        elif line[0] == "-m":
            sys.argv = line[1:]
            runpy.run_module(line[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = line
            runpy.run_path(line[0], run_name="__main__")
    except Exception:  # first the traceback, then what is done at exit, as Python does: other processes may see the exit
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def finished(line: list[str], folder: Path, largest: int | None = None, drawn: bool = False) -> subprocess.CompletedProcess[str]:
    """A forked process that has ended."""
    with tempfile.TemporaryDirectory() as name:
        out, error = Path(name, "out"), Path(name, "error")
        process = started(line, folder, out, error, largest, drawn)
        process.join(300)
        assert process.exitcode is not None, "still running after 300 seconds"
        return subprocess.CompletedProcess(line, process.exitcode, out.read_text(), error.read_text())


def finished_together(
    line: list[str], folder: Path, meanwhile: Callable[[list[BaseProcess]], None] = lambda ranks: None
) -> subprocess.CompletedProcess[str]:
    """Two forked processes that have ended, with the variables that torchrun gives to those that it starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
              "TORCHELASTIC_RUN_ID": "tests"}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        streams = [(Path(name, f"out{rank}"), Path(name, f"error{rank}")) for rank in "01"]
        ranks = [started(line, folder, *streams[i], RANK=str(i), LOCAL_RANK=str(i), **shared) for i in (0, 1)]
        meanwhile(ranks)
        end = time.monotonic() + 300
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks) and time.monotonic() < end:
            connection.wait([rank.sentinel for rank in ranks if rank.is_alive()], timeout=1)
        for rank in ranks:
            rank.terminate()  # as torchrun does when one of them has failed
            rank.join(30)
            rank.kill()  # one that waits for another does not end
            rank.join()
        texts = ["".join(path.read_text() for path in paths) for paths in zip(*streams, strict=True)]
        return subprocess.CompletedProcess(line, max(abs(rank.exitcode or 0) for rank in ranks), *texts)


def kill_until_done(first: list[str], again: list[str], folder: Path, name: str, most: int = 2) -> int:
    """SIGKILL at random times, at most so often, until the run called `name` gets through; returns how often it was killed."""
    generator, kills, line = random.Random(0), 0, first
    with tempfile.NamedTemporaryFile() as error:
        while True:
            process = started(line, folder, error=Path(error.name))
            # The start takes most of the time: wait until the run is under way, then strike at a random moment.
            begun, known = time.monotonic(), len(read_records(folder / name))
            while kills < most and process.is_alive() and time.monotonic() - begun < 60:
                if len(read_records(folder / name)) > known:
                    break
                time.sleep(0.01)
            process.join(generator.uniform(0, 0.1) if kills < most else 120)  # an epoch may take 0.05 s
            if process.is_alive():
                process.kill()
                process.join()
                kills += 1
            if process.exitcode == 0:
                return kills
            assert process.exitcode == -signal.SIGKILL, Path(error.name).read_text()
            if (folder / name / "config.yaml").exists():
                line = again


def killed_when(ready: Callable[[], bool], line: list[str], folder: Path) -> None:
    """Start a process, and SIGKILL it as soon as `ready`."""
    process = started(line, folder)
    while process.is_alive() and not ready():
        time.sleep(0.002)
    process.kill()
    process.join()


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if "seconds" not in key}


def same_run(a: Path, b: Path) -> bool:
    """Bit for bit, but for the time they took: parameters, optimiser, noise, the task's own state, records and result."""
    one, two = load_checkpoint(a), load_checkpoint(b)
    tensors = all(torch.equal(one[part][key], two[part][key]) for part in ("model", "best") for key in one[part])
    states = [[state[key] for state in c["optimiser"]["state"].values() for key in state] for c in (one, two)]
    optimiser = all(torch.equal(x, y) for x, y in zip(*states, strict=True))
    noise = all(torch.equal(one["noise"][0][key], two["noise"][0][key]) for key in ("cpu", "depth"))
    tasks, numbers = [[timeless(c["noise"][0]["task"]) for c in (one, two)], [timeless(c["numbers"]) for c in (one, two)]]
    records = [[timeless(record) for record in read_records(folder)] for folder in (a, b)]
    results = [timeless(json.loads((folder / "result.json").read_text())) for folder in (a, b)]
    equal = all(pair[0] == pair[1] for pair in (tasks, numbers, records, results))
    return tensors and optimiser and noise and equal


def picture(path: Path) -> dict[str, Any]:
    """The numbers beside a picture that is one."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    numbers: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return numbers
