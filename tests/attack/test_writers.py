"""Several processes on one folder and on one study, some of them killed: each result is that of one run alone."""

import json
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import real
from attack.arena import SMALL, answer_here, contents
from dohyo.lab.folder import read_records
from dohyo.lab.training.processes import Busy, locked, only_writer


def train(epochs: int, *options: str) -> list[str]:
    return real.command("train", *SMALL, "--epochs", str(epochs), *options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run leaves, and one study."""
    folder = tmp_path_factory.mktemp("alone")
    assert real.finished(train(3, "--out", "a"), folder).returncode == 0
    return folder


def settled(processes: list[tuple[BaseProcess, Path]]) -> list[tuple[int, str]]:
    for process, _ in processes:
        process.join(300)
    return [(process.exitcode or 0, error.read_text()) for process, error in processes]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_one_of_several_begins_a_run(count: int, alone: Path, tmp_path: Path) -> None:
    errors = [tmp_path / f"error{i}" for i in range(count)]
    answers = settled([(real.started(train(3, "--out", "a"), tmp_path, error=error), error) for error in errors])
    assert sorted(status for status, _ in answers) == [0] + [2] * (count - 1)
    for status, error in answers:
        assert status == 0 or "is being written by process" in error or "already holds a run" in error
        assert error.count("\n") <= 1
    assert real.same_run(tmp_path / "a", alone / "a")
    assert not list((tmp_path / "a").glob(".dohyo-*"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8])
def test_several_are_killed_on_one_folder(count: int, tmp_path: Path) -> None:
    """Runs of different seeds, three times so many, each killed at a random moment; what one ends in the end is one run alone."""
    chance, errors = random.Random(count), [tmp_path / f"error{i}" for i in range(count)]
    begun = time.monotonic()
    assert real.finished(train(3, "--out", "warm"), tmp_path).returncode == 0
    usual = time.monotonic() - begun

    def line(seed: int) -> list[str]:
        known = (tmp_path / "a/config.yaml").exists()
        begin = train(3, "--seed", str(seed), "--out", "a", "--checkpoint-seconds", "0")
        return real.command("train", "--resume", "a") if known else begin

    for _ in range(3):
        processes = [(real.started(line(seed), tmp_path, error=error), error) for seed, error in enumerate(errors)]
        for process, _ in chance.sample(processes, count):
            time.sleep(chance.uniform(0, 2 * usual / count))
            process.kill()
        for status, error in settled(processes):
            assert status in (0, 2, -signal.SIGKILL), error
            assert status != 2 or "is being written by process" in error or "already holds a run" in error, error
        for error in errors:
            error.unlink(missing_ok=True)
    done = real.finished(line(0), tmp_path)
    assert done.returncode == 0, done.stderr
    seed = str(json.loads((tmp_path / "a/result.json").read_text())["seed"])
    assert real.finished(train(3, "--seed", seed, "--out", "alone", "--checkpoint-seconds", "0"), tmp_path).returncode == 0
    assert real.same_run(tmp_path / "a", tmp_path / "alone")
    assert not list((tmp_path / "a").glob(".dohyo-*"))


def test_the_second_is_told_who_is_first(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the first's changes; readers are not held up; a kill frees the lock at once."""
    monkeypatch.chdir(tmp_path)
    first = real.started(train(100_000, "--out", "a"), tmp_path)
    while len(read_records(tmp_path / "a")) < 2:
        assert first.is_alive()
        time.sleep(0.02)
    config = (tmp_path / "a/config.yaml").read_bytes()
    for line in (train(3, "--out", "a"), real.command("train", "--resume", "a", "--epochs", "7")):
        answer = answer_here(line[3:])
        assert answer.status == 2
        assert "already holds a run" in answer.error or f"is being written by process {first.pid} on " in answer.error
    assert "is being written" in answer.error
    assert (tmp_path / "a/config.yaml").read_bytes() == config
    assert answer_here(["evaluate", "a", "--anneal", "0", "--estimator", "iwae", "--cost", "2", "--device", "cpu"]).status == 0
    first.kill()
    first.join()
    with only_writer(tmp_path / "a"):
        pass
    assert (tmp_path / "a/.dohyo.lock").read_bytes() == b""


def test_a_lock_is_held_again_by_its_holder_only(tmp_path: Path) -> None:
    with locked(tmp_path / "x/lock"), locked(tmp_path / "x/lock"):
        (tmp_path / "hold.py").write_text(HOLD)
        done = real.finished([real.sys.executable, "hold.py", "x/lock"], tmp_path)
        assert done.returncode != 0
        assert "Busy: x is being written by process" in done.stderr
    assert real.finished([real.sys.executable, "hold.py", "x/lock"], tmp_path).returncode == 0
    assert issubclass(Busy, ValueError)


HOLD = """
import sys
from pathlib import Path
from dohyo.lab.training.processes import locked

with locked(Path(sys.argv[1])):
    pass
"""
STUDY = """
import sys, time
from pathlib import Path
from dohyo.lab.studies import Study, StudyConfig, reproduce

class Slow(Study):
    name, title, question = "slow", "Slow", "How slow?"
    SCALES = {"small": StudyConfig()}
    def cells(self):
        return {f"cell_{n}": {"n": n} for n in range(8)}
    def run_cell(self, name, options, folder, advance):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log", "a") as log:
            log.write("begun\\n")
        time.sleep(0.1)
        with open(folder / "log", "a") as log:
            log.write("done\\n")
        return {"square": options["n"] ** 2}
    def summarise(self, cells):
        return [], []
    def plot(self, cells, folder):
        return []

reproduce(Slow.at("small"), Path("s"))
"""


@pytest.mark.parametrize(
    ("count", "kills"), [(2, 0), (4, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 1), (8, 0), (8, 5)])]
)
def test_processes_share_a_study(count: int, kills: int, tmp_path: Path) -> None:
    """Each cell is done once; those of a process that is killed are done by the others."""
    (tmp_path / "study.py").write_text(STUDY)
    errors = [tmp_path / f"error{i}" for i in range(count)]
    processes = [(real.started([real.sys.executable, "study.py"], tmp_path, error=error), error) for error in errors]
    chance = random.Random(count)
    while kills and not list(tmp_path.glob("s/cells/*.json")):
        time.sleep(0.02)
    for process, _ in processes[:kills]:
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
    answers = settled(processes)
    assert all(status in ((0,) if i >= kills else (0, -signal.SIGKILL)) for i, (status, _) in enumerate(answers)), answers
    report = json.loads((tmp_path / "s/study.json").read_text())
    assert {name: cell["result"]["square"] for name, cell in report["cells"].items()} == {f"cell_{n}": n**2 for n in range(8)}
    logs = [path.read_text() for path in tmp_path.glob("s/work/*/log")]
    assert [log.count("done") for log in logs] == [1] * 8
    assert sum(log.count("begun") for log in logs) <= 8 + kills
    assert not [name for name in contents(tmp_path / "s") if Path(name).name.startswith(".dohyo-")]
