"""log p(x) of Pyro's models against exact answers, by every way that a model may name its data."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dohyo

pyro = pytest.importorskip("pyro")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import RenyiELBO, config_enumerate  # noqa: E402
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal, AutoNormalMessenger  # noqa: E402

from dohyo.integrations.pyro import from_pyro  # noqa: E402

ESTIMATOR = dohyo.MultilevelRR.at_cost(15)
WIDE = 0.85  # of the guide; the posterior has 0.71
MEANS, SHARES = torch.tensor([-2.0, 0.0, 3.0]), torch.tensor([0.2, 0.5, 0.3])


@pytest.fixture(autouse=True)
def _fresh_store() -> None:
    pyro.clear_param_store()
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return 1 + 1.5 * torch.randn(60, generator=torch.Generator().manual_seed(1))


def gaussian(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.5, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def gaussian_guide(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal((x + 0.5) / 2, WIDE))


def exact_gaussian(x: Tensor) -> Tensor:
    return dist.Normal(0.5, math.sqrt(2)).log_prob(x)


def mixture(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        k = pyro.sample("k", dist.Categorical(SHARES), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(MEANS[k], 1.0), obs=x)


def mixture_guide(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        pyro.sample("k", dist.Categorical(logits=-(x[:, None] - MEANS).square() / 4))


def exact_mixture(x: Tensor) -> Tensor:
    return (dist.Normal(MEANS, 1.0).log_prob(x[:, None]) + SHARES.log()).logsumexp(-1)


def two_sites(x: Tensor) -> None:
    """A mixture of means, z about it, three measurements of z in a plate inside that of the data, of which one is missing."""
    with pyro.plate("data", len(x), dim=-2):
        k = pyro.sample("k", dist.Categorical(SHARES))
        z = pyro.sample("z", dist.Normal(MEANS[k], 1.0))
        with pyro.plate("times", 3, dim=-1), poutine.mask(mask=torch.tensor([True, True, False])):
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.stack([x, x, x + 50.0], -1))


def two_sites_guide(x: Tensor) -> None:
    with pyro.plate("data", len(x), dim=-2):
        k = pyro.sample("k", dist.Categorical(logits=-(x[:, None, None] - MEANS).square() / 4))
        pyro.sample("z", dist.Normal((MEANS[k] + 2 * x[:, None]) / 3, 0.7))


def exact_two_sites(x: Tensor) -> Tensor:
    given_k = dist.MultivariateNormal(torch.zeros(2), torch.eye(2) + 1.0)
    return (given_k.log_prob((x[:, None] - MEANS)[..., None].expand(-1, -1, 2)) + SHARES.log()).logsumexp(-1)


def only_z(x: Tensor) -> None:
    with pyro.plate("data", len(x), dim=-2):
        pyro.sample("z", dist.Normal(2 * x[:, None] / 3, 1.2))


def missing_data(x: Tensor) -> None:
    with pyro.plate("data", len(x)), poutine.mask(mask=x > 0):
        z = pyro.sample("z", dist.Normal(0.5, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def masked_guide(x: Tensor) -> None:
    with poutine.mask(mask=x > 0):
        gaussian_guide(x)


def error(found: dohyo.Evaluation, exact: Tensor) -> float:
    """Distance from the exact mean, in standard errors of the estimator's noise."""
    assert found.noise_stderr is not None
    return abs(found.mean - float(exact.mean())) / max(found.noise_stderr, 1e-7)


@pytest.mark.parametrize(
    ("model", "guide", "exact"),
    [
        pytest.param(gaussian, gaussian_guide, exact_gaussian, id="one continuous site"),
        pytest.param(mixture, mixture_guide, exact_mixture, id="one discrete site"),
        pytest.param(two_sites, two_sites_guide, exact_two_sites, id="two sites, nested plates, a mask"),
        pytest.param(config_enumerate(two_sites), only_z, exact_two_sites, id="one of two sites enumerated"),
        pytest.param(missing_data, masked_guide, lambda x: torch.where(x > 0, exact_gaussian(x), 0.0), id="missing data"),
    ],
)
def test_exact_answers(
    model: Callable[..., Any], guide: Callable[..., Any], exact: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    ours = from_pyro(model, guide)
    assert error(dohyo.evaluate(ours, x, ESTIMATOR, replicates=20, khat_samples=0), exact(x)) < 4
    assert error(dohyo.evaluate(ours, x, dohyo.ELBO(15), replicates=20, khat_samples=0), exact(x)) > 4  # the power twin


def test_what_is_enumerated_has_no_noise(x: Tensor) -> None:
    ours = from_pyro(mixture, lambda x: None)
    found = dohyo.evaluate(ours, x, ESTIMATOR)
    assert torch.allclose(found.per_datum, exact_mixture(x).double(), atol=1e-5)
    assert torch.allclose(ours.log_weights(x[:1], torch.zeros(1).long()), exact_mixture(x[:1]), atol=1e-5)


def test_the_same_numbers_as_by_hand(x: Tensor) -> None:
    class ByHand:
        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            q = torch.distributions.Normal((x[rows] + 0.5) / 2, WIDE)
            z = q.sample()
            prior, likelihood = torch.distributions.Normal(0.5, 1.0), torch.distributions.Normal(z, 1.0)
            return prior.log_prob(z) + likelihood.log_prob(x[rows]) - q.log_prob(z)

    ours, hand = (dohyo.evaluate(model, x, ESTIMATOR, replicates=2) for model in (from_pyro(gaussian, gaussian_guide), ByHand()))
    assert torch.allclose(ours.per_datum, hand.per_datum, atol=1e-4)
    assert torch.allclose(ours.khat, hand.khat, atol=1e-3)
    again = dohyo.evaluate(from_pyro(gaussian, gaussian_guide), x, ESTIMATOR, replicates=2)
    assert torch.equal(ours.per_datum, again.per_datum)


# -- subsampling plates -----------------------------------------------------------------------------------------------


def subsampled(x: Tensor, size: int | None = None) -> None:
    with pyro.plate("data", len(x), subsample_size=size) as i:
        z = pyro.sample("z", dist.Normal(0.5, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])


def subsampled_guide(x: Tensor, size: int | None = None) -> None:
    """Its means are a parameter for each datum, which Pyro indexes by itself."""
    with pyro.plate("data", len(x), subsample_size=size):
        mean = pyro.param("mean", (x + 0.5) / 2, event_dim=0)
        pyro.sample("z", dist.Normal(mean, WIDE))


def offset(x: Tensor, size: int | None = None) -> None:
    """Each datum has a parameter of its own in the model too, so that a mixed-up index is a wrong density."""
    with pyro.plate("data", len(x), subsample_size=size) as i:
        z = pyro.sample("z", dist.Normal(pyro.param("offset", torch.linspace(-1, 2, len(x)), event_dim=0), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])


@pytest.mark.parametrize("size", [None, 13])
def test_a_plate_is_pointed_at_the_data(size: int | None, x: Tensor) -> None:
    ours = from_pyro(offset, subsampled_guide, args=(x, size), plate="data")
    exact = dist.Normal(torch.linspace(-1, 2, len(x)), math.sqrt(2)).log_prob(x)
    found = dohyo.evaluate(ours, torch.arange(len(x)), ESTIMATOR, replicates=8, khat_samples=0)
    assert error(found, exact) < 4
    assert torch.corrcoef(torch.stack([found.per_datum, exact.double()]))[0, 1] > 0.9  # each datum's own
    rows = torch.tensor([3, 3, 59, 0, 20])
    assert ours.log_weights(torch.arange(60), rows).shape == (5,)
    parts = dohyo.evaluate(ours, torch.tensor([7]), ESTIMATOR, replicates=60, khat_samples=0)
    assert error(parts, exact[7:8]) < 4


def test_their_estimate_is_wrong_under_subsampling(x: Tensor) -> None:
    loss = RenyiELBO(num_particles=200, vectorize_particles=True, max_plate_nesting=1)
    theirs = [-loss.loss(subsampled, subsampled_guide, x, 13) / 60 for _ in range(250)]
    exact = float(exact_gaussian(x).mean())
    off = (torch.tensor(theirs).mean() - exact) / (torch.tensor(theirs).std() / math.sqrt(250))
    assert off > 4  # above log p(x), which no bound is


def test_automatic_guides_of_each_datum(x: Tensor) -> None:
    """Fitted to all data at once; their plates then keep that size, and are freed for the evaluation."""
    guide = AutoNormal(subsampled, init_scale=WIDE)
    guide(x)
    with torch.no_grad():
        guide.locs.z.copy_((x + 0.5) / 2)
    for size in (None, 13):
        ours = from_pyro(partial(subsampled, size=size), guide, args=(x,), plate="data")
        assert error(dohyo.evaluate(ours, torch.arange(60), ESTIMATOR, replicates=4, khat_samples=0), exact_gaussian(x)) < 4
    assert guide.create_plates is None


# -- the log evidence of all data -------------------------------------------------------------------------------------


def global_mean(x: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("automatic", [AutoNormal, AutoDiagonalNormal])
def test_the_log_evidence(automatic: Any, vectorize: bool, x: Tensor) -> None:
    x = x[:10]
    guide = automatic(global_mean, init_scale=0.4)
    guide(x)
    for parameter in guide.parameters():
        if float(parameter.detach().abs().max()) > 0:  # not the scale
            parameter.data.fill_(float(x.sum()) / 11)
            break
    ours = from_pyro(global_mean, guide, args=(x,), vectorize_particles=vectorize)
    found = dohyo.evaluate(ours, torch.arange(1), ESTIMATOR, replicates=40, khat_samples=0)
    exact = dist.MultivariateNormal(torch.zeros(10), torch.eye(10) + 1.0).log_prob(x)
    assert error(found, exact) < 4


# -- modules ----------------------------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))

    def model(self, x: Tensor) -> None:
        gaussian(x)

    def guide(self, x: Tensor) -> None:
        pyro.module("autoencoder", self)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.encoder(x[:, None]).squeeze(-1), 1.0))


def test_dropout_is_off_and_on_again(x: Tensor) -> None:
    autoencoder = Autoencoder()
    dropout = autoencoder.encoder[1]
    modes = []
    dropout.register_forward_hook(lambda module, *_: modes.append(module.training))
    guides = [autoencoder.guide, poutine.block(autoencoder.guide, hide=[]), lambda x: autoencoder.guide(x)]
    for guide in guides:
        dohyo.evaluate(from_pyro(autoencoder.model, guide), x, dohyo.IWAE(2), khat_samples=0)
        assert dropout.training
    assert len(modes) >= len(guides)
    assert not any(modes)


# -- what cannot be done is refused -----------------------------------------------------------------------------------


def no_sites(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        pass


def outside(x: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def outside_guide(x: Tensor) -> None:
    pyro.sample("mean", dist.Normal(0.0, 1.0))
    gaussian_guide(x)


def too_many(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0))


def own_size(x: Tensor) -> None:
    with pyro.plate("data", 7):
        pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.zeros(7))


def own_size_guide(x: Tensor) -> None:
    with pyro.plate("data", 7):
        pyro.sample("z", dist.Normal(0.0, 1.0))


def inner(x: Tensor) -> None:
    with pyro.plate("data", len(x), dim=-2):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("times", 9, subsample_size=3, dim=-1):
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[:, None].expand(-1, 3))


def inner_guide(x: Tensor) -> None:
    with pyro.plate("data", len(x), dim=-2):
        pyro.sample("z", dist.Normal(x[:, None], 1.0))


def no_plate(x: Tensor) -> None:
    pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))


def both_plates(x: Tensor, observed: bool = True) -> None:
    with pyro.plate("data", len(x), dim=-2), pyro.plate("times", 2, dim=-1):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        if observed:
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[:, None].expand(-1, 2))


@pytest.mark.parametrize(
    ("model", "guide", "message"),
    [
        pytest.param(gaussian, no_sites, "the guide has no site 'z'", id="a guide that lacks a site"),
        pytest.param(gaussian, too_many, "guide samples 'y', which is no latent", id="a guide with a site too many"),
        pytest.param(outside, outside_guide, "site 'mean' lies outside plate 'data'", id="a site outside the plate"),
        pytest.param(poutine.scale(gaussian, scale=0.5), gaussian_guide, "scaled by 0.5", id="a scaled model"),
        pytest.param(gaussian, poutine.scale(gaussian_guide, scale=2.0), "scaled by 2.0", id="a scaled guide"),
        pytest.param(inner, inner_guide, "plate 'times' holds 3 of its 9", id="another plate subsampled"),
        pytest.param(gaussian, AutoDelta(gaussian), "'z' has no density", id="a guide without a density"),
        pytest.param(gaussian, AutoNormalMessenger(gaussian), "guide is a AutoNormalMessenger", id="a messenger"),
        pytest.param(own_size, own_size_guide, "holds 7 data where 1 were given", id="a plate of its own size"),
        pytest.param(no_plate, no_plate, "no site lies in a plate", id="no plate"),
        pytest.param(both_plates, partial(both_plates, observed=False), "say which is the data's", id="two plates"),
        pytest.param(3, gaussian_guide, "model is a int", id="no function"),
    ],
)
def test_bad_models(model: Any, guide: Any, message: str, x: Tensor) -> None:
    with pytest.raises(dohyo.DohyoError, match=message):
        dohyo.evaluate(from_pyro(model, guide), x[:1] if guide is AutoDelta else x, ESTIMATOR)


def test_the_plate_can_be_named(x: Tensor) -> None:
    ours = from_pyro(both_plates, partial(both_plates, observed=False), plate="data")
    assert ours.log_weights(x, torch.tensor([1, 1, 4])).shape == (3,)


def given_subsample(x: Tensor) -> None:
    with pyro.plate("data", len(x), subsample=torch.arange(5)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x[:5])


def not_indexed(x: Tensor) -> None:
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def outside_indexed(x: Tensor) -> None:
    pyro.sample("level", dist.Normal(0.0, 1.0))
    subsampled(x)


def outside_indexed_guide(x: Tensor) -> None:
    pyro.sample("level", dist.Normal(0.0, 1.0))
    subsampled_guide(x)


def given_guide(x: Tensor) -> None:
    with pyro.plate("data", len(x), subsample=torch.arange(5)):
        pyro.sample("z", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("model", "guide", "plate", "rows", "message"),
    [
        (subsampled, subsampled_guide, "data", torch.zeros(60), "it holds indices"),
        (subsampled, subsampled_guide, "data", torch.arange(61), "it holds indices"),
        (subsampled, subsampled_guide, "date", torch.arange(60), "no plate 'date'; the plates are data"),
        (subsampled, subsampled_guide, None, torch.arange(60), "x has 60 rows"),
        (given_subsample, given_guide, "data", torch.arange(60), "its own subsample"),
        (not_indexed, subsampled_guide, "data", torch.arange(60), "must be indexed"),
        (partial(subsampled, size=60), partial(subsampled_guide, size=60), "data", torch.arange(60), "leave subsample_size out"),
        (outside_indexed, outside_indexed_guide, "data", torch.arange(60), "site 'level' lies outside"),
    ],
)
def test_bad_indices(model: Any, guide: Any, plate: str | None, rows: Tensor, message: str, x: Tensor) -> None:
    with pytest.raises(dohyo.DohyoError, match=message):
        dohyo.evaluate(from_pyro(model, guide, args=(x,), plate=plate), rows, ESTIMATOR)
