"""Closed streams, terminals that know only ASCII, pipes that end, and signals: real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import real
from attack.arena import SMALL

WEIGHTS = "0.5,1.5,-0.5,0.1\n0.2,0.3,0.4,0.5\n"


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    line = ["sh", "-c", command.replace("dohyo", f"{sys.executable} -m dohyo")]
    environment = real.environment() | variables
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=600, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "status", "error"),
    [(">&-", 0, ""), ("2>&-", 0, ""), (">&- 2>&-", 0, ""), ("<&- >&- 2>&-", 0, ""), ("--cost 0 2>&-", 2, ""),
     ("--cost 0 >&-", 2, "dohyo: error: cost is 0.0"), ("> /dev/full", 2, "No space left")],
)  # fmt: skip
def test_closed_streams(closed: str, status: int, error: str, tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(WEIGHTS)
    done = shell(f"dohyo estimate w.csv --estimator iwae --cost 2 --out v.csv --json {closed}", tmp_path)
    assert done.returncode == status, done
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "" or closed == "2>&-"
    if status == 0:
        assert (tmp_path / "v.csv").read_text().startswith("datum,log_px,khat\n0,")  # and no output of ours got into it


ESTIMATE = real.command("estimate", "w.csv", "--estimator", "iwae", "--cost", "2")


def test_a_terminal_of_ascii(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(WEIGHTS)
    process = real.started(ESTIMATE, tmp_path, tmp_path / "out", tmp_path / "error", PYTHONIOENCODING="ascii")
    process.join(60)
    assert (process.exitcode, (tmp_path / "error").read_text()) == (0, "")
    assert " ? " in (tmp_path / "out").read_text(encoding="ascii")  # in place of ±


def test_a_reader_that_ends(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(WEIGHTS)
    os.mkfifo(tmp_path / "pipe")
    process = real.started(ESTIMATE, tmp_path, tmp_path / "pipe", tmp_path / "error")
    os.close(os.open(tmp_path / "pipe", os.O_RDONLY))
    process.join(60)
    assert (process.exitcode, (tmp_path / "error").read_text()) == (128 + signal.SIGPIPE, "")  # and not a word


@pytest.mark.slow
def test_the_same_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(WEIGHTS)
    done = shell("dohyo estimate w.csv --estimator iwae --cost 2", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert " ? " in done.stdout
    done = shell("{ dohyo estimate w.csv --estimator iwae --cost 2; echo $? >&2; } | true", tmp_path)
    assert done.stderr == f"{128 + signal.SIGPIPE}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals(number: signal.Signals, tmp_path: Path) -> None:
    """In training and in evaluation: one line that says how to go on, and the status that shells expect."""
    out, error = tmp_path / "out", tmp_path / "error"
    train = real.started(real.command("train", *SMALL, "--epochs", "100000", "--out", "a"), tmp_path, out, error)
    while not (tmp_path / "a/checkpoint.pt").exists():
        assert train.is_alive()
        time.sleep(0.05)
    os.kill(train.pid or 0, number)
    train.join(60)
    assert train.exitcode == 128 + number
    assert error.read_text() == "dohyo: interrupted; continue with: dohyo train --resume a\n"
    assert (tmp_path / "a/.dohyo.lock").read_bytes() == b""
    line = real.command("evaluate", "a", "--anneal", "0", "--estimator", "iwae", "--cost", "1e9", "--device", "cpu")
    evaluate = real.started(line, tmp_path, out, error)
    while not _caught(evaluate.pid) >> signal.SIGTERM - 1 & 1:
        time.sleep(0.02)
    time.sleep(1)  # into the evaluation
    os.kill(evaluate.pid or 0, number)
    evaluate.join(60)
    assert evaluate.exitcode == 128 + number
    assert error.read_text().startswith("dohyo: interrupted\n")


def _caught(pid: int | None) -> int:
    """The signals that a process has handlers for, one bit each."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
