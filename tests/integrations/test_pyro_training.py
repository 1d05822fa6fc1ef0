"""Pyro's SVI on an estimate of log p(x): gradients against exact and hand-written ones, and against Pyro's own."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dohyo

from stats import errors_off

pyro = pytest.importorskip("pyro")

import pyro.distributions as dist  # noqa: E402
from pyro.infer import SVI, RenyiELBO  # noqa: E402
from pyro.infer.autoguide import AutoNormal  # noqa: E402

from dohyo.integrations.pyro import LogMarginal  # noqa: E402

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_store() -> None:
    pyro.clear_param_store()
    torch.manual_seed(0)


def parameter(name: str, value: float) -> Tensor:
    return pyro.param(name, torch.tensor(value, dtype=torch.float64))  # type: ignore[no-any-return]


def gradients() -> dict[str, Tensor]:
    """Of all parameters, which are then forgotten."""
    found = {}
    for name, value in pyro.get_param_store().items():
        leaf = value.unconstrained()
        found[name], leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, None
    return found


# -- the score --------------------------------------------------------------------------------------------------------

DATA = 0.5 + 1.3 * torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gaussian(x: Tensor, size: int | None) -> None:
    mean, log_sd = parameter("mean", 0.3), parameter("log_sd", -0.2)
    with pyro.plate("data", len(x), subsample_size=size) as i:
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        pyro.sample("x", dist.Normal(z, log_sd.exp()), obs=x[i])


def wide_posterior(x: Tensor, size: int | None) -> None:
    """Wider than the exact one, so that weights have light tails and a test in standard errors means something."""
    shift = parameter("shift", 0.0)
    precision = 1 + math.exp(0.4)
    with pyro.plate("data", len(x), subsample_size=size) as i:
        pyro.sample("z", dist.Normal(shift + (0.3 + x[i] * math.exp(0.4)) / precision, 1.4 * precision**-0.5))


def exact_gaussian() -> Tensor:
    """log p of all data, and its gradient in the mean and in log_sd."""
    theta = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    log_px = dist.Normal(theta[0], (1 + (2 * theta[1]).exp()).sqrt()).log_prob(DATA).sum()
    return torch.cat([log_px.detach()[None], *torch.autograd.grad(log_px, theta)])


def draws(loss: Any, size: int | None, steps: int) -> Tensor:
    """(steps, 3): the loss's estimates of `exact_gaussian`."""
    found = []
    for _ in range(steps):
        value = loss.loss_and_grads(gaussian, wide_posterior, DATA, size)
        slope = gradients()
        found.append([-value, -float(slope["mean"]), -float(slope["log_sd"])])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("size", [None, 50])
def test_the_score_is_unbiased_with_and_without_subsampling(size: int | None) -> None:
    ours = draws(LogMarginal(dohyo.MultilevelRR.at_cost(12)), size, 250)
    theirs = draws(RenyiELBO(num_particles=12, vectorize_particles=True, max_plate_nesting=1), size, 250)
    assert errors_off(ours, exact_gaussian()) < 4
    assert errors_off(theirs[:, :1], exact_gaussian()[:1]) > 4
    assert errors_off(theirs[:, 1:], exact_gaussian()[1:]) > 4


# -- by hand ----------------------------------------------------------------------------------------------------------

START = {"level": 0.4, "slope": 0.6, "tie": 0.5, "log_sd": 0.1}


def two_layers(x: Tensor, size: int | None) -> None:
    level = parameter("level", START["level"])
    with pyro.plate("data", len(x), subsample_size=size) as i:
        a = pyro.sample("a", dist.Normal(level, 1.0))
        b = pyro.sample("b", dist.Normal(a, 1.0))
        pyro.sample("x", dist.Normal(b, 1.0), obs=x[i])


def two_layers_guide(x: Tensor, size: int | None) -> None:
    slope, tie, log_sd = (parameter(name, START[name]) for name in ("slope", "tie", "log_sd"))
    with pyro.plate("data", len(x), subsample_size=size) as i:
        a = pyro.sample("a", dist.Normal(slope * x[i], log_sd.exp()))
        pyro.sample("b", dist.Normal(tie * a, 1.0))


def by_hand(x: Tensor, size: int | None, estimator: dohyo.Estimator, encoder: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of theta and phi, each from a pass of its own."""
    leaf = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in START.items()}
    fixed = {name: value.detach() for name, value in leaf.items()}
    count = int(estimator.plan(1, shared=True)[0])
    x, scale = (x, 1.0) if size is None else (x[torch.randperm(len(x))[:size]], len(x) / size)
    shape = (count, len(x))
    unit = dist.Normal(torch.zeros(shape, dtype=torch.float64), 1.0)
    a = leaf["slope"] * x + leaf["log_sd"].exp() * unit.sample()
    b = leaf["tie"] * a + unit.sample()

    def log_p(a: Tensor, b: Tensor) -> Tensor:
        return dist.Normal(leaf["level"], 1.0).log_prob(a) + dist.Normal(a, 1.0).log_prob(b) + dist.Normal(b, 1.0).log_prob(x)

    def log_q(a: Tensor, b: Tensor, phi: dict[str, Tensor]) -> Tensor:
        return dist.Normal(phi["slope"] * x, phi["log_sd"].exp()).log_prob(a) + dist.Normal(phi["tie"] * a, 1.0).log_prob(b)

    log_w = log_p(a.detach(), b.detach()) - log_q(a.detach(), b.detach(), fixed)
    log_px = estimator.reduce(log_w.T, torch.full((len(x),), count)).sum()
    posterior = log_w.detach().softmax(0)
    for_phi = {
        "iwae": posterior * (log_p(a, b) - log_q(a, b, leaf)),
        "dreg": posterior.square() * (log_p(a, b) - log_q(a, b, fixed)),
        "wake": posterior * log_q(a.detach(), b.detach(), leaf),
    }[encoder].sum()
    (level,) = torch.autograd.grad(-scale * log_px, leaf["level"], retain_graph=True)
    phi = torch.autograd.grad(-scale * for_phi, [leaf[name] for name in ("slope", "tie", "log_sd")])
    return -scale * float(log_px.detach()), dict(zip(START, (level, *phi), strict=True))


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("encoder", ["dreg", "iwae", "wake"])
@pytest.mark.parametrize("estimator", [dohyo.IWAE(6), dohyo.MultilevelRR(2), dohyo.SUMO(3)], ids=["iwae", "multilevel", "sumo"])
def test_one_pass_is_two_passes_by_hand(estimator: dohyo.Estimator, encoder: str, size: int | None) -> None:
    x = DATA[:20]
    for seed in range(3):
        loss = LogMarginal(estimator, encoder)
        torch.manual_seed(seed)
        value = loss.loss_and_grads(two_layers, two_layers_guide, x, size)
        ours = gradients()
        torch.manual_seed(seed)
        expected, hand = by_hand(x, size, estimator, encoder)
        assert value == pytest.approx(expected, rel=1e-9)
        for name, gradient in hand.items():
            assert float(ours[name]) == pytest.approx(float(gradient), rel=1e-8, abs=1e-9), name


def test_samples_one_after_the_other() -> None:
    """The same data for all samples of a step, and the same mean."""
    loss = LogMarginal(dohyo.MultilevelRR(2, max_level=3), vectorize_particles=False)
    together = LogMarginal(dohyo.MultilevelRR(2, max_level=3))
    a, b = (
        torch.tensor([each.loss(gaussian, wide_posterior, DATA, 50) for _ in range(60)]).double() for each in (loss, together)
    )
    assert abs(float(a.mean() - b.mean())) < 4 * math.sqrt(float(a.var() + b.var()) / 60)
    assert float(a.std()) == pytest.approx(float(b.std()), rel=0.5)


# -- training ---------------------------------------------------------------------------------------------------------


def mixture(x: Tensor) -> None:
    means = pyro.param("means", torch.tensor([-1.0, 1.0]))
    with pyro.plate("data", len(x)):
        k = pyro.sample("k", dist.Bernoulli(0.5)).long()
        pyro.sample("x", dist.Normal(means[k], 1.0), obs=x)


def mixture_guide(x: Tensor) -> None:
    slope = pyro.param("slope", torch.tensor(0.1))
    with pyro.plate("data", len(x)):
        pyro.sample("k", dist.Bernoulli(logits=slope * x))


def test_a_discrete_guide_learns_by_wake() -> None:
    x = torch.cat([torch.randn(200) - 2, torch.randn(200) + 2])
    svi = SVI(mixture, mixture_guide, pyro.optim.Adam({"lr": 0.05}), LogMarginal(dohyo.MultilevelRR.at_cost(8), encoder="wake"))
    for _ in range(150):
        svi.step(x)
    assert torch.allclose(pyro.param("means").detach(), torch.tensor([-2.0, 2.0]), atol=0.4)
    assert float(pyro.param("slope").detach()) > 1.5  # the posterior's is 4
    for encoder in ("dreg", "iwae"):
        with pytest.raises(dohyo.DohyoError, match=f"'k' from a Bernoulli without rsample, so that encoder '{encoder}'"):
            LogMarginal(dohyo.IWAE(4), encoder=encoder).loss_and_grads(mixture, mixture_guide, x)


def test_modules_and_automatic_guides_learn_in_torchs_own_loop() -> None:
    """Global latents: all data are one datum. Beside it what Pyro's own loop for modules does with the loss."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> None:
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
            with pyro.plate("data", len(x)):
                pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    model = Mean()
    guide = AutoNormal(model, init_scale=0.5)
    x = DATA[:10].float()
    loss = LogMarginal(dohyo.MultilevelRR.at_cost(8), encoder="dreg")(model, guide)
    loss(x)
    optimiser = torch.optim.Adam(guide.parameters(), lr=0.04)
    for _ in range(100):
        optimiser.zero_grad()
        loss(x).backward()
        optimiser.step()
    assert float(guide.median(x)["mean"]) == pytest.approx(float(x.sum()) / 11, abs=0.1)
    assert float(guide.scales.mean.detach()) == pytest.approx(11**-0.5, rel=0.3)


@pytest.mark.parametrize("encoder", ["dreg", "iwae", "wake"])
def test_a_guide_without_parameters(encoder: str) -> None:
    def model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(parameter("mean", 0.0), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.9))

    LogMarginal(dohyo.IWAE(500), encoder=encoder).loss_and_grads(model, guide, DATA)
    assert float(gradients()["mean"]) == pytest.approx(-float(DATA.sum()) / 2, rel=0.05)


def test_bad_input() -> None:
    with pytest.raises(dohyo.DohyoError, match="unknown encoder 'drag': did you mean 'dreg'"):
        LogMarginal(dohyo.IWAE(4), encoder="drag")
    with pytest.raises(dohyo.DohyoError, match="the estimator is a int"):
        LogMarginal(15)  # type: ignore[arg-type]

    def outside(x: Tensor) -> None:
        pyro.sample("level", dist.Normal(0.0, 1.0))
        gaussian(x, 10)

    def outside_guide(x: Tensor) -> None:
        pyro.sample("level", dist.Normal(0.0, 1.0))
        wide_posterior(x, 10)

    with pytest.raises(dohyo.DohyoError, match="site 'level' lies outside plate 'data'"):
        LogMarginal(dohyo.IWAE(4)).loss(outside, outside_guide, DATA)
    with pytest.raises(dohyo.DohyoError, match="no plate 'date'"):
        LogMarginal(dohyo.IWAE(4), plate="date").loss(gaussian, wide_posterior, DATA, 50)
