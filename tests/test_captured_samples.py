"""Reverse KL and policies in one program, replicas and captured: the same numbers as the plain loop, one run at a time."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import dohyo
from dohyo.lab.experiments.qpbo import Best, Optimise, QPBOConfig
from dohyo.lab.experiments.reverse_kl import ReverseKLConfig
from dohyo.lab.fast import graphs
from dohyo.lab.fast.captured import Layout, PaddedTables, Shape, layouts
from dohyo.lab.fast.stacked import Unbatchable
from dohyo.lab.fast.together import Replica, choose_for, train_together
from dohyo.lab.rewards import Quadratic, random_qpbo, reward
from dohyo.lab.targets import Custom, Funnel, Target
from dohyo.lab.training import train
from dohyo.lab.training.processes import launch
from dohyo.lab.training.tasks import OnDraws
from dohyo.models import GaussianLVM
from dohyo.packing import through_tables
from teams import assert_same

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SIZES: dict[str, Any] = {"hidden": 8, "latent": 3, "steps": 4, "check_every": 2, "batch_size": 20, "k_seed": 0, "device": "cpu"}
PROBLEM = random_qpbo(6, seed=0)
POLICY: dict[str, Any] = {"entropy": 0.1, "restarts": 2}


def member(kind: str, seed: int, problem: Any = PROBLEM, target: Target | None = None, **changes: Any) -> tuple[Replica, Any]:
    """A run and its objective."""
    options = SIZES | changes
    if kind == "kl":
        config = ReverseKLConfig(seed=seed, **options)
        torch.manual_seed(seed)
        return Replica(GaussianLVM(2, 8, 3), OnDraws(), config), config.objective(target or Funnel())
    policy = QPBOConfig(**{"policy": "latent", "seed": seed, "variables": 6, **options})
    task = Optimise(Best(problem), 2.0)
    objective = policy.objective(task.best, lambda: task.entropy, lambda: task.scale)
    return Replica(policy.build_policy(6), task, policy), objective


def assert_runs_alone(
    kind: str, seeds: tuple[int, ...], tolerance: float = 1e-5, dtype: torch.dtype = torch.float32, **changes: Any
) -> list[dict[str, Any]]:
    """Runs in one program are the same as on their own in the plain loop; returns the records of the first."""
    torch.set_default_dtype(dtype)
    try:
        return _runs_alone(kind, seeds, tolerance, **changes)
    finally:
        torch.set_default_dtype(torch.float32)


def _runs_alone(kind: str, seeds: tuple[int, ...], tolerance: float, **changes: Any) -> list[dict[str, Any]]:
    made = [member(kind, seed, **changes) for seed in seeds]
    records: list[list[dict[str, Any]]] = [[] for _ in seeds]
    for place, record in train_together([run for run, _ in made], made[0][1]):
        records[place].append(record)
    for (run, _), own in zip(made, records, strict=True):
        alone, objective = member(kind, run.config.seed, **changes)
        plain = list(train(alone.model, alone.task, objective, dataclasses.replace(alone.config, program="plain")))
        assert_same((own, run.model), (plain, alone.model), tolerance)
        if kind == "policy":
            kept = [(task.best.value, task.best.x, task.best.step) for task in (run.task, alone.task)]
            assert kept[0] == kept[1]
    return records[0]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("kl", {}),
        ("kl", {"estimator": "iwae", "optimiser": "rmsprop", "clip_decoder": 0.1}),
        ("kl", {"encoder": "variance", "baseline": "target", "k_draw": "batch"}),
        ("kl", {"encoder": "iwae", "paths": "all", "k_draw": "stratified"}),
        ("kl", {"encoder": "dreg", "estimator": "multilevel-rr", "cost": 5.0}),
        ("policy", {"entropy": 0.1, "entropy_decay": "linear", "restarts": 2}),
        ("policy", {"encoder": "dreg", "k_draw": "batch", "entropy": 0.1, "baseline": "none"}),
        ("policy", {"estimator": "iwae", "problem": Quadratic([[3 * (i == j) - 1 for j in range(6)] for i in range(6)])}),
    ],
)
def test_replicas_are_the_runs_alone(kind: str, changes: dict[str, Any]) -> None:
    """Every encoder, every set of paths, K for each sample and for the batch; policies find the same best x at the same step."""
    assert_runs_alone(kind, (3, 4), **changes)


def test_replicas_differ_from_each_other() -> None:
    made = [member("kl", seed) for seed in (3, 4)]
    ends = [record["estimate"] for _, record in train_together([run for run, _ in made], made[0][1])]
    assert len(set(ends)) == 4


def test_a_layout_is_its_plan() -> None:
    """What a table function makes of padded rows is what it makes of the packed ones, whatever the padding holds."""
    estimator, generator = dohyo.SUMO(2), torch.Generator().manual_seed(0)
    counts = torch.stack([estimator.plan(20, generator) for _ in range(3)])
    shape = Shape.of(20, int(counts.sum(1).max()), int(counts.max()), varying=True)
    assert (shape.rows % 128, shape.width & (shape.width - 1)) == (0, 0)

    def function(log_w: Tensor, own: Tensor, each: Tensor) -> tuple[Tensor, ...]:
        used = torch.arange(log_w.shape[1]) < own[:, None]
        return torch.where(used, log_w * each[:, None], 0.0), torch.where(used, log_w, 0.0).sum(-1)

    for plan, row in zip(counts, layouts(counts, shape, batch=10), strict=True):
        total, layout = int(plan.sum()), Layout.read(row, shape)
        assert torch.equal(layout.rows[:total], dohyo.rows(plan) % 10)
        log_w, each = torch.randn(2, shape.rows, dtype=torch.float64), torch.randn(2, 20, dtype=torch.float64)
        rows, sums = PaddedTables(compiling=False)(function, log_w, layout, each.flatten())
        assert not bool(rows[:, total:].any())
        for run in range(2):
            of_rows, of_data = through_tables(function, log_w[run, :total], plan, each[run])
            assert torch.equal(rows[run, :total], of_rows)
            assert torch.allclose(sums.view(2, 20)[run], of_data)


def test_shapes_are_few_and_not_much_larger_than_needed() -> None:
    shapes = {Shape.of(100, total, 40, varying=True) for total in range(1000, 4000)}
    assert len(shapes) < 12
    assert all(Shape.of(100, total, 40, varying=True).rows <= max(1.25 * total, total + 128) for total in range(1, 10_000))
    assert Shape.of(100, 1500, 15, varying=False) == (100, 1536, 15)


@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
@pytest.mark.parametrize("kind", ["kl", pytest.param("policy", marks=pytest.mark.slow)])
def test_they_can_be_captured(kind: str) -> None:
    """Tried as training does, with the compiler's front end."""
    run, objective = member(kind, 0, program="captured", batch_size=100)
    assert choose_for([run], objective, launch("cpu")).captured
    assert not dataclasses.replace(run.config, program="auto").captured_on(torch.device("cuda"))  # it takes long to get ready


def test_why_they_cannot_be_captured() -> None:
    def branching(x: Tensor) -> Tensor:
        return -x.square().sum(-1) * (1 if float(x.sum()) > 0 else 2)

    for made, why in (
        (
            member("kl", 0, target=Custom(branching, 2), program="captured"),
            "GaussianLVM cannot be captured .*; use program 'plain'",
        ),
        (member("policy", 0, problem=reward(lambda x: x.sum(1), 6), program="captured"), "a function of your own"),
        (member("policy", 0, policy="nade", program="captured"), "NADEPolicy is not trained on estimates"),
    ):
        with pytest.raises(Unbatchable, match=why):
            choose_for([made[0]], made[1], launch("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [("kl", {}), ("policy", {"dtype": torch.float64, **POLICY})])
def test_captured_on_a_cpu(kind: str, changes: dict[str, Any]) -> None:
    records = assert_runs_alone(kind, (3, 4), 1e-12 if "dtype" in changes else 1e-5, program="captured", **changes)
    assert records[0]["program"] == "captured"


@needs_gpu
def test_replicas_on_a_gpu() -> None:
    """Not compiled; a restart leaves the noise alone."""
    assert_runs_alone("policy", (3, 4), tolerance=1e-9, device="cuda", steps=8, dtype=torch.float64, **POLICY)


@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("kl", {}), ("kl", {"encoder": "iwae"}), ("kl", {"estimator": "iwae"}), ("policy", {"dtype": torch.float64, **POLICY})],
)
def test_captured_on_a_gpu(kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded and replayed, without a wait for the GPU. A bit that is sampled may round differently in single precision, and
    training from there on; in double precision none does, and only the plain optimiser's learning rate is rounded."""
    taken, replay = [], graphs.Replayed._replay

    def watched(self: graphs.Replayed, *arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            replay(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        taken.append(1)

    monkeypatch.setattr(graphs.Replayed, "_replay", watched)
    options = {"device": "cuda", "steps": 60, "check_every": 30, "program": "captured"} | changes
    assert_runs_alone(kind, (3, 4), tolerance=1e-7 if "dtype" in changes else 1e-4, **options)
    assert len(taken) > 30
