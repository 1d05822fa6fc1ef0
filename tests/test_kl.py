"""The true reverse KL on models whose log p(x) is known: which ways bound it from which side, and what shows a lost encoder."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from dohyo import Annealed
from dohyo.kl import Draws, divergence, draw, weighted_moments
from dohyo.lab.targets import Custom, Funnel
from dohyo.models import GaussianLVM
from dohyo.models.latent import LatentVariableModel


class Linear(LatentVariableModel):
    """z ~ N(0, I), x | z ~ N(z, I), so that x ~ N(0, 2 I); q(z; x) = N(x / 2 + miss, spread I), best at 0 and 1/2."""

    def __init__(self, dimension: int = 2, miss: float = 0.0, spread: float = 0.5) -> None:
        super().__init__()
        self.encoder = nn.Linear(1, 1)
        self.dimension, self.miss, self.spread = dimension, miss, spread

    def encode(self, x: Tensor) -> Tensor:
        return x / 2 + self.miss

    def posterior(self, code: Tensor) -> Distribution:
        return Independent(Normal(code, math.sqrt(self.spread), validate_args=False), 1, validate_args=False)

    def prior(self) -> Distribution:
        zero = torch.zeros(self.dimension, dtype=torch.float64)
        return Independent(Normal(zero, 1.0, validate_args=False), 1, validate_args=False)

    def likelihood(self, z: Tensor) -> Distribution:
        return Independent(Normal(z, 1.0, validate_args=False), 1, validate_args=False)

    def exact(self, x: Tensor) -> Tensor:
        return (-x.square() / 4 - math.log(4 * math.pi) / 2).sum(-1)


def gaussian(dimension: int, mean: float = 0.0, variance: float = 2.0) -> Custom:
    """N(mean, variance I) without its constant."""
    return Custom(lambda x: -(x - mean).square().sum(-1) / (2 * variance), dimension)


def errors(gap: Tensor) -> float:
    return float(gap.mean() / (gap.std() / math.sqrt(len(gap))))


@pytest.mark.parametrize("dimension", [2, 6])
def test_the_ways_bound_the_truth_from_both_sides(dimension: int) -> None:
    """A few terms and an encoder that is off: below by the encoder and by the prior, above by the z that x came from."""
    model = Linear(dimension, miss=0.3, spread=0.8)
    draws = draw(model, gaussian(dimension), n=3000, terms=5, prior_terms=200, seed=1)
    exact = model.exact(draws.x)
    assert errors(draws.by_encoder - exact) < -8
    assert errors(draws.by_prior - exact) < -2
    assert errors(draws.above - exact) > 5
    gaps = [float((way - exact).mean().abs()) for way in (draws.by_encoder, draws.above)]
    more = draw(model, gaussian(dimension), n=500, terms=2000, prior_terms=20_000, seed=1)
    exact = model.exact(more.x)
    for way, gap in zip((more.by_encoder, more.above), gaps, strict=True):
        assert float((way - exact).mean().abs()) < min(0.01, gap / 20)
    assert float((more.by_prior - exact).mean().abs()) < (0.005 if dimension == 2 else 0.3)


def test_a_perfect_encoder_needs_one_term() -> None:
    draws = draw(Linear(3), gaussian(3), n=100, terms=1)
    for way in (draws.by_encoder, draws.above):
        torch.testing.assert_close(way, Linear(3).exact(draws.x))


def test_the_replaced_weight_is_one_of_the_terms() -> None:
    """`above` of one term is log w at the z that x came from, whose mean over z is above log p(x) by KL(p(z | x), q)."""
    model = Linear(1, miss=0.2)
    draws = draw(model, gaussian(1), n=20_000, terms=1, prior_terms=10)
    gap = draws.above - model.exact(draws.x)
    assert abs(float(gap.mean()) - 0.04) < 5 * float(gap.std()) / math.sqrt(len(gap))  # miss^2 / (2 * 1/2)
    gap = draws.by_encoder - model.exact(draws.x)
    assert abs(float(gap.mean()) + 0.04) < 5 * float(gap.std()) / math.sqrt(len(gap))


def test_the_divergence_is_the_analytic_one() -> None:
    """KL(N(0, 2 I), N(1, 3 I)) in two dimensions."""
    kl, log_normaliser = 2 * (0.5 * math.log(3 / 2) + (2 + 1) / 6 - 0.5), math.log(2 * math.pi * 3)
    draws = draw(Linear(), gaussian(2, 1.0, 3.0), n=4000, terms=50, prior_terms=2000, seed=2)
    assert divergence(draws).reverse_kl is None
    found = divergence(draws, log_normaliser)
    assert found.reverse_kl == pytest.approx(found.objective + log_normaliser)
    assert abs(found.objective - (kl - log_normaliser)) < 4 * found.stderr < 0.1
    assert not divergence(draws).warnings
    assert not found.warnings
    for way in (found.by_encoder, found.by_prior, found.above):
        assert way == pytest.approx(found.objective, abs=0.02)


@pytest.mark.parametrize("dimension", [2, 6])
def test_a_lost_encoder_is_found(dimension: int) -> None:
    """In two dimensions the prior tells, and the truth is still right; beyond, `above` does."""
    model = Linear(dimension, miss=20.0)
    draws = draw(model, gaussian(dimension), n=300, terms=500)
    found = divergence(draws, dimension / 2 * math.log(4 * math.pi))
    assert any("the encoder is lost" in line and "the z that x came from" in line for line in found.warnings)
    assert any("samples of the prior" in line for line in found.warnings) or dimension > 2
    assert found.by_encoder < -100
    assert found.above > 100
    if dimension == 2:
        assert abs(found.reverse_kl or math.inf) < 4 * found.stderr + 0.02


def test_too_few_samples_of_the_prior_are_no_fault_of_the_encoder() -> None:
    few = draw(Linear(2), Custom(lambda x: -x.square().sum(-1) / 4, 2), n=300, terms=50, prior_terms=1)
    assert divergence(few).by_prior < divergence(few).by_encoder - 1
    assert not divergence(few).warnings  # log p(x) is known from both sides
    unsure = dataclasses.replace(few, above=few.by_encoder + 0.5)
    (line,) = divergence(unsure).warnings
    assert "too few" in line
    many = draw(Linear(30), gaussian(30), n=300, terms=50, prior_terms=100)
    found = divergence(many, 15 * math.log(4 * math.pi))
    assert found.by_prior < found.by_encoder - 3  # hopeless in so many dimensions, and not held against anybody
    assert not found.warnings
    assert found.reverse_kl == pytest.approx(0, abs=1e-6)


def test_numbers_that_are_not_finite() -> None:
    """A way that is NaN or -inf is a disagreement, not silence."""
    x = torch.zeros(50, 2)
    zero, lost = torch.zeros(50, dtype=torch.float64), torch.full((50,), math.nan, dtype=torch.float64)
    assert divergence(Draws(x, zero, lost, zero, zero)).warnings
    assert divergence(Draws(x, zero, zero - math.inf, zero, zero)).warnings
    nowhere = divergence(Draws(x, zero - math.inf, zero, zero, zero), 0.0)  # the density is zero at every draw
    assert nowhere.objective == math.inf


def test_draws_repeat_in_any_chunks_and_leave_the_noise_alone() -> None:
    torch.manual_seed(3)
    model = GaussianLVM(2, hidden=8, latent=2)
    before = torch.random.get_rng_state()
    whole = draw(model, Funnel(), n=100, terms=10, prior_terms=500, seed=4)
    again = draw(model, Funnel(), n=100, terms=10, prior_terms=500, seed=4)
    parts = draw(model, Funnel(), n=100, terms=10, prior_terms=500, seed=4, max_rows=300)
    assert torch.equal(before, torch.random.get_rng_state())
    for field in dataclasses.fields(Draws):
        one, same, other = (getattr(draws, field.name) for draws in (whole, again, parts))
        assert torch.equal(one, same)
        assert one.shape == other.shape
        assert not one.requires_grad
        assert field.name == "x" or one.dtype == torch.float64
    assert model.training


# --- moments


def test_weighted_moments() -> None:
    """Draws of N(0, 2 I) for the target N(1, 3/2 I): the weights are bounded, and the moments known."""
    target = gaussian(2, 1.0, 1.5)
    draws = draw(Linear(2, miss=0.1), target, n=20_000, terms=50, prior_terms=100, seed=5)
    quantities = {"x1": draws.x[:, 0], "square": draws.x[:, 1].square()}
    found, shape = weighted_moments(draws, quantities)
    assert set(found) == {"x1", "square"}
    for name, (mean, sd) in {"x1": (1.0, math.sqrt(1.5)), "square": (2.5, math.sqrt(2 * 1.5**2 + 4 * 1.5))}.items():
        assert abs(found[name]["mean"] - mean) < 4 * found[name]["stderr"]
        assert 0 < found[name]["stderr"] < 0.06 * sd
        assert found[name]["sd"] == pytest.approx(sd, rel=0.05)
    assert shape < 0.5
    for percent, z in ((2.5, -1.96), (25, -0.6745), (50, 0.0), (75, 0.6745), (97.5, 1.96)):
        assert found["x1"][f"q{percent:g}"] == pytest.approx(1 + z * math.sqrt(1.5), abs=0.08)


def test_log_z_and_the_kl_with_it() -> None:
    """An exact encoder, so that the weights are those of N(0, 2 I) for N(1, 3/2 I): log Z and the KL are known."""
    log_z = math.log(2 * math.pi * 1.5)
    kl = 2 * 0.5 * (2 / 1.5 - 1 - math.log(2 / 1.5) + 1 / 1.5)
    found = [divergence(draw(Linear(2), gaussian(2, 1.0, 1.5), n=400, terms=1, prior_terms=2, seed=s)) for s in range(150)]
    for values, told, exact in (
        ([one.log_z for one in found], [one.log_z_stderr for one in found], log_z),
        ([one.estimated_kl for one in found], [one.estimated_kl_stderr for one in found], kl),
    ):
        spread = float(torch.tensor(values).std())
        assert abs(float(torch.tensor(values).mean()) - exact) < 4 * spread / math.sqrt(150) + spread**2
        assert spread == pytest.approx(float(torch.tensor(told).mean()), rel=0.2)
    assert all(one.reverse_kl is None and 1 < one.ess < 400 for one in found)
    same = divergence(draw(Linear(2), gaussian(2), n=50, terms=1, prior_terms=2), math.log(4 * math.pi))
    assert same.ess == pytest.approx(50)
    assert same.log_z == pytest.approx(math.log(4 * math.pi))
    assert same.estimated_kl == pytest.approx(same.reverse_kl)


def test_the_stderr_of_weighted_moments_is_their_spread() -> None:
    target, means, told = gaussian(1, 1.0, 1.5), [], []
    for seed in range(200):
        draws = draw(Linear(1), target, n=200, terms=1, prior_terms=2, seed=seed)
        entry = weighted_moments(draws, {"x": draws.x[:, 0]})[0]["x"]
        means.append(entry["mean"])
        told.append(entry["stderr"])
    spread = float(torch.tensor(means).std())
    assert spread == pytest.approx(float(torch.tensor(told).mean()), rel=0.2)


def test_khat_tells_a_target_that_is_wider_than_the_model() -> None:
    """N(0, 2) for N(0, 20): the weights' tail has k = 1 - 2/20 = 0.9. The other way round all is well."""
    wide = draw(Linear(1), gaussian(1, 0.0, 20.0), n=20_000, terms=1, prior_terms=2)
    narrow = draw(Linear(1), gaussian(1, 0.0, 1.0), n=20_000, terms=1, prior_terms=2)
    assert weighted_moments(wide, {})[1] > 0.7
    assert weighted_moments(narrow, {})[1] < 0.3


def test_moments_with_a_lost_encoder_are_by_the_prior() -> None:
    draws = draw(Linear(1, miss=20.0), gaussian(1, 1.0, 1.5), n=5000, terms=5)
    found, shape = weighted_moments(draws, {"x": draws.x[:, 0]})
    assert abs(found["x"]["mean"] - 1) < 4 * found["x"]["stderr"] < 0.2
    assert shape < 0.5


def test_weights_of_zero() -> None:
    """Where the target's density is zero, draws count for nothing."""
    half = Custom(lambda x: torch.where(x[:, 0] > 0, -x[:, 0].square() / 4, -torch.inf), 1)
    draws = draw(Linear(1), half, n=5000, terms=1, prior_terms=2)
    found, shape = weighted_moments(draws, {"x": draws.x[:, 0]})
    assert found["x"]["mean"] == pytest.approx(2 / math.sqrt(math.pi), abs=5 * found["x"]["stderr"])
    assert not math.isnan(shape)


@pytest.mark.parametrize("dimension", [2, 6])
def test_annealed_weights_bound_the_truth_more_tightly(dimension: int) -> None:
    """At the same evaluations, chains close most of the gap that an encoder leaves that is off."""
    model = Linear(dimension, miss=1.0, spread=0.3)
    encoder = draw(model, gaussian(dimension), n=800, terms=50, prior_terms=200, seed=1)
    chains = Annealed(model, 4)
    x = model.sample(100).detach()
    chains.tune(x, iterations=40)
    annealed = draw(chains, gaussian(dimension), n=800, terms=50 // chains.evaluations_per_weight, prior_terms=200, seed=1)
    exact = model.exact(annealed.x)
    assert errors(annealed.by_encoder - exact) < 4
    assert errors(annealed.above - exact) > -4
    gap, before = (float((draws.above - draws.by_encoder).mean()) for draws in (annealed, encoder))
    assert 0 < gap < before / 2
