"""What a GPU needs of chains: no waiting for the host inside them, and no more rows at a time than was allowed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dohyo
from dohyo import Annealed
from dohyo.annealing import climbing
from dohyo.annealing.chain import Constants, Source
from dohyo.models import VAE, GaussianLVM, LatentVariableModel, TwoLayerVAE

MODELS = [VAE(20, 8, 3), TwoLayerVAE(20, 8, 3), GaussianLVM(20, 8, 3)]
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")  # operators whose result the host must see


class Waiting(TorchDispatchMode):
    """Lists what would make the host wait for a GPU: a tensor's value in Python, or a shape that depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        masks = [part for arg in args if isinstance(arg, list | tuple) for part in arg if isinstance(part, Tensor)]
        if name in WAITS or (name.startswith("index") and any(mask.dtype == torch.bool for mask in masks)):
            self.seen.append(name)
        return operator(*args, **(kwargs or {}))


def directions(model: LatentVariableModel, x: Tensor, z: Tensor) -> list[Callable[[], Any]]:
    """What runs inside chains, bound to x already."""
    annealed, rows = Annealed(model, 3), torch.arange(len(x), device=x.device)
    weights, source = annealed.bind(x), Source(model, x, Constants.plain(3))
    return [lambda: weights(rows), lambda: source(rows).forwards(), lambda: source(rows).backwards(z)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_the_host_does_not_wait_inside_a_chain(model: LatentVariableModel) -> None:
    with torch.no_grad():
        z, x = model.sample_joint(5)
        for run in directions(model, x, z):
            with Waiting() as found:
                run()
            assert found.seen == []
    with Waiting() as found:
        assert bool(x.isfinite().all())
        assert len(x[x[:, 0] > x[:, 0].max()]) == 0
    assert found.seen == ["_local_scalar_dense", "index"]  # it does see what it looks for


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_gpu_does_not_synchronise_inside_a_chain(model: LatentVariableModel) -> None:
    model = model.to("cuda")
    try:
        with torch.no_grad():
            z, x = model.sample_joint(5)
            for run in directions(model, x, z):
                run()
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                run()
                torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        model.to("cpu")


class Looking(VAE):
    """The host sees a value of every density."""

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        log_p = super().log_joint(x, z)
        return log_p if bool(log_p.isfinite().all()) else log_p - 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize(("kind", "recordings"), [(VAE, 1), (Looking, 0)])
def test_tuning_replays_a_recorded_iteration_unless_the_model_waits(
    kind: type[VAE], recordings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    seen, record = [], climbing._recorded
    monkeypatch.setattr(climbing, "_recorded", lambda work: seen.append(1) or record(work))
    model = kind(30, 16, 5).cuda()
    x = (2 * torch.rand(20, 30, device="cuda")).round().clamp(max=1)
    tuned = Annealed(model, 4).tune(x)
    assert sum(seen) == recordings
    assert tuned.bound > tuned.bound_before
    monkeypatch.setattr(climbing, "WORTH", 10**9)
    assert Annealed(model, 4).tune(x).bound == pytest.approx(tuned.bound, abs=0.5 * (tuned.bound - tuned.bound_before))


class Counting(VAE):
    """Notes how many rows its decoder is given at a time."""

    most = 0

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        self.most = max(self.most, len(z))
        return super().log_joint(x, z)


def test_memory_is_bounded_by_max_rows() -> None:
    torch.manual_seed(0)
    model = Counting(20, 8, 3)
    x, annealed = model.sample(10).detach(), Annealed(model, 2)
    dohyo.evaluate(annealed, x, dohyo.MultilevelRR(4), khat_samples=40, max_rows=7)
    assert model.most == 7
    dohyo.sandwich(annealed, 10, chains=4, max_rows=5)
    assert model.most == 7
    annealed.tune(x, iterations=0, max_rows=6)
    assert model.most == 7
    annealed.tune(x[:1], iterations=1, max_rows=6)
    assert model.most == 8  # the eight chains of one datum through which it learns
