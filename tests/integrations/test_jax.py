"""JAX and NumPyro against exact answers."""

import math

import pytest
import torch
from torch import Tensor

import dohyo

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.scipy.stats import norm  # noqa: E402

from dohyo.integrations.jax import from_jax  # noqa: E402

ESTIMATOR = dohyo.MultilevelRR.at_cost(15)


@pytest.fixture
def x() -> Tensor:
    return 1 + 1.5 * torch.randn(60, generator=torch.Generator().manual_seed(1))


def gaussian(key, x):  # type: ignore[no-untyped-def]
    z = (x + 0.5) / 2 + 0.85 * jax.random.normal(key, x.shape)
    return norm.logpdf(z, 0.5) + norm.logpdf(x, z) - norm.logpdf(z, (x + 0.5) / 2, 0.85)


def exact_gaussian(x: Tensor) -> Tensor:
    return torch.distributions.Normal(0.5, math.sqrt(2)).log_prob(x)


def error(found: dohyo.Evaluation, exact: Tensor) -> float:
    assert found.noise_stderr is not None
    return abs(found.mean - float(exact.mean())) / found.noise_stderr


def test_exact_answer(x: Tensor) -> None:
    found = dohyo.evaluate(from_jax(gaussian), x, ESTIMATOR, replicates=20)
    assert error(found, exact_gaussian(x)) < 4
    assert error(dohyo.evaluate(from_jax(gaussian), x, dohyo.ELBO(15), replicates=20), exact_gaussian(x)) > 4  # the power twin
    assert torch.equal(found.per_datum, dohyo.evaluate(from_jax(gaussian), x, ESTIMATOR, replicates=20).per_datum)
    other = dohyo.evaluate(from_jax(gaussian), x, ESTIMATOR, replicates=20, seed=1)
    assert not torch.equal(found.per_datum, other.per_datum)


def test_few_shapes_are_compiled_and_the_padding_is_dropped(x: Tensor) -> None:
    shapes = []

    def counted(key, x):  # type: ignore[no-untyped-def]
        shapes.append(x.shape)  # once for each compilation
        return x

    model = from_jax(counted)
    for count in (1, 5, 6, 7, 8, 100, 128):
        rows = torch.randint(60, (count,))
        assert torch.equal(model.log_weights(x, rows), x[rows])
    assert shapes == [(1,), (8,), (128,)]
    assert model.log_weights(x, torch.empty(0, dtype=torch.long)).shape == (0,)


def test_a_finite_mixture_in_numpyro(x: Tensor) -> None:
    """A model and a guide of NumPyro, by the recipe of the guide page."""
    numpyro = pytest.importorskip("numpyro")
    import numpyro.distributions as dist
    from numpyro.infer import RenyiELBO
    from numpyro.infer.util import log_density

    means, shares = jnp.array([-2.0, 0.0, 3.0]), jnp.array([0.2, 0.5, 0.3])

    def model(x):  # type: ignore[no-untyped-def]
        k = numpyro.sample("k", dist.Categorical(shares))
        numpyro.sample("x", dist.Normal(means[k], 1.0), obs=x)

    def guide(x):  # type: ignore[no-untyped-def]
        numpyro.sample("k", dist.Categorical(logits=-jnp.square(x - means) / 4))

    def one(key, x):  # type: ignore[no-untyped-def]
        drawn = numpyro.handlers.trace(numpyro.handlers.seed(guide, key)).get_trace(x)
        z = {name: site["value"] for name, site in drawn.items() if site["type"] == "sample"}
        return log_density(model, (x,), {}, z)[0] - log_density(guide, (x,), {}, z)[0]

    ours = from_jax(lambda key, x: jax.vmap(one)(jax.random.split(key, len(x)), x))
    means_, shares_ = torch.tensor([-2.0, 0.0, 3.0]), torch.tensor([0.2, 0.5, 0.3])
    exact = (torch.distributions.Normal(means_, 1.0).log_prob(x[:, None]) + shares_.log()).logsumexp(-1)
    assert error(dohyo.evaluate(ours, x, ESTIMATOR, replicates=20), exact) < 4
    assert error(dohyo.evaluate(ours, x, dohyo.IWAE(2), replicates=100), exact) > 4  # the power twin

    def theirs(key, x):  # type: ignore[no-untyped-def]
        return -RenyiELBO(num_particles=500).loss(key, {}, model, guide, x)

    keys = jax.random.split(jax.random.key(0), 60)
    right = float(jax.vmap(theirs)(keys, jnp.asarray(x.numpy())).mean())
    assert right == pytest.approx(float(exact.mean()), abs=0.02)  # right, and without an error bar


def test_bad_input(x: Tensor) -> None:
    with pytest.raises(dohyo.DohyoError, match="the function is a int"):
        from_jax(3)  # type: ignore[arg-type]
    for function in (lambda key, x: x.sum(), lambda key, x: x[:, None], lambda key, x: x > 0, lambda key, x: None):
        with pytest.raises(dohyo.DohyoError, match="one float for each row"):
            from_jax(function).log_weights(x, torch.arange(3))
    with pytest.raises(dohyo.DohyoError, match="NaN"):
        dohyo.evaluate(from_jax(lambda key, x: x * jnp.nan), x, ESTIMATOR)
