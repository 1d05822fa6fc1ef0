"""`dohyo qpbo` as a user runs it: what a result says is checked by hand."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from dohyo.lab.experiments.qpbo import Best, Optimise, QPBOConfig, QPBORun
from dohyo.lab.folder import read_records
from dohyo.lab.rewards import Quadratic, load, quadratic, random_qpbo
from dohyo.lab.training.config import Progress
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import load_checkpoint
from dohyo.models import POLICIES, LatentPolicy
from real import command, finished

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
    monkeypatch.setitem(quadratic.BEST_KNOWN, quadratic.checksum(weights) or "", 16)
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
