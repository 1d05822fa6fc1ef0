"""The kernel for whole chains: it leads where the leapfrogs of the library lead, and on a CUDA GPU trains as they do.

Without a GPU, the first tests run where Triton is installed and TRITON_INTERPRET=1 is set, in some minutes.
"""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dohyo
from dohyo import Annealed
from dohyo.annealing.chain import Constants, Source, State
from dohyo.lab.fast.programs import Program
from dohyo.lab.fast.together import Replica, train_together
from dohyo.lab.fast.trial import stack
from dohyo.lab.training.chains import sized
from dohyo.lab.training.tasks import task_of
from dohyo.models import VAE, TwoLayerVAE
from dohyo.objectives import MaximumLikelihood
from teams import CONFIG

MODELS, LEAPFROGS = 2, 5
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA GPU, or Triton")


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel fit what it fits on a GPU."""
    if not GPU:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
        monkeypatch.setattr("dohyo.lab.fast.kernel.fits", lambda *_: True)


def start(n: int, latent: int) -> tuple[State, list[Tensor]]:
    u, v, *noise = torch.randn(LEAPFROGS + 1, MODELS, n, latent, device=DEVICE).unbind()
    return State(u, v, torch.ones(MODELS, n, dtype=torch.bool, device=DEVICE), torch.randn(MODELS, n, device=DEVICE)), noise


def models(data: int, hidden: int, latent: int, scale: float = 0.3) -> list[Any]:
    made = []
    for seed in range(MODELS):
        torch.manual_seed(seed)
        own = Annealed(VAE(data, hidden, latent), LEAPFROGS).to(DEVICE)
        plain = Constants.plain(LEAPFROGS, scale).of_size(latent)
        own.constants = replace(
            plain, step=plain.step * (0.5 + torch.rand_like(plain.step)), widening=plain.widening + 0.1 * seed
        )
        made.append(own)
    return made


def kernel_of(*team: Any) -> Any:
    stacked: Any = stack(team, [], "dreg")
    stacked.round_forces()
    return stacked.leapfrogs


def by_the_library(own: Any, x: Tensor, rows: Tensor, state: State, noise: list[Tensor], code: Any = None) -> State:
    bridge = Source(own.model, x, own.constants, code=code)(rows)
    keep = bridge.constants.persistence
    for t in range(LEAPFROGS):
        if t:
            state = state._replace(v=keep * state.v + (1 - keep.square()).sqrt() * noise[t - 1])
        state = bridge.leap(t, state, refresh=False)
    return state


@torch.no_grad()
@needs_triton
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("sizes", [(784, 200, 50), (200, 20, 5), (300, 256, 128), (129, 17, 3)])
@pytest.mark.parametrize("chains", [1, 3, 40])
def test_chains_end_where_the_library_leads_them(sizes: tuple[int, int, int], chains: int) -> None:
    team = models(*sizes)
    x = torch.rand(MODELS, 101, sizes[0], device=DEVICE).round()
    rows = torch.arange(101, device=DEVICE).repeat_interleave(chains)
    begin, noise = start(len(rows), sizes[2])
    code = torch.stack([own.model.encode(each) for own, each in zip(team, x, strict=True)])
    found = kernel_of(*team)(x, rows, code, begin, noise)
    for place, own in enumerate(team):
        one = State(*(part[place] for part in begin))
        wanted = by_the_library(own, x[place], rows, one, [part[place] for part in noise])
        moved = float((wanted.u - one.u).abs().max())
        assert moved > 0.5
        assert torch.allclose(found.u[place], wanted.u, atol=0.01 * moved, rtol=0)
        assert torch.allclose(found.log_ratio[place], wanted.log_ratio, atol=0.05, rtol=0.01)
        assert bool(found.alive[place].all())


@torch.no_grad()
@needs_triton
@pytest.mark.usefixtures("anywhere")
def test_a_chain_that_explodes_is_lost_in_both() -> None:
    team = models(200, 20, 5, scale=1e5)
    x, rows = torch.rand(MODELS, 7, 200, device=DEVICE).round(), torch.arange(7, device=DEVICE).repeat_interleave(3)
    begin, noise = start(len(rows), 5)
    code = torch.stack([own.model.encode(each) for own, each in zip(team, x, strict=True)])
    found = kernel_of(*team)(x, rows, code, begin, noise)
    assert not bool(found.alive.any())
    assert bool(found.u.isfinite().all() & found.log_ratio.isfinite().all())
    wanted = by_the_library(team[0], x[0], rows, State(*(part[0] for part in begin)), [part[0] for part in noise])
    assert not bool(wanted.alive.any())


@torch.no_grad()
@needs_triton
@pytest.mark.usefixtures("anywhere")
def test_what_half_precision_cannot_hold_ends_no_chain() -> None:
    team = models(200, 20, 5)
    x, rows = torch.rand(MODELS, 7, 200, device=DEVICE).round(), torch.arange(7, device=DEVICE)
    begin, noise = start(len(rows), 5)
    code = torch.cat([torch.full((MODELS, 7, 5), 1e5), torch.zeros(MODELS, 7, 5)], -1).to(DEVICE)
    found = kernel_of(*team)(x, rows, code, begin, noise)
    assert bool(found.alive.all())
    one = State(*(part[0] for part in begin))
    wanted = by_the_library(team[0], x[0], rows, one, [part[0] for part in noise], code[0])
    assert float((wanted.u - one.u).abs().min()) > 100
    assert torch.allclose(found.u[0], wanted.u, rtol=1e-3)


def other_decoder(*decoder: nn.Module) -> VAE:
    made = VAE(200, 20, 5)
    made.decoder = nn.Sequential(*decoder)
    return made


@needs_gpu
def test_only_where_it_fits() -> None:
    relu = other_decoder(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 200))
    wider = other_decoder(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 200))
    others = [VAE(200, 20, 5, "gaussian"), TwoLayerVAE(200, 20, 5), VAE(200, 257, 5), VAE(200, 20, 129), VAE(128, 20, 5)]
    for model in (*others, VAE(200, 20, 5).double(), relu, wider):
        own = Annealed(model, 2).cuda()
        size, dtype = model.observed.data, next(model.parameters()).dtype
        own.constants = sized(own, torch.zeros(2, size, device="cuda", dtype=dtype))
        assert kernel_of(own) is None
    own = Annealed(VAE(200, 20, 5), 2).cuda()
    assert kernel_of(own) is None  # one value for all dimensions
    own.constants = Constants.plain(2).of_size(5)
    assert kernel_of(own) is not None
    own.constants = replace(own.constants, mixing=torch.eye(5))
    assert kernel_of(own) is None


@torch.no_grad()
def test_where_it_fails_leapfrogs_are_taken_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    team = models(200, 20, 5)
    x, rows = torch.rand(MODELS * 7, 200, device=DEVICE).round(), torch.arange(7, device=DEVICE).repeat_interleave(3)
    found = []
    for fails in (False, True):
        stacked: Any = stack(team, [torch.Generator(DEVICE).manual_seed(seed) for seed in range(MODELS)], "dreg")
        stacked.leapfrogs = _failing if fails else None
        found.append(stacked(x, rows, stacked.noise(x, rows))[0])
    assert stacked.leapfrogs is None
    assert torch.equal(*found)
    assert [record.getMessage() for record in caplog.records] == [
        "chains are slower than they could be: their kernel failed (ValueError: no room)"
    ]


def _failing(*_: Any) -> State:
    raise ValueError("no room\nat all")


@needs_gpu
@pytest.mark.slow
def test_it_trains_as_the_compiled_leapfrogs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.rand(1100, 200, generator=torch.Generator().manual_seed(0)) < torch.linspace(0.1, 0.9, 200)).float()
    seen, step = [], Program._step
    monkeypatch.setattr(Program, "_step", lambda self, *given: seen.append(self.models.leapfrogs) or step(self, *given))
    ends = []
    for tf32 in (True, False):
        team = []
        for seed in (0, 3):
            torch.manual_seed(seed)
            own = Annealed(VAE(200, 16, 4), 3)
            own.constants = sized(own, x)
            team.append(Replica(own, task_of(x, 0)[0], replace(CONFIG, seed=seed, program="captured", device="cuda", tf32=tf32)))
        ends.append([record["valid_nll"] for _, record in train_together(team, MaximumLikelihood(dohyo.IWAE(2), "dreg"))])
    assert seen[0] is not None
    assert seen[-1] is None
    assert ends[0] == pytest.approx(ends[1], abs=0.05)
