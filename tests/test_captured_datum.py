"""A K for each datum in one program, replicas and captured: the same numbers as the plain loop, one run at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dohyo
from dohyo.lab.fast import graphs, programs
from dohyo.lab.fast.captured import traced
from dohyo.lab.fast.programs import choose
from dohyo.lab.fast.stacked import LINE, Stacked, Unbatchable
from dohyo.lab.fast.trial import check_batchable
from dohyo.lab.training.config import StepConfig
from dohyo.lab.training.processes import launch
from dohyo.lab.training.tasks import OnData
from dohyo.models import VAE, TwoLayerVAE
from dohyo.objectives import MaximumLikelihood
from teams import DATA, alone, assert_same, config, model, objective, together
from test_captured import traced_with_gradients

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CASES: list[Any] = [
    ("sumo", "dreg", {"k_draw": "datum", "clip_datum": 2.0}),
    ("multilevel-rr", "variance", {"k_draw": "stratified"}),
    pytest.param("sumo", "variance", {"k_draw": "stratified", "clip_datum": 2.0}, marks=pytest.mark.slow),
    pytest.param("multilevel-rr", "dreg", {"k_draw": "datum"}, marks=pytest.mark.slow),
]
SLOW_SECOND = [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.slow), *CASES[2:]]  # rare K are huge there
SMALLER_LAST: dict[str, Any] = {"batch_size": 500}  # of 1,297 data


class Jittered(VAE):
    """Noise for each datum, between those for each log-weight."""

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x + 0.1 * torch.randn_like(x))


class InPairs(VAE):
    """Noise with two rows for each log-weight."""

    def bind(self, x: Tensor, **options: bool) -> Any:
        source = super().bind(x, **options)
        return lambda rows: source(rows) + 0.0 * torch.randn_like(x[rows].repeat(2, 1)).sum()


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace all that would be compiled, and compile nothing."""
    monkeypatch.setattr(programs, "network", traced_with_gradients)
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, example, options: graph)


@pytest.mark.parametrize(("name", "encoder", "options"), SLOW_SECOND)
def test_replicas_are_the_runs_alone(name: str, encoder: str, options: dict[str, Any]) -> None:
    wanted = objective(name, encoder, **options)
    records, models = together([3, 4], wanted, **SMALLER_LAST)
    assert records[0][0]["step"] == 3
    assert (records[0][0]["clipped_data"] > 0) == ("clip_datum" in options)
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted, **SMALLER_LAST))
    with pytest.raises(AssertionError):
        assert_same((records[0], models[0]), alone(4, wanted, **SMALLER_LAST))


@pytest.mark.parametrize("cls", [TwoLayerVAE, Jittered])
def test_other_models(cls: type[nn.Module]) -> None:
    """Two kinds of noise for each log-weight; noise for each datum as well."""
    wanted = objective("sumo", k_draw="datum")
    records, models = together([3, 4], wanted, cls, **SMALLER_LAST, epochs=1)
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted, cls, **SMALLER_LAST, epochs=1))


def test_noise_that_is_not_of_rows_is_refused() -> None:
    rows = torch.arange(2 * LINE) // LINE
    check_batchable([model(0, InPairs)], DATA.valid[:2], rows, "dreg")
    with pytest.raises(Unbatchable, match="InPairs draws noise for its log-weights that is not one row for each"):
        check_batchable([model(0, InPairs)], DATA.valid[:2], rows, "dreg", padded=True)


@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
@pytest.mark.parametrize(("name", "encoder", "options"), SLOW_SECOND)
def test_captured_on_a_cpu(name: str, encoder: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    seeds = [3, 4] if options["k_draw"] == "datum" else [3]
    wanted = objective(name, encoder, **options)
    records, models = together(seeds, wanted, **SMALLER_LAST, program="captured")
    assert records[0][0]["program"] == "captured"
    for place, seed in enumerate(seeds):
        assert_same((records[place], models[place]), alone(seed, wanted, **SMALLER_LAST))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "encoder", "options"), CASES[:2])
def test_compiled_on_a_cpu(name: str, encoder: str, options: dict[str, Any]) -> None:
    wanted = objective(name, encoder, **options)
    records, models = together([3, 4], wanted, program="captured")
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
@pytest.mark.parametrize("k_draw", ["stratified", "datum"])
def test_a_captured_run_goes_on_from_its_checkpoint(k_draw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    wanted = objective("sumo", k_draw=k_draw)
    made, whole = model(3), model(3)
    for epochs in (1, 3):
        made = model(3)
        list(dohyo.lab.fit(made, DATA, wanted, config(3, "captured", epochs=epochs, **SMALLER_LAST), tmp_path / "run"))
    list(dohyo.lab.fit(whole, DATA, wanted, config(3, "captured", epochs=3, **SMALLER_LAST)))
    for a, b in zip(made.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
def test_one_program_for_every_layout() -> None:
    models, x = [model(seed) for seed in range(2)], DATA.valid[:4]
    torch._dynamo.reset()
    counters.clear()
    stacked = Stacked(models, [torch.Generator() for _ in models], "dreg", traced, varying=True, padded=True)
    for lines in (2, 3, 7):
        rows = torch.randint(2, (lines * LINE,))
        stacked(x, rows, stacked.noise(x, rows))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("k_draw", ["datum", "stratified"])
def test_auto_captures(k_draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA GPU."""
    monkeypatch.setattr(StepConfig, "captured_on", lambda config, device: config.program != "plain")
    made, task, fabric = [model(0)], OnData(DATA), launch("cpu")
    for name in ("sumo", "iwae"):
        assert choose(made, task, objective(name, k_draw=k_draw), config(0, "auto"), fabric).captured


def test_numbers_of_chains_that_differ_within_a_batch_stay_plain() -> None:
    made = dohyo.Annealed(model(0), 2)
    with pytest.raises(
        Unbatchable, match="each datum has its own number of chains, for which there is no program; use program 'plain'"
    ):
        choose([made], OnData(DATA), objective("sumo", k_draw="datum"), config(0, "captured"), launch("cpu"))


@pytest.mark.slow
@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("name", "encoder", "options"), CASES)
def test_captured_on_a_gpu(name: str, encoder: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded and replayed, without a wait for the GPU."""
    taken, replay = [], graphs.Replayed._replay

    def watched(self: graphs.Replayed, *arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            replay(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        taken.append(1)

    monkeypatch.setattr(graphs.Replayed, "_replay", watched)
    wanted: MaximumLikelihood = objective(name, encoder, **options)
    changes: dict[str, Any] = {"device": "cuda", "batch_size": 100, "epochs": 6}
    records, models = together([3, 4], wanted, program="captured", **changes)
    for place, seed in enumerate((3, 4)):
        assert_same((records[place], models[place]), alone(seed, wanted, **changes), tolerance=1e-4)
    assert len(taken) > 30
