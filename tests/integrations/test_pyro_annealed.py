"""A guide as one distribution of all its latents, and annealed chains on top of it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dohyo

pyro = pytest.importorskip("pyro")

import pyro.distributions as dist  # noqa: E402
from pyro.infer.autoguide import AutoNormal  # noqa: E402

from dohyo.integrations.pyro import from_pyro  # noqa: E402

X = 1 + 1.5 * torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model(x: Tensor) -> None:
    """Three kinds of latents, one of them with a plate of its own inside that of the data, and one depending on another."""
    with pyro.plate("data", len(x), dim=-2):
        scale = pyro.sample("scale", dist.Gamma(torch.tensor(4.0, dtype=torch.float64), 4.0))
        share = pyro.sample("share", dist.Beta(torch.tensor(2.0, dtype=torch.float64), 2.0))
        with pyro.plate("times", 2, dim=-1):
            z = pyro.sample("z", dist.Normal(share, scale))
        pyro.sample("x", dist.Normal(z.sum(-1, keepdim=True), 1.0), obs=x[:, None])


def guide(x: Tensor) -> None:
    with pyro.plate("data", len(x), dim=-2):
        scale = pyro.sample("scale", dist.Gamma(torch.tensor(3.0, dtype=torch.float64), 3.0))
        pyro.sample("share", dist.Beta(torch.tensor(1.5, dtype=torch.float64), 1.5))
        with pyro.plate("times", 2, dim=-1):
            pyro.sample("z", dist.Normal(x[:, None] / 3 * scale / scale, scale + 0.3))


def one_site(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)


def one_site_guide(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x[:, None].expand(-1, 3) / 4 + 0.8, 0.6).to_event(1))


@pytest.mark.parametrize("pair", [(model, guide), (one_site, one_site_guide)], ids=["three sites", "one site"])
def test_the_densities_are_those_of_the_weights(pair: Any) -> None:
    ours = from_pyro(*pair)
    rows = torch.arange(30).repeat_interleave(3)
    q = ours.posterior(X[rows])
    assert q.batch_shape == (90,)
    torch.manual_seed(3)
    z = q.sample()
    log_w = ours.log_joint(X[rows], z) - q.log_prob(z)
    torch.manual_seed(3)
    assert torch.allclose(log_w, ours.log_weights(X, rows))
    moved = z.reshape(90, -1)
    assert torch.allclose(q.mean.reshape(90, -1).mean(), moved.mean(), atol=0.5)
    if pair[0] is model:  # on the real line now, where they were positive and shares
        assert moved.shape == (90, 4)
        assert bool((moved[:, :2] < 0).any())


def test_the_density_of_the_real_line_is_normalised() -> None:
    """One datum and one Gamma latent: the integral of exp(log_prob) over the real line is one."""

    def positive(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("s", dist.Gamma(torch.tensor(3.0, dtype=torch.float64), 1.0))

    points = torch.linspace(-15, 6, 4001, dtype=torch.float64)
    q = from_pyro(lambda x: positive(x), positive).posterior(X[:1].expand(4001))
    assert float(q.log_prob(points[:, None]).exp().sum() * (points[1] - points[0])) == pytest.approx(1, abs=1e-6)


@pytest.mark.skipif(not hasattr(dohyo, "Annealed"), reason="annealed weights are not there yet")
def test_annealed_weights_are_exact_and_better() -> None:
    ours = from_pyro(one_site, one_site_guide)
    exact = float(dist.Normal(0.0, 2.0).log_prob(X).mean())
    annealed = dohyo.Annealed(ours, steps=8)
    annealed.tune(X, iterations=50)
    plain, better = (dohyo.evaluate(each, X, dohyo.MultilevelRR(4), replicates=20, khat_samples=0) for each in (ours, annealed))
    assert abs(better.mean - exact) < 4 * better.noise_stderr
    assert better.noise_stderr < plain.noise_stderr
    three = dohyo.evaluate(
        dohyo.Annealed(from_pyro(model, guide), steps=2), X, dohyo.MultilevelRR(4), replicates=4, khat_samples=0
    )
    wide = dohyo.evaluate(from_pyro(model, guide), X, dohyo.MultilevelRR(4), replicates=100, khat_samples=0)
    assert abs(three.mean - wide.mean) < 4 * math.hypot(three.noise_stderr, wide.noise_stderr)


def test_what_chains_cannot_move_is_refused() -> None:
    def discrete(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            k = pyro.sample("k", dist.Bernoulli(0.5))
            pyro.sample("x", dist.Normal(k, 1.0), obs=x)

    def discrete_guide(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("k", dist.Bernoulli(0.5))

    with pytest.raises(dohyo.DohyoError, match="'k' of the guide fills"):
        from_pyro(discrete, discrete_guide).posterior(X)
    with pytest.raises(dohyo.DohyoError, match="give from_pyro no args"):
        from_pyro(model, guide, args=(X,), plate="data").posterior(torch.arange(30))
    automatic = AutoNormal(one_site)
    with pytest.raises(dohyo.DohyoError, match="is auxiliary"):
        from_pyro(one_site, automatic).posterior(X[:1])
