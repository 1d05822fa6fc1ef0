"""The kernel for whole chains, on a CUDA GPU: it leads where the leapfrogs of the library lead, and trains as they do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dohyo
from dohyo import Annealed
from dohyo.annealing.chain import Constants, Source, State
from dohyo.lab.fast.programs import Program
from dohyo.lab.fast.together import Replica, train_together
from dohyo.lab.fast.trial import stack
from dohyo.lab.training.tasks import sized, task_of
from dohyo.models import VAE, TwoLayerVAE
from dohyo.objectives import MaximumLikelihood
from teams import CONFIG

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
MODELS, LEAPFROGS = 2, 5


def start(n: int, latent: int) -> tuple[State, list[Tensor]]:
    u, v, *noise = torch.randn(LEAPFROGS + 1, MODELS, n, latent, device="cuda").unbind()
    return State(u, v, torch.ones(MODELS, n, dtype=torch.bool, device="cuda"), torch.randn(MODELS, n, device="cuda")), noise


def models(data: int, hidden: int, latent: int, scale: float = 0.3) -> list[Any]:
    made = []
    for seed in range(MODELS):
        torch.manual_seed(seed)
        own = Annealed(VAE(data, hidden, latent), LEAPFROGS).cuda()
        plain = Constants.plain(LEAPFROGS, scale).of_size(latent)
        own.constants = replace(
            plain, step=plain.step * (0.5 + torch.rand_like(plain.step)), widening=plain.widening + 0.1 * seed
        )
        made.append(own)
    return made


def by_the_library(own: Any, x: Tensor, rows: Tensor, state: State, noise: list[Tensor]) -> State:
    bridge = Source(own.model, x, own.constants)(rows)
    keep = bridge.constants.persistence
    for t in range(LEAPFROGS):
        if t:
            state = state._replace(v=keep * state.v + (1 - keep.square()).sqrt() * noise[t - 1])
        state = bridge.leap(t, state, refresh=False)
    return state


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(784, 200, 50), (200, 20, 5), (300, 256, 128), (129, 17, 3)])
@pytest.mark.parametrize("chains", [1, 3, 40])
def test_chains_end_where_the_library_leads_them(sizes: tuple[int, int, int], chains: int) -> None:
    team = models(*sizes)
    stacked: Any = stack(team, [], "dreg")
    stacked.round_forces()
    x = torch.rand(MODELS, 101, sizes[0], device="cuda").round()
    rows = torch.arange(101, device="cuda").repeat_interleave(chains)
    begin, noise = start(len(rows), sizes[2])
    code = torch.stack([own.model.encode(each) for own, each in zip(team, x, strict=True)])
    found = stacked.leapfrogs(x, rows, code, begin, noise)
    for place, own in enumerate(team):
        one = State(*(part[place] for part in begin))
        wanted = by_the_library(own, x[place], rows, one, [part[place] for part in noise])
        moved = float((wanted.u - one.u).abs().max())
        assert moved > 0.5
        assert torch.allclose(found.u[place], wanted.u, atol=0.01 * moved, rtol=0)
        assert torch.allclose(found.log_ratio[place], wanted.log_ratio, atol=0.05, rtol=0.01)
        assert bool(found.alive[place].all())


@torch.no_grad()
def test_a_chain_that_explodes_is_lost_in_both() -> None:
    team = models(200, 20, 5, scale=1e5)
    stacked: Any = stack(team, [], "dreg")
    stacked.round_forces()
    x, rows = torch.rand(MODELS, 7, 200, device="cuda").round(), torch.arange(7, device="cuda").repeat_interleave(3)
    begin, noise = start(len(rows), 5)
    code = torch.stack([own.model.encode(each) for own, each in zip(team, x, strict=True)])
    found = stacked.leapfrogs(x, rows, code, begin, noise)
    assert not bool(found.alive.any())
    assert bool(found.u.isfinite().all() & found.log_ratio.isfinite().all())
    wanted = by_the_library(team[0], x[0], rows, State(*(part[0] for part in begin)), [part[0] for part in noise])
    assert not bool(wanted.alive.any())


def test_only_where_it_fits() -> None:
    others = [VAE(200, 20, 5, "gaussian"), TwoLayerVAE(200, 20, 5), VAE(200, 257, 5), VAE(200, 20, 129), VAE(128, 20, 5)]
    for model in (*others, VAE(200, 20, 5).double()):
        own = Annealed(model, 2).cuda()
        size, dtype = model.observed.data, next(model.parameters()).dtype
        own.constants = sized(own, torch.zeros(2, size, device="cuda", dtype=dtype))
        stacked: Any = stack([own], [], "dreg")
        stacked.round_forces()
        assert stacked.leapfrogs is None


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
