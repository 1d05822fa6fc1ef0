"""`dohyo qpbo` killed and resumed, and given what it cannot use."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dohyo.lab.cli import main
from dohyo.lab.folder import read_records
from dohyo.lab.rewards import random_qpbo
from dohyo.lab.training.state import load_checkpoint
from real import command, finished_together, kill_until_done, same_run
from test_qpbo import SMALL, TWO, earned, result, run, train

# --- resuming


@pytest.mark.parametrize("policy", ["latent", "nade"])
def test_resumed_in_the_middle_of_restarts(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"variables": 8, "policy": policy, "steps": 12, "check_every": 3, "restarts": 2, "entropy": 0.1}
    options |= {"entropy_decay": "linear"}
    train(tmp_path / "whole", **options)
    for stop in (1, 2, 3, 4):  # the second training begins after two checks
        folder = tmp_path / f"cut{stop}"
        assert train(folder, stop, **options) is None
        assert len(read_records(folder)) == stop
        assert main(["qpbo", "--resume", str(folder)]) == 0, capsys.readouterr().err
        assert same_run(tmp_path / "whole", folder)


@pytest.mark.slow
def test_killed_at_random_times_it_ends_the_same(tmp_path: Path) -> None:
    """SIGKILL, again and again, until a run gets through; the result is the uninterrupted run's, bit for bit."""
    options = ["--variables", "40", "--entropy", "0.1", "--steps", "160", "--check-every", "20", "--restarts", "2", *SMALL]
    options += ["--checkpoint-seconds", "0"]
    assert run(*options, "--out", "a", folder=tmp_path).returncode == 0
    first, again = command("qpbo", *options, "--out", "killed"), command("qpbo", "--resume", "killed")
    assert kill_until_done(first, again, tmp_path, "killed") == 2
    assert same_run(tmp_path / "a", tmp_path / "killed")


def test_more_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--variables", "8", "--check-every", "5", *SMALL]
    for name, steps in (("long", "15"), ("short", "10")):
        assert main(["qpbo", *options, "--steps", steps, "--out", name]) == 0
    assert main(["qpbo", "--resume", "short", "--steps", "15", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 15
    assert same_run(tmp_path / "long", tmp_path / "short")
    assert main(["qpbo", "--resume", "short"]) == 0
    assert "already finished after 15 steps" in capsys.readouterr().out
    assert main(["qpbo", "--resume", "short", "--entropy", "0.3"]) == 2
    assert "--entropy 0.3 differs" in capsys.readouterr().err


def test_more_steps_after_restarts_are_the_last_trainings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"variables": 10, "policy": "independent", "learning_rate": 0.3, "entropy": 0.01}
    train(tmp_path / "a", steps=20, check_every=5, restarts=2, **options)
    assert main(["qpbo", "--resume", str(tmp_path / "a"), "--steps", "80"]) == 0, capsys.readouterr().err
    entropies = [record["entropy"] for record in read_records(tmp_path / "a")]
    assert len(entropies) == 16
    assert max(entropies[3:]) < entropies[2]  # the second training began at step 10, and no other since
    assert load_checkpoint(tmp_path / "a")["noise"][0]["task"]["restart"] == 1


def test_a_time_limit_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = train(tmp_path / "a", variables=10, steps=10**6, check_every=2, max_seconds=0.3)
    assert found is not None
    assert 0 < found["steps"] < 10**6
    assert 0.3 <= found["seconds"] < 10
    assert found["evaluations"] == 20 * found["steps"]
    assert main(["qpbo", "--resume", str(tmp_path / "a")]) == 0
    assert "--max-seconds N extends it" in capsys.readouterr().out
    assert main(["qpbo", "--resume", str(tmp_path / "a"), "--max-seconds", "0.6"]) == 0, capsys.readouterr().err
    assert result(tmp_path / "a")["steps"] > found["steps"]


def test_a_run_without_patience_left_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the first check at which the best reward is from the earlier half of the steps; without a limit it goes on."""
    monkeypatch.setattr("dohyo.lab.experiments.qpbo.PATIENT_STEPS", 10)
    found = train(tmp_path / "a", variables=10, steps=400, check_every=2, patience=0.5)
    assert found is not None
    best = found["evaluations_to_best"] // 20
    assert found["steps"] == max(10, 2 * best) < 400
    assert main(["qpbo", "--resume", str(tmp_path / "a")]) == 0
    assert "it ended by itself" in capsys.readouterr().out
    assert main(["qpbo", "--resume", str(tmp_path / "a"), "--patience", "null"]) == 0, capsys.readouterr().err
    assert result(tmp_path / "a")["steps"] == 400


def test_a_file_that_was_changed_is_no_longer_the_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text(TWO)
    train(tmp_path / "a", instance=tmp_path / "p.txt", index=1, steps=4)
    (tmp_path / "p.txt").write_text(TWO.replace("2 3 7", "2 3 8"))
    assert main(["qpbo", "--resume", str(tmp_path / "a"), "--steps", "8"]) == 2
    assert "p.txt, problem 1: the best x of the run earns another reward now" in capsys.readouterr().err


def test_two_processes(tmp_path: Path) -> None:
    """Uneven parts of the batch; the best of both processes counts."""
    options = ["--variables", "20", "--entropy", "0.1", "--check-every", "5", *SMALL, "--batch-size", "21", "--restarts", "2"]
    done = finished_together(command("qpbo", *options, "--steps", "10", "--out", "two"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best reward") == 1
    found = result(tmp_path / "two")
    assert found["best_reward"] == earned(random_qpbo(20, seed=0), found["best_x"])
    assert found["best_reward"] == pytest.approx(max(record["best_reward"] for record in read_records(tmp_path / "two")))
    assert (found["steps"], found["evaluations"]) == (10, 210)
    tasks = [noise["task"] for noise in load_checkpoint(tmp_path / "two")["noise"]]
    assert found["best_reward"] == max(task["value"] for task in tasks)
    assert tasks[0]["x"] != tasks[1]["x"]  # each draws for itself
    assert [task["restart"] for task in tasks] == [1, 1]


# --- bad input


FILES = {
    "good.txt": TWO,
    "counts.txt": TWO.replace("3 4\n", "3 5\n", 1),
    "range.txt": TWO.replace("2 3 7", "2 4 7"),
    "zero.txt": TWO.replace("2 3 7", "0 3 7"),
    "text.txt": TWO.replace("2 3 7", "2 3 seven"),
    "short.txt": TWO[:-10],
    "long.txt": TWO + "1 1 1\n",
    "empty.txt": "",
    "prose.txt": "This is no instance at all.\n",
    "bad.qubo": "p qubo 0 2 2 1\n0 0 3\n1 1 -5\n",
    "graph.txt": "3 2\n1 2 1\n1 4 1\n",
}
MINE = """
import torch
calls = 0
def good(x): return x.sum(1)
def nan(x): return x.sum(1) / 0 * 0
def scalar(x): return x.sum()
def matrix(x): return x
def words(x): return ["a"] * len(x)
def raises(x): return x.no_such_thing
def late(x):
    global calls
    calls += 1
    return x.sum(1) if calls < 6 else torch.full((len(x),), float("inf"))
number = 3
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "qpbo_mine.py").write_text(MINE)
    (folder / "damaged_mine.py").write_text("def good(x) return x\n")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--instance counts.txt --index 1", "counts.txt, line 7: here entry 5 of 5 of problem 1 should come"),
        ("--instance range.txt --index 1", "range.txt, line 5: a variable's number is 4; it must be from 1 to 3"),
        ("--instance zero.txt --index 1", "zero.txt, line 5: a variable's number is 0"),
        ("--instance text.txt --index 1", "text.txt, line 5: the weight is 'seven'"),
        ("--instance short.txt --index 2", "short.txt"),
        ("--instance long.txt --index 1", "long.txt, line 11: the file should end"),
        ("--instance empty.txt", "empty.txt: the file is empty"),
        ("--instance prose.txt", "prose.txt, line 1"),
        ("--instance bad.qubo", "bad.qubo: line 1 says 1 couplers, but 0 lines"),
        ("--instance graph.txt", "graph.txt, line 3: a variable's number is 4"),
        ("--instance missing.txt", "missing.txt: there is no such file"),
        ("--instance .", "cannot be read"),
        ("--instance good.txt", "choose one with index (--index) from 1 to 2"),
        ("--instance good.txt --index 3", "the file's problems are 1 to 2"),
        ("--instance good.txt --index 0", "the file's problems are 1 to 2"),
        ("--instance good.txt --index one", "index"),
        ("--instance good.txt --index 1 --variables 7", "--variables 7, but"),
        ("--instance good.txt --reward qpbo_mine:good --variables 3", "give one problem"),
        ("--instance good.txt --index 1 --instance-seed 3", "give one problem"),
        ("--reward qpbo_mine:good --instance-seed 3 --variables 3", "give one problem"),
        ("", "give --variables N, or --instance FILE"),
        ("--index 1", "give --variables N, or --instance FILE"),
        ("--variables 5 --index 1", "--index says which problem of --instance"),
        ("--variables 0", "variables is 0"),
        ("--variables -3", "variables is -3"),
        ("--variables many", "variables"),
        ("--reward qpbo_mine:good", "give --variables N"),
        ("--reward qpbo_mine:nan --variables 4", "returned nan for row 1"),
        ("--reward qpbo_mine:scalar --variables 4", "returned torch.float32 ()"),
        ("--reward qpbo_mine:matrix --variables 4", "returned torch.float32 (4, 4)"),
        ("--reward qpbo_mine:words --variables 4", "returned a list"),
        ("--reward qpbo_mine:raises --variables 4", "raised AttributeError"),
        ("--reward qpbo_mine:number --variables 4", "is a int; it must be a function"),
        ("--reward qpbo_mine:goood --variables 4", "did you mean 'good'"),
        ("--reward qpbo_mine --variables 4", "write package.module:function"),
        ("--reward nowhere:good --variables 4", "there is no module 'nowhere'"),
        ("--reward damaged_mine:good --variables 4", "cannot be imported (SyntaxError"),
        ("--variables 5 --policy latnet", "did you mean 'latent'"),
        ("--variables 5 --estimator sumoo", "did you mean 'sumo'"),
        ("--variables 5 --policy gru --estimator sumoo", "did you mean 'sumo'"),
        ("--variables 5 --encoder sleap", "did you mean 'sleep'"),
        ("--variables 5 --policy latent --encoder same", "trains the encoder on noise"),
        ("--variables 5 --entropy-decay lineer", "did you mean 'linear'"),
        ("--variables 5 --decay lineer", "did you mean 'linear'"),
        ("--variables 5 --baseline leave-one", "did you mean 'leave-one-out'"),
        ("--variables 5 --k-draw data", "did you mean 'datum'"),
        ("--variables 5 --optimiser adm", "did you mean 'adam'"),
        ("--variables 5 --entropy -1", "entropy is -1"),
        ("--variables 5 --entropy nan", "entropy"),
        ("--variables 5 --scale 0", "scale is 0"),
        ("--variables 5 --scale some", "unknown scale 'some': the names are auto, a number"),
        ("--variables 5 --steps 0", "steps is 0"),
        ("--variables 5 --restarts 0", "restarts is 0"),
        ("--variables 5 --restarts 9 --steps 5", "restarts is 9, more than the 5 steps"),
        ("--variables 5 --patience 0", "patience is 0.0; it is a share of the steps, more than 0 and less than 1"),
        ("--variables 5 --patience 1", "less than 1, such as 0.5"),
        ("--variables 5 --patience nan", "patience"),
        ("--variables 5 --batch-size 0", "batch_size is 0"),
        ("--variables 5 --hidden 0", "hidden is 0"),
        ("--variables 5 --policy latent --cost 1", "cost is 1"),
        ("--variables 5 --colour red", "colour"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    bad: Path, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bad)
    before = {path.name for path in bad.iterdir()} - {"__pycache__"}
    assert main(["qpbo", *arguments.split(), "--out", "x"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("dohyo: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert {path.name for path in bad.iterdir()} - {"__pycache__"} == before


def test_bad_input_in_a_process_of_its_own(bad: Path) -> None:
    done = run("--reward", "qpbo_mine:nan", "--variables", "4", "--out", "x", "--json", folder=bad)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dohyo: error: qpbo_mine:nan, called with")
    assert done.stderr.count("\n") == 1
    assert not (bad / "x").exists()


def test_a_reward_that_fails_later(bad: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It has worked so far: the folder stays, with all that is needed to go on."""
    monkeypatch.chdir(bad)
    options = [*SMALL, "--check-every", "1", "--checkpoint-seconds", "0", "--steps", "9"]
    assert main(["qpbo", "--reward", "qpbo_mine:late", "--variables", "4", *options, "--out", "late"]) == 2
    _, error = capsys.readouterr()
    assert error.count("\n") == 1
    assert "returned inf for row 1 (20 rows are not finite)" in error
    assert load_checkpoint(bad / "late")["numbers"]["step"] > 0


def test_the_scale_of_a_noisy_reward_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is measured once, and a resumed run goes on with the number in config.yaml."""
    (tmp_path / "noisy.py").write_text("import torch\ndef noisy(x):\n    return x.sum(-1) + torch.randn(len(x))\n")
    monkeypatch.chdir(tmp_path)
    command = ["qpbo", "--reward", "noisy:noisy", "--variables", "5", "--policy", "independent", "--device", "cpu"]
    assert main([*command, "--steps", "4", "--out", "a"]) == 0
    assert main(["qpbo", "--resume", "a", "--steps", "8"]) == 0, capsys.readouterr().err
    assert result(tmp_path / "a")["reward_scale"] == yaml.safe_load((tmp_path / "a/config.yaml").read_text())["scale"]


def test_lost_parameters_end_the_run_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["qpbo", "--variables", "6", *SMALL, "--learning-rate", "1e37", "--entropy", "0.1"]
    assert main([*command, "--steps", "20", "--check-every", "5", "--out", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "NaN" in error
