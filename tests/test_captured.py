"""The captured step: the same numbers as the plain loop."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dohyo
from dohyo.estimators import ESTIMATORS
from dohyo.lab.fast import captured, graphs, programs
from dohyo.lab.fast.captured import traced
from dohyo.lab.fast.stacked import Stacked, Unbatchable
from dohyo.lab.fast.together import Replica, train_together
from dohyo.lab.fast.trial import check_batchable
from dohyo.lab.training.state import load_checkpoint
from dohyo.lab.training.tasks import OnData
from dohyo.models import VAE, TwoLayerVAE
from dohyo.objectives import MaximumLikelihood
from teams import DATA, Handmade, PlainBind, alone, assert_same, config, model, objective, together

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Joined(VAE):
    """torch.cat on tensors with one row for each log-weight, mapped over replicas, fixes their number."""

    def posterior(self, code: Tensor) -> Any:
        return super().posterior(torch.cat([code[..., :4], code[..., 4:]], -1))


@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
@pytest.mark.parametrize("cls", [TwoLayerVAE, pytest.param(VAE, marks=pytest.mark.slow)])
def test_one_program_for_every_number_of_log_weights(cls: type[nn.Module]) -> None:
    models, x = [model(seed, cls) for seed in range(2)], DATA.valid[:2]
    torch._dynamo.reset()  # or a program of an earlier test may serve
    counters.clear()
    stacked = Stacked(models, [torch.Generator() for _ in models], "dreg", traced, varying=True)
    for n in (2, 3, 7):
        data, rows = torch.cat([x, x]), torch.arange(2).repeat_interleave(n)
        stacked(data, rows, stacked.noise(data, rows))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_model_that_fixes_the_number_of_log_weights() -> None:
    """Its replicas go together uncompiled."""
    with pytest.raises(Unbatchable, match=r"cannot be captured .*; use program 'plain'"):
        together([0, 1], objective("sumo"), Joined, program="captured")
    records, _ = together([0, 1], objective("sumo"), Joined, program="auto", epochs=1)
    assert records[0][0]["program"] == "plain"


@pytest.mark.parametrize(("cls", "encoder"), [(PlainBind, "iwae"), (PlainBind, "variance"), (Handmade, "same")])
def test_models_that_know_little_can_be_traced(cls: type[nn.Module], encoder: str) -> None:
    """No option of `bind` that the objective does not need, noise by hand; tried as training then calls them."""
    check_batchable([model(0, cls)], DATA.valid[:2], torch.tensor([0, 0, 1, 1]), encoder, traced, varying=True)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "encoder"), [(PlainBind, "iwae"), (Handmade, "same")])
def test_models_that_know_little_captured_on_a_cpu(cls: type[nn.Module], encoder: str) -> None:
    wanted = objective("iwae", encoder)
    records, models = together([3], wanted, cls, program="captured")
    assert_same((records[0], models[0]), alone(3, wanted, cls))


def test_a_captured_step_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("expected size 2==2, stride 7200==18000\nand more")

    monkeypatch.setattr(programs.Program, "_step", broken)
    with pytest.raises(ValueError, match=r"7200==18000\); train with program 'plain'"):
        together([0], objective("iwae"), program="captured", epochs=1)
    with pytest.raises(AssertionError):
        together([0, 1], objective("iwae"), epochs=1)


def traced_with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    captured._show_noise()
    return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
def test_a_compiled_function_changes_its_arguments() -> None:
    def step(average: Tensor, value: Tensor) -> list[Tensor]:
        average.lerp_(value, 0.25)
        return [average - value]

    average, other, value = torch.zeros(2, 3), torch.ones(2, 3), torch.randn(2, 3)
    program = captured.compiled(step, average, value)
    assert not average.any()  # neither tried nor traced on it
    for table in (average, other):
        expected = table.lerp(value, 0.25)
        (found,) = program(table, value)
        assert torch.allclose(table, expected)
        assert torch.allclose(found, expected - value)


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_captured_step_on_a_cpu(inductor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, with two replicas and a random number of log-weights, and gone on with by the plain program.

    One batch size and one bucket, to compile little. Inductor takes a minute of a C++ compiler's time for these graphs: what it
    makes of the gradients of networks is in test_products, of the rest above.
    """
    if not inductor:
        monkeypatch.setattr(programs, "network", traced_with_gradients)
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, example, options: graph)
    wanted = MaximumLikelihood(dohyo.SUMO(2, dohyo.Finite((0.5, 0.5))))
    records: dict[int, list[dict[str, Any]]] = {3: [], 4: []}
    options: dict[str, Any] = {
        "batch_size": len(DATA.train),
        "epochs": 8,
        "schedule": "cosine",
        "average": 3,
        "optimiser": "adam",
    }
    for program, length in (("captured", 4), ("plain", 8)):
        models = {seed: model(seed) for seed in records}
        changes = options | {"program": program, "checkpoint_seconds": 0.0}
        members = [Replica(m, OnData(DATA), config(seed, **changes), tmp_path / str(seed)) for seed, m in models.items()]
        running = train_together(members, wanted)
        for place, record in itertools.islice(running, 2 * length):
            records[3 + place].append(record)
        running.close()  # type: ignore[attr-defined]
    assert [record["program"] for record in records[3]] == 4 * ["captured"] + 4 * ["plain"]
    for seed, made in models.items():
        single, folder = model(seed), tmp_path / f"alone_{seed}"
        assert_same((records[seed], made), (list(dohyo.lab.fit(single, DATA, wanted, config(seed, **options), folder)), single))
        for value, other in zip(
            *(load_checkpoint(one)["average"].values() for one in (tmp_path / str(seed), folder)), strict=True
        ):
            assert torch.allclose(value, other, atol=2e-4, rtol=0)


def test_draws_in_one_piece_of_memory() -> None:
    """As a recorded step reads what was drawn for it: one copy moves tensors of several types."""
    drawn = [torch.rand(3, 5), torch.arange(7), torch.rand(2, 3) < 0.5, torch.rand(4, 1, 2, dtype=torch.float64)]
    like = [part.to("meta") for part in drawn]
    memory, copy = torch.zeros(2, sum(map(graphs._room, like)), dtype=torch.uint8)
    for place, part in zip(graphs._views(memory, like), drawn, strict=True):
        assert (place.data_ptr() - memory.data_ptr()) % 256 == 0
        place.copy_(part)
    copy.copy_(memory)
    for found, part in zip(graphs._views(copy, like), drawn, strict=True):
        assert torch.equal(found, part)
        assert found.is_contiguous()


def test_data_reach_the_step_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous, whatever the user's function makes: a recorded step reads them so, and other strides would be compiled anew."""

    class Sideways(type(DATA)):  # type: ignore[misc]
        def train_batch(self, index: Tensor) -> Tensor:
            return super().train_batch(index).T.contiguous().T

    class Seen(Exception):  # noqa: N818
        pass

    def seen(program: programs.Program, drawn: list[Tensor], plan: object) -> None:
        assert drawn[0].shape == (300, 64)
        raise Seen(drawn[0].is_contiguous())

    monkeypatch.setattr(programs.Program, "_step", seen)
    turned = Sideways(**{field.name: getattr(DATA, field.name) for field in dataclasses.fields(DATA)})
    with pytest.raises(Seen, match="True"):
        list(dohyo.lab.fit(model(0), turned, objective("iwae"), config(0, "captured")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "encoder"),
    [("iwae", "same"), ("iwae", "dreg"), ("sumo", "variance"), ("symmetric-sumo", None), ("multilevel-rr", None)],
)
def test_every_objective_captured_on_a_cpu(name: str, encoder: str | None) -> None:
    wanted = objective(name, encoder)
    records, models = together([3], wanted, program="captured")
    assert_same((records[0], models[0]), alone(3, wanted))


@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize(
    ("name", "encoder", "baseline"),
    [("iwae", "same", "zero"), ("sumo", "dreg", "zero"), ("sumo", "variance", "zero"), ("sumo", "variance", "running"),
     ("multilevel-rr", "dreg", "zero")],
)  # fmt: skip
def test_the_captured_step_on_a_gpu(name: str, encoder: str, baseline: str) -> None:
    """Recorded and replayed: most of these steps come from a graph."""
    wanted = MaximumLikelihood(ESTIMATORS[name].at_cost(6), encoder, baseline=baseline)
    options = {"device": "cuda", "batch_size": 50, "epochs": 3}
    records, models = together([3, 4], wanted, program="captured", **options)
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted, **options), tolerance=1e-4)
    with pytest.raises(AssertionError):
        assert_same((records[0], models[0]), alone(4, wanted, **options), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("name", ["iwae", "sumo"])
def test_two_stochastic_layers_captured(name: str, device: str) -> None:
    wanted, options = objective(name, "dreg"), {"device": device, "epochs": 3}
    records, models = together([3, 4], wanted, TwoLayerVAE, program="captured", **options)
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted, TwoLayerVAE, **options), tolerance=1e-4)


@pytest.mark.slow
@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_recorded_steps_never_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = [], graphs.Graphs.__call__

    def watched(self: graphs.Graphs, index: Tensor, n: int) -> None:
        recorded = (index.shape[1], n) in self.recorded
        torch.cuda.set_sync_debug_mode("error" if recorded else "default")
        try:
            take(self, index, n)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        taken.append(recorded)

    monkeypatch.setattr(graphs.Graphs, "__call__", watched)
    together([3, 4], objective("sumo"), program="captured", device="cuda", batch_size=50, epochs=3)
    assert sum(taken) > len(taken) / 2


@pytest.mark.slow
@needs_gpu
def test_a_captured_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    wanted, options = objective("sumo"), {"device": "cuda", "batch_size": 50}
    for epochs in (2, 4):
        made = model(3)
        list(dohyo.lab.fit(made, DATA, wanted, config(3, "captured", epochs=epochs, **options), tmp_path / "run"))
    whole = model(3)
    list(dohyo.lab.fit(whole, DATA, wanted, config(3, "captured", epochs=4, **options)))
    for a, b in zip(made.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=0)
