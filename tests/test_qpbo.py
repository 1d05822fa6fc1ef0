"""`dohyo qpbo` as a user runs it: real files and processes, killed and resumed; what a result says is checked by hand."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from dohyo.lab.cli import main
from dohyo.lab.experiments.qpbo import Best, Optimise, QPBOConfig, QPBORun
from dohyo.lab.folder import read_records
from dohyo.lab.rewards import Quadratic, known, load, random_qpbo
from dohyo.lab.training.config import Progress
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import load_checkpoint
from dohyo.models import POLICIES, LatentPolicy
from real import command, finished, finished_together, kill_until_done, same_run

from problems import all_bits

SMALL = ["--policy", "latent", "--hidden", "16", "--latent", "4", "--batch-size", "20", "--device", "cpu"]
TWO = "2\n3 4\n1 1 3\n1 2 -4\n2 3 7\n3 3 -2\n4 3\n1 4 5\n2 2 -1\n3 4 -6\n"  # problem 1: max 12 at (0, 1, 1); problem 2: 10
REAL = Path(os.environ["DOHYO_DATA"]) / "qubo" if os.environ.get("DOHYO_DATA") else None
SECONDS = ("seconds", "seconds_per_step", "seconds_to_best")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return finished(command("qpbo", *arguments), folder)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def earned(problem: Any, x: list[int]) -> float | int:
    value: float | int = problem(torch.tensor([x])).item()
    return value


def without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in names}


def train(folder: Path, stop: int | None = None, **options: Any) -> dict[str, Any] | None:
    """A run in this process, ended as if killed after `stop` checks."""
    sizes: dict[str, Any] = {"hidden": 16, "latent": 4, "batch_size": 20, "device": "cpu", "checkpoint_seconds": 0.0}
    own = QPBORun(folder, QPBOConfig(**{"policy": "latent", **sizes, **options}))
    folder.mkdir(exist_ok=True)
    own.write_config()

    class StopError(Exception):
        pass

    def on_epoch(record: dict[str, Any]) -> None:
        if record["epoch"] == stop:
            raise StopError

    try:
        return own.train(launch("cpu"), on_epoch)
    except StopError:
        return None


# --- the commands of the README


def test_random_problem(tmp_path: Path) -> None:
    arguments = "--variables 100 --policy latent --estimator sumo --cost 15 --entropy 0.1 --steps 12 --seed 0 --out runs/q"
    done = run(*arguments.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "best reward" in done.stdout
    folder = tmp_path / "runs/q"
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.yaml",
        "metrics.jsonl",
        "result.json",
        "checkpoint.pt",
        "learning_curves.png",
        "learning_curves.json",
    }
    found, problem = result(folder), random_qpbo(100, seed=0)
    assert set(found["best_x"]) == {0, 1}
    assert len(found["best_x"]) == found["variables"] == 100
    assert found["best_reward"] == earned(problem, found["best_x"])
    assert found["mean_reward"] < found["best_reward"]
    assert found["mean_reward_stderr"] > 0
    assert found["best_known"] is found["gap"] is None
    assert 0 < found["seconds_per_step"] < found["seconds"]
    assert 0 <= found["seconds_to_best"] <= found["seconds"]
    assert found["evaluations_to_best"] <= found["evaluations"] == 1200
    assert (found["policy"], found["estimator"], found["encoder"], found["entropy"]) == ("latent", "sumo", "sleep", 0.1)
    assert found["expected_cost"] == pytest.approx(15.078, abs=1e-3)
    assert found["reward_scale"] == pytest.approx(20.5, rel=0.2)  # the root of d (d + 1) / 2 weights' share
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["optimiser"], config["learning_rate"], config["epsilon"]) == ("adam", 1e-3, 1e-3)
    assert [record["step"] for record in read_records(folder)] == [12]


def test_instance_file(tmp_path: Path) -> None:
    (tmp_path / "bqp100.txt").write_text((REAL / "bqp100.txt").read_text() if REAL else TWO)
    arguments = "--instance bqp100.txt --index 1 --policy latent --estimator sumo --cost 15 --steps 12 --out runs/r --json"
    done = run(*arguments.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == result(tmp_path / "runs/r")
    problem = load(tmp_path / "bqp100.txt", 1)
    assert found["best_reward"] == earned(problem, found["best_x"])
    assert isinstance(found["best_reward"], int)
    assert found["problem"] == "bqp100.txt, problem 1"
    assert found["best_known"] == (7970 if REAL else None)
    if REAL:
        assert found["gap"] == (7970 - found["best_reward"]) / 7970
    else:
        assert found["best_reward"] == 12


def test_users_reward(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/module.py").write_text("def function(x):\n    return (x[:, 0] * x[:, 1:].sum(1)).long()\n")
    arguments = "--reward package.module:function --variables 60 --policy latent --steps 12 --out runs/s"
    done = run(*arguments.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "runs/s")
    assert found["problem"] == "package.module:function"
    assert found["best_x"][0] == 1
    assert found["best_reward"] == sum(found["best_x"][1:]) > 30
    assert isinstance(found["best_reward"], int)


# --- what a result says


def test_best_x_is_the_best_sample_of_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, seen = random_qpbo(30, seed=4), []
    sample_joint = LatentPolicy.sample_joint

    def spy(self: LatentPolicy, n: int) -> tuple[Tensor, Tensor]:
        z, x = sample_joint(self, n)
        seen.append(x)
        return z, x

    monkeypatch.setattr(LatentPolicy, "sample_joint", spy)
    found = train(tmp_path / "a", variables=30, instance_seed=4, steps=17, check_every=5, entropy=0.1)
    assert found is not None
    x = torch.cat(seen)[:340]  # the rest are of the trained policy, for its mean reward
    assert found["evaluations"] == 340
    rewards = problem(x)
    top = int(rewards.argmax())
    assert x[top].int().tolist() == found["best_x"]
    assert found["best_reward"] == earned(problem, found["best_x"]) == pytest.approx(float(rewards[top]), abs=1e-12)
    assert found["evaluations_to_best"] == (top // 20 + 1) * 20
    assert [record["best_reward"] for record in read_records(tmp_path / "a")] == pytest.approx(
        [float(rewards[: 20 * step].max()) for step in (5, 10, 15, 17)], abs=1e-12
    )
    assert [record["reward"] for record in read_records(tmp_path / "a")] == pytest.approx(
        [float(part.mean()) for part in rewards.split(100)], abs=1e-5
    )


@pytest.mark.parametrize(  # the GRU has its gradient tested, and is trained as NADE is
    "policy", [pytest.param(name, marks=pytest.mark.slow) if name == "gru" else name for name in POLICIES]
)
def test_it_learns(policy: str, tmp_path: Path) -> None:
    """Twelve variables: the optimum is known by enumeration, and in the end the policy draws little else."""
    optimum = float(random_qpbo(12, seed=2)(all_bits(12)).max())
    steps = 250 if policy == "independent" else 160
    found = train(
        tmp_path / "a", policy=policy, variables=12, instance_seed=2, steps=steps, batch_size=50, learning_rate=0.02,
        check_every=20, entropy=0.5, entropy_decay="linear", checkpoint_seconds=100.0,
    )  # fmt: skip
    assert found is not None
    assert found["best_reward"] == pytest.approx(optimum, abs=1e-9)
    assert found["mean_reward"] > (0.7 if policy == "independent" else 0.9) * optimum
    records = read_records(tmp_path / "a")
    assert records[0]["reward"] < 0.6 * optimum
    assert records[-1]["entropy"] < 0.6 * records[0]["entropy"]


def test_best_known_values_are_found_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "anything.txt").write_text(TWO)
    weights = load(tmp_path / "anything.txt", 2).weights
    monkeypatch.setitem(known.BEST_KNOWN, known.checksum(weights) or "", 16)
    for index, best_known, gap in ((1, None, None), (2, 16, 0.375)):
        found = train(tmp_path / f"{index}", instance=tmp_path / "anything.txt", index=index, policy="independent", steps=4)
        assert found is not None
        assert (found["best_known"], found["gap"]) == (best_known, gap)
        assert found["best_reward"] == (12, 10)[index - 1]


def test_seconds_to_best_lie_within_the_run(tmp_path: Path) -> None:
    """Also where writing takes more time than training does."""
    (tmp_path / "rising.py").write_text(
        "import torch\ncalls = 0\n"
        "def reward(x):\n    global calls\n    calls += 1\n    return torch.full((len(x),), float(calls))\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = train(
            tmp_path / "a", reward="rising:reward", variables=3, policy="independent", steps=30, check_every=1, scale=1.0
        )
    assert found is not None
    assert found["best_reward"] == max(record["best_reward"] for record in read_records(tmp_path / "a"))
    assert found["evaluations_to_best"] == found["evaluations"]  # the last batch is the best
    assert 0.5 * found["seconds"] < found["seconds_to_best"] <= found["seconds"]


def test_rounding_is_no_better_reward() -> None:
    problem = random_qpbo(50, seed=0)
    best, x = Best(problem), torch.randint(2, (1, 50), generator=torch.Generator().manual_seed(0)).float()
    best.now = 1
    best(x)
    best.now = 2
    for n in (2, 7, 100):  # sums of another batch may round otherwise
        best(x.expand(n, -1))
    assert best.step == 1
    assert best.value == problem(x).item()
    best(1 - x if problem(1 - x) > problem(x) else x)
    huge = Best(Quadratic([[2**60, 0], [0, 1]]))  # whole numbers have no rounding, nor doubles their digits
    huge(torch.tensor([[1.0, 0.0]]))
    huge(torch.tensor([[1.0, 1.0]]))
    assert huge.value == 2**60 + 1


def test_a_constant_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flat.py").write_text("def reward(x):\n    return 0 * x[:, 0] - 5\n")
    monkeypatch.chdir(tmp_path)
    found = train(tmp_path / "a", reward="flat:reward", variables=3, steps=3, entropy=0.1)
    assert found is not None
    assert (found["best_reward"], found["mean_reward"], found["reward_scale"]) == (-5, -5, 1)


# --- schedules


def test_schedules_of_entropy_and_learning_rate() -> None:
    options: dict[str, Any] = {"variables": 5, "policy": "latent", "steps": 100, "entropy": 0.4}
    config = QPBOConfig(**options, entropy_decay="linear", decay="linear", restarts=2)
    assert [config.entropy_at(step) for step in (0, 25, 50, 75)] == pytest.approx([0.4, 0.2, 0.4, 0.2])
    assert [config.rate(Progress(step=step)) for step in (0, 25, 50)] == pytest.approx([1e-3, 5e-4, 1e-3])
    task, progress, seen = Optimise(Best(random_qpbo(5, seed=0)), scale=1.0), Progress(), []
    while progress.step < 100:
        steps = 0
        for _ in task.batches(config, progress, torch.Generator()):
            seen.append(task.entropy)
            progress.step += 1
            steps += 1
        assert steps == 50  # check_every is 100, but a new training begins a new epoch
    assert seen == pytest.approx([0.4 * (1 - step % 50 / 50) for step in range(100)])
    constant = QPBOConfig(**options)
    assert {constant.entropy_at(step) for step in (0, 50, 99)} == {0.4}


def test_what_is_left_out_depends_on_the_policy(tmp_path: Path) -> None:
    """Many fast trainings of independent bits, longer ones for larger problems; of other policies one, as in the paper."""
    fast, slow = QPBOConfig(variables=500), QPBOConfig(variables=500, policy="latent")
    names = ("policy", "learning_rate", "epsilon", "entropy", "entropy_decay", "steps", "restarts")
    assert [getattr(fast, name) for name in names] == ["independent", 0.3, 1e-8, 0.05, "linear", 20_000, 20]
    assert [getattr(slow, name) for name in names] == ["latent", 1e-3, 1e-3, 0.0, "none", 5_000, 1]
    assert QPBOConfig(variables=3).restarts == 100
    assert QPBOConfig(variables=30_000).restarts == 1
    assert QPBOConfig(variables=500, entropy=0.0, restarts=3, steps=7).entropy == 0  # what is given counts
    (tmp_path / "two.txt").write_text(TWO)
    run = QPBORun(tmp_path / "a", QPBOConfig(instance=tmp_path / "two.txt", index=1, steps=600, device="cpu"))
    assert run.config.restarts == "auto"  # until the file is read
    run.folder.mkdir()
    run.write_config()
    assert yaml.safe_load((tmp_path / "a/config.yaml").read_text())["restarts"] == 3
    assert run.train(launch("cpu"))["best_reward"] == 12


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="needs DOHYO_DATA")
def test_the_plain_command_comes_close(tmp_path: Path) -> None:
    assert REAL is not None
    done = run("--instance", str(REAL / "bqp100.txt"), "--index", "1", "--device", "cpu", "--out", "a", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "a")["gap"] <= 0.005


def test_restarts_begin_anew(tmp_path: Path) -> None:
    options: dict[str, Any] = {"variables": 10, "policy": "independent", "learning_rate": 0.3, "entropy": 0.01}
    found = train(tmp_path / "a", steps=60, check_every=7, restarts=3, **options)
    assert found is not None
    records = read_records(tmp_path / "a")
    assert [record["step"] for record in records] == [7, 14, 20, 27, 34, 40, 47, 54, 60]
    entropies = [record["entropy"] for record in records]
    assert min(entropies[::3]) > 1.5 * max(entropies[2::3])
    assert [record["best_reward"] for record in records] == sorted(record["best_reward"] for record in records)
    assert found["best_reward"] == earned(random_qpbo(10, seed=0), found["best_x"])
    assert found["best_reward"] == records[-1]["best_reward"]
    assert found["restarts"] == 3


def test_independent_bits_begin_uniform_and_then_at_random() -> None:
    first, second, third = (QPBOConfig(variables=50).build_policy(50, restart).bias.std() for restart in range(3))
    assert first == 0
    assert 0.5 < second < 2
    assert second != third


def test_each_restart_has_parameters_of_its_own(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"policy": "latent", "hidden": 8, "latent": 2}
    config = QPBOConfig(variables=10, **sizes, restarts=2, steps=10, check_every=5, device="cpu")
    firsts = [config.build_policy(10, restart).state_dict() for restart in range(2)]
    assert not torch.equal(firsts[0]["decoder.0.weight"], firsts[1]["decoder.0.weight"])
    seen = []
    begun = Optimise.batches

    def spy(self: Optimise, *arguments: Any) -> Any:
        seen.append({key: value.clone() for key, value in own.parts[0].state_dict().items()})
        return begun(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimise, "batches", spy)
        own = QPBORun(tmp_path, config)
        own.write_config()
        own.train(launch("cpu"))
    assert len(seen) == 2
    for first, found in zip(firsts, seen, strict=True):
        assert all(torch.equal(first[key], found[key]) for key in first)
    steps = {int(state["step"]) for state in load_checkpoint(tmp_path)["optimiser"]["state"].values()}
    assert steps == {5}  # Adam's memory begins anew as well


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
    assert "it ended by itself" in capsys.readouterr().out
    assert main(["qpbo", "--resume", str(tmp_path / "a"), "--max-seconds", "0.6"]) == 0, capsys.readouterr().err
    assert result(tmp_path / "a")["steps"] > found["steps"]


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
