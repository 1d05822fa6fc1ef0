"""`dohyo reproduce --workers` and `--scheduler`: real processes and a real Dask cluster on the loopback, some of them killed."""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import dohyo
import real
import server
from dohyo.lab.cli import main
from dohyo.lab.folder import read_records
from dohyo.lab.studies import STUDIES

STUDY = """
import os, signal, time
import torch
from dohyo.lab.studies import Conclusion, Study, StudyConfig

class Cells(Study):
    name, title, question = "cells", "Cells", "How many?"
    SCALES = {"small": StudyConfig(), "paper": StudyConfig()}
    picks = ("n",)

    def cells(self):
        return {f"cell_{n}": {"n": n} for n in range(5)}

    def run_cell(self, name, options, folder, advance):
        folder.mkdir(parents=True, exist_ok=True)
        log, began = folder / "log", time.time()
        with log.open("a") as lines:
            print(os.getpid(), file=lines)
        tries = len(log.read_text().split())
        while (folder.parents[2] / "hold").exists() and time.time() < began + 100:
            time.sleep(0.01)
            advance(0.5)
        print("a cell may print")
        time.sleep(0.2)
        if tries == 1 and options["n"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if tries == 1 and options["n"] == 2:
            raise RuntimeError("not today")
        return {"began": began, "ended": time.time(), "threads": torch.get_num_threads()}

    def summarise(self, cells):
        return [Conclusion("There are cells", "", str(len(cells)), True)], []

    def plot(self, cells, folder):
        return []
"""
PROGRAM = """
import sys
sys.path.insert(0, "")
from cells import Cells
from dohyo.lab.cli import main
from dohyo.lab.studies import STUDIES

if __name__ == "__main__":
    STUDIES["cells"] = Cells
    sys.exit(main(sys.argv[1:]))
"""
LINE = ["reproduce", "cells", "--device", "cpu", "--out", "s"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the study, which is also known in this process."""
    (tmp_path / "cells.py").write_text(STUDY)
    (tmp_path / "program.py").write_text(PROGRAM)
    server.ensure_running()  # with what the tests have it load
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cells", raising=False)
    monkeypatch.setitem(STUDIES, "cells", importlib.import_module("cells").Cells)
    return tmp_path


def pids(folder: Path) -> dict[str, list[int]]:
    """The processes that began each cell, in order."""
    return {path.parent.name: [int(pid) for pid in path.read_text().split()] for path in sorted(folder.glob("s/work/*/log"))}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def begun(count: int, folder: Path) -> list[int]:
    """The processes of the cells, once there are so many."""
    end = time.monotonic() + 120
    while len(found := [pid for each in pids(folder).values() for pid in each if alive(pid)]) < count:
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def gone(processes: list[int]) -> bool:
    end = time.monotonic() + 20
    while any(map(alive, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, processes))


def test_a_cell_that_dies_leaves_the_others_alone(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert main([*LINE, "--workers", "2", "--json"]) == 2
    out, error = capsys.readouterr()
    report = json.loads(out)
    assert report == json.loads((here / "s/study.json").read_text())
    assert sorted(report["cells"]) == ["cell_0", "cell_3", "cell_4"]
    assert report["conclusions"][0]["found"] == "3"
    killed, raised = "cell_1: its process was killed by SIGKILL", "cell_2: RuntimeError: not today"
    lines = error.splitlines()
    assert f"dohyo: the cell {killed.replace(':', ' failed:', 1)}; the others go on" in lines
    assert lines[-1].startswith("dohyo: error: 2 of 5 cells failed (cell_")
    assert killed in lines[-1]
    assert raised in lines[-1]
    assert "Traceback (most recent call last):" in lines  # of the cell's own error
    assert lines.count("a cell may print") == 5
    assert {cell["result"]["threads"] for cell in report["cells"].values()} == {2}
    times = [(cell["result"]["began"], cell["result"]["ended"]) for cell in report["cells"].values()]
    assert all(sum(a < end and begin < b for a, b in times) <= 2 for begin, end in times)

    assert main([*LINE, "--workers", "20"]) == 0  # more than there are cells
    assert "5 of 5 cells" in capsys.readouterr().out
    assert {name: len(each) for name, each in pids(here).items()} == {f"cell_{n}": 2 if n in (1, 2) else 1 for n in range(5)}
    assert main([*LINE, "--workers", "1"]) == 0  # nothing is left to do


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_workers(number: signal.Signals, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "hold").touch()
    workers: list[int] = []

    def interrupt() -> None:
        workers.extend(begun(3, here))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main([*LINE, "--workers", "3"]) == 128 + number
    thread.join()
    assert gone(workers)
    assert capsys.readouterr().err == "dohyo: interrupted; the same command continues with s\n"
    assert json.loads((here / "s/study.json").read_text())["cells_done"] == 0
    (here / "hold").unlink()
    assert main([*LINE, "--workers", "2", "--n", "0", "2"]) == 0
    assert {name: len(each) for name, each in pids(here).items()} == {"cell_0": 2, "cell_1": 1, "cell_2": 2}


def test_an_early_signal_is_one_line(tmp_path: Path) -> None:
    """While the server of processes still imports torch; it gets the signal too, as from a terminal."""
    line = [sys.executable, "-m", "dohyo", "reproduce", "annealing", "--scale", "smoke", "--workers", "2", "--out", "s"]
    process = subprocess.Popen(
        line, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    end = time.monotonic() + 120
    while not (tmp_path / "s/study.json").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=120)[1] == "dohyo: interrupted; the same command continues with s\n"
    assert process.returncode == 130


@pytest.mark.slow
def test_the_workers_end_with_the_command(here: Path) -> None:
    (here / "hold").touch()
    process = real.started([sys.executable, str(here / "program.py"), *LINE, "--workers", "3"], here)
    workers = begun(3, here)
    process.kill()
    process.join()
    assert gone(workers)
    (here / "hold").unlink()
    assert main([*LINE, "--workers", "2", "--n", "0"]) == 0


def results(folder: Path) -> dict[str, Any]:
    return {name: cell["result"] for name, cell in json.loads((folder / "study.json").read_text())["cells"].items()}


@pytest.mark.slow
def test_a_killed_training_goes_on_and_ends_as_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["reproduce", "table1", "--scale", "smoke", "--epochs", "40", "--device", "cpu"]
    assert real.finished(real.command(*line, "--out", "alone"), tmp_path).returncode == 0

    def kill() -> None:
        while len(read_records(Path("s/work/digits_005_sumo/replica_0"))) < 3:
            time.sleep(0.01)
        os.kill(int(Path("s/cells/.digits_005_sumo.lock").read_text().split()[1]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert main([*line, "--out", "s", "--workers", "2"]) == 2
    thread.join()
    assert "1 of 2 cells failed (digits_005_sumo: its process was killed by SIGKILL)" in capsys.readouterr().err
    assert list(results(Path("s"))) == ["digits_005_iwae"]
    assert main([*line, "--out", "s", "--workers", "2"]) == 0
    assert results(Path("s")) == results(Path("alone"))


@pytest.mark.slow
def test_cells_that_share_a_run_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["reproduce", "convergence", "--scale", "smoke", "--device", "cpu"]
    assert real.finished(real.command(*line, "--out", "alone"), tmp_path).returncode == 0
    assert main([*line, "--out", "s", "--workers", "3"]) == 0
    assert results(Path("s")) == results(Path("alone"))


HOLD = """
import time
from pathlib import Path
from dohyo.lab.training.processes import locked

with locked(Path("s/cells/.cell_0.lock")):
    Path("held").touch()
    while not Path("s/cells/cell_4.json").exists():
        time.sleep(0.02)
"""


def test_a_cell_that_somebody_else_does_waits_behind_the_others(here: Path) -> None:
    (here / "hold.py").write_text(HOLD)
    other = real.started([sys.executable, "hold.py"], here)
    while not (here / "held").exists():
        time.sleep(0.02)
    assert main([*LINE, "--workers", "1", "--n", "0", "3", "4"]) == 0
    other.join()
    found = json.loads((here / "s/study.json").read_text())["cells"]
    assert found["cell_0"]["result"]["began"] > found["cell_4"]["result"]["ended"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--workers 0", "workers is 0; it must be a whole number of at least 1"),
        ("--workers -1", "workers is -1; it must be"),
        ("--workers two", "workers"),
        (
            "--workers 2 --scheduler tcp://127.0.0.1:1",
            "give --workers for this machine or --scheduler for a Dask cluster, not both",
        ),
        ("--scheduler tcp://127.0.0.1:1", "no Dask scheduler answers at tcp://127.0.0.1:1 ("),
        ("--scheduler nonsense://1", "no Dask scheduler answers at nonsense://1 ("),
    ],
)
def test_wrong_options_are_one_line(
    options: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dohyo.lab.studies import cluster

    monkeypatch.setattr(cluster, "_CONNECT", 0.3)
    assert main(["reproduce", "convergence", "--scale", "smoke", "--out", str(tmp_path / "x"), *options.split()]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("dohyo: error: ")
    assert says in error
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_kind_of_server_is_no_scheduler(answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dohyo.lab.studies import cluster

    monkeypatch.setattr(cluster, "_CONNECT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            with server.accept()[0] as stranger, contextlib.suppress(OSError):
                stranger.settimeout(5)
                stranger.sendall(answer)
                while stranger.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ValueError, match=f"no Dask scheduler answers at {address}"):
            cluster._connect(address)
        thread.join()


def test_torchrun_has_processes_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dohyo.lab.studies.side_by_side import on_this_machine

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="leave torchrun out"), on_this_machine(None, tmp_path, 2):  # type: ignore[arg-type]
        pass


def test_without_dask_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(["reproduce", "convergence", "--scheduler", "tcp://127.0.0.1:1", "--out", str(tmp_path / "x")]) == 2
    wanted = "dohyo: error: --scheduler needs distributed, which is not installed: pip install 'dohyo[cluster]'\n"
    assert capsys.readouterr().err == wanted


class Cluster:
    """A scheduler and two workers."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.address = f"tcp://127.0.0.1:{port}"
        self.log, self.folder = folder / "log", folder
        host = ["--host", "127.0.0.1", "--no-dashboard"]
        self.scheduler = self.start("scheduler", "--port", port, *host)
        self.workers = [
            self.start("worker", self.address, *host, "--no-nanny", "--nthreads", "1", "--local-directory", f"local{i}")
            for i in range(2)
        ]
        end = time.monotonic() + 120
        while time.monotonic() < end:  # on a busy machine longer than the command waits
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port))):
                return
            time.sleep(0.05)

    def start(self, *arguments: str) -> BaseProcess:
        return real.started([sys.executable, "-m", "dask", *arguments], self.folder, self.log, self.log)

    def stop(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.join()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    found.stop()


def test_a_cluster(cluster: Cluster, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C stops the cells only; the cell of a worker that is killed goes to another; cells that die are named."""
    command = [*LINE, "--scheduler", cluster.address, "--json"]
    (here / "hold").touch()
    processes: list[int] = []

    def interrupt() -> None:
        processes.extend(begun(2, here))
        os.kill(os.getpid(), signal.SIGINT)

    def kill() -> None:
        both = begun(2, here)
        cluster.workers[0].kill()
        while all(map(alive, both)):  # the process of its cell ends with it
            time.sleep(0.02)
        (here / "hold").unlink()

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main(command) == 130
    thread.join()
    assert gone(processes)
    assert capsys.readouterr().err == "dohyo: interrupted; the same command continues with s\n"
    assert all(worker.is_alive() for worker in cluster.workers)

    before = sum(map(len, pids(here).values()))
    thread = threading.Thread(target=kill)
    thread.start()
    status = main(command)
    thread.join()
    out, error = capsys.readouterr()
    failed = [name for name in ("cell_1", "cell_2") if len(pids(here)[name]) == 1]  # at their first try
    assert status == (2 if failed else 0)
    assert set(json.loads(out)["cells"]) == {f"cell_{n}" for n in range(5)} - set(failed)
    assert all(f"dohyo: the cell {name} failed: " in error for name in failed)
    assert "distributed" not in error  # no log of Dask's
    assert sum(map(len, pids(here).values())) == before + 5 + 1  # the lost cell was begun twice

    monkeypatch.setattr(dohyo, "__version__", "0.0.1")
    assert main(command) == 2
    assert "; it needs dohyo 0.0.1, as this machine has\n" in capsys.readouterr().err
