"""Tuning chains: what is learnt, how many leapfrogs are chosen, and that the weights stay unbiased."""

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

import dohyo
from dohyo import Annealed
from dohyo.annealing import Constants, climbing, tuning

from problems import LinearLayers, normal
from stats import errors_off


def test_tuning_climbs_and_leaves_the_weights_unbiased() -> None:
    """On the very data that are evaluated; the twin is noise that the constants have seen."""
    torch.manual_seed(0)
    model = LinearLayers()
    x, state, annealed = model.sample(40), torch.random.get_rng_state(), Annealed(model, 4)
    assert annealed.constants is not None
    plain = annealed.constants
    tuned = annealed.tune(x, iterations=100)
    assert torch.equal(state, torch.random.get_rng_state())
    assert annealed.to_dict() == tuned.constants.to_dict()
    assert tuned.steps == annealed.steps == 4
    assert tuned.bound > tuned.bound_before
    assert tuned.constants.step.shape == (4, 2)
    assert tuned.constants.mixing is not None
    assert Annealed(model, 4).tune(x, iterations=3, mixing=False).constants.mixing is None
    assert tuned.lost == 0
    assert not tuned.constants.step.requires_grad
    tuned.constants.check()
    with torch.no_grad():
        log_w = annealed.log_weights(x, dohyo.rows(torch.full((40,), 2_000))).view(40, 2_000)
        before = Annealed(model, constants=plain).log_weights(x, dohyo.rows(torch.full((40,), 2_000))).view(40, 2_000)
    assert float(log_w.var(-1).mean()) < float(before.var(-1).mean())
    ratio = (log_w - model.exact(x).detach()[:, None]).exp()
    assert errors_off(ratio.mean(0), 1.0) < 4
    again = Annealed(model, 4).tune(x, iterations=100)
    assert again.to_dict() == tuned.to_dict()
    assert json.loads(json.dumps(tuned.to_dict()))["steps"] == 4
    warm = annealed.tune(x, iterations=5, seed=1)  # from what it has
    assert float((warm.constants.step / tuned.constants.step).log().abs().max()) < 0.2


class Slanted:
    """p(x, z) = N(z; 0, C) with strong correlations, of which q = N(0, I) knows nothing."""

    law = MultivariateNormal(torch.zeros(4).double(), 0.95 * torch.ones(4, 4).double() + 0.05 * torch.eye(4))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return self.law.log_prob(z)

    def posterior(self, x: Tensor) -> Distribution:
        return normal(torch.zeros_like(x), 1.0)

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        q = self.posterior(x[rows])
        z = q.sample()
        return self.log_joint(x, z) - q.log_prob(z)


def test_a_matrix_for_the_momentum_learns_what_dimensions_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climbing, "SLOWLY", 1.0)  # four dimensions are few
    x = torch.zeros(16, 4, dtype=torch.float64)
    mixed, alone = (Annealed(Slanted(), 4).tune(x, iterations=150, mixing=mixing) for mixing in (True, False))
    assert mixed.bound_before == alone.bound_before
    assert mixed.bound - alone.bound > 0.5


class Stiff:
    """p(x, z) is as narrow as x says, and q as wide as one."""

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return normal(torch.ones_like(z), x).log_prob(z)

    def posterior(self, x: Tensor) -> Distribution:
        return normal(x.new_zeros(len(x), 3), 1.0)


def test_chains_that_go_astray_only_shorten_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are too long for one datum in eight, so that its log-weights are far below those of the starts."""
    x = torch.ones(64, 1, dtype=torch.float64)

    def share_left_out() -> float:
        torch.manual_seed(0)
        x[::8] = 0.15
        return float(climbing.Iteration(Stiff(), x, Constants.plain(6), mixing=False).gradients()[1])

    def bound() -> float:
        x[::8] = 0.1
        return Annealed(Stiff(), 16).tune(x, iterations=100, mixing=False).bound

    share, learnt = share_left_out(), bound()
    assert 1 / 16 < share <= 1 / 8
    monkeypatch.setattr(climbing, "ASTRAY", math.inf)
    assert share_left_out() == 0
    assert learnt > bound() + 0.1


def test_tuning_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation with the same seed draws none of the numbers that tuning has seen."""
    model, drawn, draw = LinearLayers(), [], torch.randn_like

    def noting(like: Tensor) -> Tensor:
        noise = draw(like)
        drawn[-1].update(noise.flatten().tolist())
        return noise

    torch.manual_seed(0)
    x, annealed = model.sample(10), Annealed(model, 4)
    monkeypatch.setattr(torch, "randn_like", noting)
    for work in (lambda: annealed.tune(x, iterations=3), lambda: dohyo.evaluate(annealed, x, dohyo.IWAE(4), khat_samples=0)):
        drawn.append(set())
        work()
    assert len(drawn[0]) > 1000 < 10 * len(drawn[1])
    assert not drawn[0] & drawn[1]


def test_tuning_survives_steps_that_are_far_too_long() -> None:
    class Narrow(LinearLayers):
        """The posterior is hundreds of times narrower than q."""

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return normal(torch.zeros(2, dtype=torch.float64), 0.003).log_prob(z)

    torch.manual_seed(0)
    model = Narrow()
    annealed = Annealed(model, 4)
    tuned = annealed.tune(torch.zeros(8, 2, dtype=torch.float64), iterations=20)
    tuned.constants.check()
    assert float(tuned.constants.step.max()) < 0.2
    assert tuned.bound > tuned.bound_before
    wild = Annealed(model, constants=Constants.plain(4, scale=1e5))
    wild.constants = tuning.climb(model, torch.zeros(8, 2, dtype=torch.float64), wild.constants, 10, True)[0]
    wild.constants.check()
    assert float(wild.constants.step.max()) < 1e4  # each iteration in which all are lost takes a factor of e


class Aside(LinearLayers):
    """q(z; x) is the posterior itself, moved aside by a number of standard deviations."""

    def __init__(self, aside: float) -> None:
        super().__init__(size=8)
        self.aside = aside

    def posterior(self, code: Tensor) -> Distribution:
        precision = torch.eye(8, dtype=torch.float64) + self.M.T @ self.M / 0.49
        mean = (self.theta + code @ self.M / 0.49) @ precision.inverse()
        chol = torch.linalg.cholesky(precision.inverse())
        return MultivariateNormal(mean + self.aside * chol.sum(-1), scale_tril=1.05 * chol)


@pytest.mark.parametrize(("aside", "annealing"), [(0.0, False), (0.05, False), (1.5, True)])
def test_the_pilot_chooses_how_many_steps(aside: float, annealing: bool) -> None:
    torch.manual_seed(0)
    model = Aside(aside)
    annealed = Annealed(model)
    tuned = annealed.tune(model.sample(16), iterations=10)
    assert [candidate.steps for candidate in tuned.candidates] == [0, 4, 8, 16, 32, 64]
    assert [candidate.evaluations for candidate in tuned.candidates] == [1, 13, 25, 49, 97, 193]
    assert (tuned.steps > 0) == annealing
    assert tuned.steps == annealed.steps
    if not annealing:
        assert dohyo.evaluate(annealed, model.sample(4), dohyo.IWAE(5), khat_samples=0).cost == 20


def test_what_was_learnt_is_kept_only_if_the_pilot_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Aside(1.5)
    x, climb = model.sample(20), tuning.climb
    done: list[int] = []
    learnt = Annealed(model, 4).tune(x, iterations=20, progress=done.append)
    assert learnt.bound > learnt.bound_before
    assert done == list(range(1, 21))
    worse = lambda *given: (dataclasses.replace(climb(*given)[0], step=torch.full((4, 8), 0.01).double()), 0)  # noqa: E731
    monkeypatch.setattr(tuning, "climb", worse)
    kept = Annealed(model, 4).tune(x, iterations=20)
    assert kept.bound == kept.bound_before == learnt.bound_before
    assert float(kept.constants.step.min()) > 0.01


def test_of_heavy_weights_the_least_spread_for_its_cost_wins_and_of_good_ones_the_least_variance() -> None:
    torch.manual_seed(0)
    noise = torch.randn(64, 1000, dtype=torch.float64)
    heavy, light = [5 * noise, 2.5 * noise[:, :76], 1.7 * noise[:, :20], 1.6 * noise[:, :5]], noise / 2
    assert tuning.preferred(heavy) == 2  # as log-normal weights, with exp(s^2) / n of 7e7, 7, 0.9 and 2.6
    heavy[3][:10, 0] += 30.0  # a few lucky weights make the highest bound
    assert float(heavy[3].logsumexp(-1).mean()) > float(heavy[2].logsumexp(-1).mean())
    assert tuning.preferred(heavy) == 2
    assert tuning._spread(torch.randn(4000, 5).double()) == pytest.approx(1.0, abs=0.06)  # its median is 0.84
    assert tuning.preferred([*heavy, torch.zeros(64, 1).double().expand(64, 20)]) == 4  # no spread at all
    assert tuning.preferred([light, light[:, :100] + 5.0, light[:, :10]]) == 0
