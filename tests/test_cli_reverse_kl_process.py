"""`dohyo reverse-kl` in processes of its own: killed, extended, interrupted, and two at a time."""

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml

from dohyo.lab.cli import main
from dohyo.lab.experiments.reverse_kl import ReverseKLRun
from dohyo.lab.folder import read_records
from dohyo.lab.training.state import load_checkpoint
from real import command, finished, finished_together, kill_until_done, same_run, started
from test_cli_reverse_kl import FAST, MINE


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return finished(command("reverse-kl", *arguments), folder)


SUMO_RUN = ["--target", "funnel", "--estimator", "sumo", "--cost", "15", "--seed", "0", "--steps", "200", *FAST,
            "--checkpoint-seconds", "0"]  # fmt: skip


@pytest.fixture(scope="session")  # a worker may come back to this file
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run `a` of 200 steps."""
    folder = tmp_path_factory.mktemp("runs")
    done = run(*SUMO_RUN, "--out", "a", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "reverse KL" in done.stdout
    assert done.stderr == ""
    return folder


@pytest.mark.slow
def test_the_commands_of_the_documentation(tmp_path: Path) -> None:
    """As they are written, but for few steps and small checks."""
    fewer = ["--check-draws", "50", "--check-terms", "50", "--test-draws", "50", "--test-terms", "50", "--json"]
    line = "--target funnel --estimator sumo --cost 15 --steps 20 --seed 0 --out runs/f"
    done = run(*line.split(), *fewer, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert result == json.loads((tmp_path / "runs/f/result.json").read_text())
    assert set(result) >= {"reverse_kl", "reverse_kl_stderr", "training_estimate", "objective", "diverged", "khat", "moments"}
    assert (result["reverse_kl"], result["steps"], result["diverged"]) == (result["objective"], 20, False)
    assert result["expected_cost"] == pytest.approx(15.078, abs=1e-3)

    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/module.py").write_text(MINE)
    line = "--target package.module:log_density --dimension 3 --estimator multilevel-rr --cost 15 --out runs/g"
    done = run(*line.split(), "--steps", "20", *fewer, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["log_normaliser"] is None
    assert result["reverse_kl"] == pytest.approx(result["objective"] + result["log_z"])
    assert -6 < result["objective"] < 6
    assert set(result["moments"]) == {"x1", "x2", "x3"}
    assert (tmp_path / "runs/g/marginals.png").exists()


def test_the_run_folder_is_whole(runs: Path) -> None:
    names = {path.name for path in (runs / "a").iterdir()} - {".dohyo.lock"}
    pictures = {f"{name}.{ending}" for name in ("learning_curves", "density") for ending in ("png", "json")}
    rest = {"config.yaml", "metrics.jsonl", "result.json", "checkpoint.pt", "draws.npz", "tensorboard"}
    assert names == rest | pictures
    config = yaml.safe_load((runs / "a/config.yaml").read_text())
    assert (config["encoder"], config["paths"], config["clip_decoder"], config["optimiser"]) == ("sleep", "x", None, "adam")
    records = read_records(runs / "a")
    assert [record["step"] for record in records] == list(range(20, 201, 20))
    curves = json.loads((runs / "a/learning_curves.json").read_text())
    assert curves["estimate"] == pytest.approx([record["estimate"] for record in records], rel=1e-5)
    assert ReverseKLRun.open(runs / "a").finished


def test_resuming_a_finished_run_does_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    before = (runs / "a/result.json").stat().st_mtime_ns
    assert main(["reverse-kl", "--resume", "a"]) == 0
    assert "already finished after 200 steps; --steps N extends it" in capsys.readouterr().out
    assert (runs / "a/result.json").stat().st_mtime_ns == before
    for arguments, message in (
        (["--resume", "a", "--cost", "5"], "--cost 5.0 differs from the run's 15.0"),
        (["--out", "a"], "already holds a run"),
        (["--resume", "nowhere"], "holds no run"),
        ([], "--out FOLDER"),
    ):
        assert main(["reverse-kl", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_killed_at_random_times_it_ends_the_same(runs: Path) -> None:
    """SIGKILL, again and again, until a run gets through; the result is the uninterrupted run's, bit for bit."""
    first, again = command("reverse-kl", *SUMO_RUN, "--out", "killed"), command("reverse-kl", "--resume", "killed")
    assert kill_until_done(first, again, runs, "killed") == 2
    assert same_run(runs / "a", runs / "killed")
    assert not list((runs / "killed").glob(".dohyo-*"))


def test_extending_a_run(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without decay a longer run is the shorter one and more, so that extending it is the same as having asked for it."""
    monkeypatch.chdir(runs)
    steady = [*SUMO_RUN, "--decay", "none"]
    assert main(["reverse-kl", *steady, "--steps", "60", "--out", "long"]) == 0
    assert main(["reverse-kl", *steady, "--steps", "40", "--out", "short"]) == 0
    assert main(["reverse-kl", "--resume", "short", "--steps", "60"]) == 0, capsys.readouterr().err
    assert same_run(runs / "long", runs / "short")
    assert main(["reverse-kl", "--resume", "short", "--steps", "70"]) == 0  # an epoch of ten steps, and on from there
    assert main(["reverse-kl", "--resume", "short", "--steps", "100"]) == 0
    assert [record["step"] for record in read_records(runs / "short")] == [20, 40, 60, 70, 90, 100]


def test_ctrl_c_says_how_to_go_on(runs: Path) -> None:
    line = command("reverse-kl", *SUMO_RUN, "--steps", "1000000", "--out", "interrupted")
    process = started(line, runs, error=runs / "error")
    while process.is_alive() and len(read_records(runs / "interrupted")) < 2:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    assert (runs / "error").read_text() == "dohyo: interrupted; continue with: dohyo reverse-kl --resume interrupted\n"
    assert load_checkpoint(runs / "interrupted")["numbers"]["step"] >= 20


@pytest.mark.slow
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One log, one checkpoint, other draws in each process; and resumed by as many."""
    options = [*SUMO_RUN, "--steps", "60", "--learning-rate", "0.005", "--check-draws", "101"]
    done = finished_together(command("reverse-kl", *options, "--out", "two"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training estimate") == 1
    records = read_records(tmp_path / "two")
    assert [record["step"] for record in records] == [20, 40, 60]
    assert not torch.equal(*(noise["cpu"] for noise in load_checkpoint(tmp_path / "two")["noise"]))
    monkeypatch.chdir(tmp_path)
    assert main(["reverse-kl", *options, "--out", "one"]) == 0, capsys.readouterr().err
    single = read_records(tmp_path / "one")
    for one, two in zip(single, records, strict=True):
        allowed = 6 * math.hypot(one["stderr"], two["stderr"]) + 0.2
        assert one["reverse_kl"] == pytest.approx(two["reverse_kl"], abs=allowed)
        assert one["estimate_stderr"] == pytest.approx(two["estimate_stderr"], rel=1.0)
    done = finished_together(command("reverse-kl", "--resume", "two", "--steps", "80", "--json"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 80
