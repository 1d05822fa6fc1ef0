"""The targets: integrals and moments against independent quadrature, draws against scores."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from dohyo.lab.targets import (
    TARGETS,
    Autoregressive,
    Banana,
    EightSchools,
    Funnel,
    Mixture,
    ORings,
    Ring,
    Target,
    check,
    target,
)
from dohyo.lab.targets.posteriors import DISTRESS, EFFECTS, ERRORS, TEMPERATURE, Quadrature

from stats import errors_off

THRESHOLD = 4.9  # standard errors: a level of 1e-6
DRAWS = 100_000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=TARGETS)
def each(request: pytest.FixtureRequest) -> Target:
    return target(request.param)


# --- normalisers


def integrated(log_density: Callable[[Tensor], Tensor], half: float, size: int = 901) -> tuple[float, Tensor, Tensor]:
    """The log integral, means and spreads on a square, by the trapezium rule.

    It converges faster than any power of the step for such integrands.
    """
    axis = torch.linspace(-half, half, size, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    log_p = log_density(points)
    weights = log_p.softmax(0)[:, None]
    mean = (weights * points).sum(0)
    spread = (weights * (points - mean).square()).sum(0).sqrt()
    return float(log_p.logsumexp(0)) + 2 * math.log(float(axis[1] - axis[0])), mean, spread


@pytest.mark.parametrize(
    ("of", "half"),
    [
        (Banana(), 90.0),
        (Banana(scale=1.0, bend=-1.0), 60.0),
        (Mixture(), 9.0),
        (Mixture(modes=3, radius=2.0, scale=1.0), 12.0),
        (Ring(), 8.0),
        (Ring(radius=1.0, width=1.0), 8.0),  # a ring that its centre cuts off
        (ORings(), 40.0),
    ],
)
def test_a_planar_density_has_its_normaliser_and_moments(of: Target, half: float) -> None:
    log_normaliser, mean, spread = integrated(of, half)
    assert of.log_normaliser == pytest.approx(log_normaliser, abs=1e-9)
    assert [moments[0] for moments in of.reference().values()] == pytest.approx(mean.tolist(), abs=1e-6)
    assert [moments[1] for moments in of.reference().values()] == pytest.approx(spread.tolist(), abs=1e-6)


@pytest.mark.parametrize("scale", [1.35, 0.7])
def test_the_funnel_integrates_to_one(scale: float) -> None:
    # In (x1, x2 e^-x1) a square grid is fine enough for every width of the funnel.
    def stretched(points: Tensor) -> Tensor:
        return Funnel(scale)(torch.stack([points[:, 0], points[:, 0].exp() * points[:, 1]], 1)) + points[:, 0]

    assert integrated(stretched, 12.0)[0] == pytest.approx(0.0, abs=1e-9)


def test_the_papers_funnel() -> None:
    x = np.array([[0.3, -1.2], [-2.0, 0.1], [2.5, 9.0]])
    exact = stats.norm.logpdf(x[:, 0], 0, 1.35) + stats.norm.logpdf(x[:, 1], 0, np.exp(x[:, 0]))
    assert Funnel()(torch.tensor(x)).numpy() == pytest.approx(exact)


def test_each_autoregressive_conditional_integrates_to_one() -> None:
    # The last coordinate integrated out leaves the density with one coordinate less, down to none at all.
    axis = torch.linspace(-15, 15, 2001, dtype=torch.float64)
    for dimension in range(1, 5):
        for start in torch.randn(5, dimension - 1, generator=seeded(), dtype=torch.float64):
            x = torch.cat([start.expand(len(axis), -1), axis[:, None]], 1)
            log_marginal = float(Autoregressive(dimension)(x).logsumexp(0)) + math.log(float(axis[1] - axis[0]))
            exact = float(Autoregressive(dimension - 1)(start[None])) if dimension > 1 else 0.0
            assert log_marginal == pytest.approx(exact, abs=1e-10)


def schools_given_tau(log_tau: float) -> tuple[float, stats.multivariate_normal]:
    """log p(log tau, y) and p(mu, theta | tau, y) by the general formulas for a joint Gaussian of (mu, theta, y)."""
    tau, y, sigma = math.exp(log_tau), np.array(EFFECTS), np.array(ERRORS)
    prior = 25.0 * np.ones((9, 9))
    prior[1:, 1:] += tau**2 * np.eye(8)
    of_y = prior[1:, 1:] + np.diag(sigma**2)
    gain = prior[:, 1:] @ np.linalg.inv(of_y)
    log_joint = stats.halfcauchy.logpdf(tau, scale=5) + log_tau + stats.multivariate_normal.logpdf(y, np.zeros(8), of_y)
    return log_joint, stats.multivariate_normal(gain @ y, prior - gain @ prior[1:], allow_singular=True)


def test_the_normaliser_of_eight_schools() -> None:
    # One integral by scipy over log tau; below it the density is a product of one that is exact and one that is normalised.
    exact, _ = integrate.quad(lambda v: math.exp(schools_given_tau(v)[0]), -30, 8, epsabs=0, epsrel=1e-8, limit=200, points=[1.0])
    for of in (EightSchools(), EightSchools(centred=True)):
        assert of.log_normaliser == pytest.approx(math.log(exact), abs=1e-7)
    for x in EightSchools(centred=True).sample(20, seeded()):
        if x[1] > -2:  # a covariance that is far from singular
            log_joint, rest = schools_given_tau(float(x[1]))
            mu_theta = torch.cat([x[:1], x[2:]]).numpy()
            assert float(EightSchools(centred=True)(x[None])) == pytest.approx(log_joint + rest.logpdf(mu_theta), abs=1e-7)


def test_the_moments_of_eight_schools() -> None:
    # A coarser grid and the general formulas.
    grid = np.arange(-20, 8, 0.25)
    given = [schools_given_tau(v) for v in grid]
    weights = np.exp([log_joint for log_joint, _ in given])
    weights /= weights.sum()
    mean = weights @ [rest.mean for _, rest in given]
    second = weights @ [np.diag(rest.cov_object.covariance) + rest.mean**2 for _, rest in given]
    moments = EightSchools().reference()
    assert [moments["mu"][0], *(moments[f"theta{i}"][0] for i in range(1, 9))] == pytest.approx(mean, abs=1e-8)
    assert [moments["mu"][1], *(moments[f"theta{i}"][1] for i in range(1, 9))] == pytest.approx(
        np.sqrt(second - mean**2), abs=1e-6
    )
    tau = weights @ np.exp(grid)
    assert moments["tau"] == pytest.approx((tau, math.sqrt(weights @ (np.exp(grid) - tau) ** 2)), abs=1e-6)
    assert EightSchools(centred=True).reference() == moments


def test_eight_schools_against_posteriordb() -> None:
    # Means of theta, mu and tau by long runs of Stan, and their standard errors: stan-dev/posteriordb, reference_posteriors,
    # summary_statistics/mean_value, eight_schools-eight_schools_noncentered.
    mean = [6.1505, 4.9396, 3.9059, 4.7960, 3.6144, 4.0511, 6.3172, 4.8840, 4.4105, 3.6021]
    stderr = [0.0557, 0.0462, 0.0542, 0.0475, 0.0461, 0.0485, 0.0499, 0.0543, 0.0330, 0.0319]
    moments = EightSchools().reference()
    ours = [moments[key][0] for key in [*(f"theta{i}" for i in range(1, 9)), "mu", "tau"]]
    assert np.abs((np.array(ours) - mean) / stderr).max() < 4


def test_the_two_parameterisations_agree() -> None:
    plain, centred = EightSchools(), EightSchools(centred=True)
    x = plain.sample(1000, seeded())
    moved = torch.cat([x[:, :2], x[:, :1] + x[:, 1:2].exp() * x[:, 2:]], 1)
    torch.testing.assert_close(centred.sample(1000, seeded()), moved)
    torch.testing.assert_close(centred(moved), plain(x) - 8 * x[:, 1])  # the Jacobian of theta = mu + tau eta
    for key, value in plain.quantities(x).items():
        torch.testing.assert_close(centred.quantities(moved)[key], value)
    assert centred.log_normaliser == plain.log_normaliser


def test_the_o_rings_data() -> None:
    assert len(TEMPERATURE) == len(DISTRESS) == 23
    assert sorted(np.array(TEMPERATURE)[np.array(DISTRESS) == 1]) == [53, 57, 58, 63, 70, 70, 75]
    z = stats.zscore(TEMPERATURE)
    chance = 1 / (1 + np.exp(-(-1.1 - 1.6 * z)))
    exact = stats.bernoulli.logpmf(DISTRESS, chance).sum() + stats.norm.logpdf([-1.1, -1.6], 0, 5).sum()
    assert float(ORings()(torch.tensor([[-1.1, -1.6]], dtype=torch.float64))) == pytest.approx(exact)


# --- draws


def stein(of: Target, x: Tensor) -> Tensor:
    """Columns whose mean is zero under the target: the score, and 1 + x times the score."""
    x = x.detach().requires_grad_()
    (score,) = torch.autograd.grad(of(x).sum(), x)
    if of.name == "eight-schools-centred":  # all scores but that of log tau contain 1 / tau, which has no second moment
        tau = x[:, 1:2].exp()
        score = torch.cat([tau * score[:, :1], score[:, 1:2], tau * score[:, 2:]], 1)
        return torch.cat([score, 1 + x[:, 1:2] * score[:, 1:2]], 1).detach()
    return torch.cat([score, 1 + x * score], 1).detach()


def test_draws_follow_the_density(each: Target) -> None:
    x = each.sample(DRAWS, seeded(1))
    assert x is not None
    assert x.shape == (DRAWS, each.dimension)
    assert x.dtype == torch.float64
    assert errors_off(stein(each, x), 0.0) < THRESHOLD
    # The power twins: draws that are moved by a twentieth of a standard deviation, or larger by a twentieth.
    assert errors_off(stein(each, x + 0.05 * x.std(0)), 0.0) > THRESHOLD
    assert errors_off(stein(each, 1.05 * x), 0.0) > THRESHOLD


def test_draws_have_the_reference_moments(each: Target) -> None:
    values, moments = each.quantities(each.sample(DRAWS, seeded(2))), each.reference()
    assert moments is not None
    assert list(values) == list(moments)
    for key, (mean, spread) in moments.items():
        if (each.name, key) == ("funnel", "x2"):
            continue  # its fourth moment is e^14 times its variance's square: no sample shows the spread
        standard = (values[key] - mean) / spread
        assert errors_off(standard, 0.0) < THRESHOLD, key
        assert errors_off(standard.square(), 1.0) < THRESHOLD, key
        assert errors_off(standard + 0.05, 0.0) > THRESHOLD, key
        assert errors_off((1.1 * standard).square(), 1.0) > THRESHOLD, key


def test_every_mode_is_drawn_alike() -> None:
    x = Mixture().sample(DRAWS, seeded())
    mode = torch.cdist(x, Mixture()._centres(x)).argmin(1)
    assert errors_off(torch.nn.functional.one_hot(mode, 8), 1 / 8) < THRESHOLD


@pytest.mark.parametrize("of", [Ring(radius=1.0, width=1.0), Ring(), Mixture(modes=1), Banana(bend=-0.2), Autoregressive(7)])
def test_other_shapes(of: Target) -> None:
    x = of.sample(DRAWS, seeded())
    assert errors_off(stein(of, x), 0.0) < THRESHOLD
    for column, (mean, spread) in zip(x.T, of.reference().values(), strict=True):
        assert errors_off(column, mean) < THRESHOLD
        assert errors_off((column - mean).square(), spread**2) < THRESHOLD


def test_the_funnels_spread() -> None:
    # E x2^2 = E e^(2 x1), over x1 alone.
    exact, _ = integrate.quad(lambda v: stats.norm.pdf(v, 0, 1.35) * math.exp(2 * v), -20, 20)
    assert Funnel().reference()["x2"][1] == pytest.approx(math.sqrt(exact))


def test_draws_come_from_the_generator(each: Target) -> None:
    state = torch.get_rng_state()
    assert torch.equal(each.sample(5, seeded(3)), each.sample(5, seeded(3)))
    assert not torch.equal(each.sample(5, seeded(3)), each.sample(5, seeded(4)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    first = each.sample(5)
    torch.manual_seed(0)
    assert torch.equal(each.sample(5), first)
    assert each.sample(0).shape == (0, each.dimension)


def test_quadrature_in_two_dimensions() -> None:
    grid = Quadrature.over(lambda x: -(x[:, 0].square() / 2 + (x[:, 1] - 1).square() / 8), (-12.0, 12.0, 0.1), (-20.0, 22.0, 0.2))
    assert grid.log_integral == pytest.approx(math.log(4 * math.pi), abs=1e-12)
    assert grid.mean_and_spread(grid.points[:, 1]) == pytest.approx((1.0, 2.0))
    assert grid.mean_and_spread(grid.points[:, 1], 5.0) == pytest.approx((1.0, 3.0))
    x = grid.sample(DRAWS, seeded())
    assert errors_off(x, torch.tensor([0.0, 1.0])) < THRESHOLD
    assert errors_off((x - torch.tensor([0.0, 1.0])).square(), torch.tensor([1.0, 4.0])) < THRESHOLD
    wrong = replace(grid, points=grid.points + 0.05)
    assert errors_off(wrong.sample(DRAWS, seeded()), torch.tensor([0.0, 1.0])) > THRESHOLD


# --- every target as a function


def test_gradients(each: Target) -> None:
    x = each.sample(4, seeded(5)).requires_grad_()
    assert torch.autograd.gradcheck(each, x)
    assert torch.autograd.gradgradcheck(each, x)


def test_dtype_and_device_are_kept(each: Target) -> None:
    x = each.sample(50, seeded(6))
    exact = each(x)
    assert exact.dtype == torch.float64
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, math.inf)):
        log_p = each(x.to(dtype))
        assert log_p.dtype == dtype
        assert float((log_p.double() - each(x.to(dtype).double())).abs().max()) < tolerance
    away = each(torch.empty(3, each.dimension, device="meta"))  # a constant that stays behind raises
    assert away.device.type == "meta"
    assert away.shape == (3,)
    assert each(x[:0]).shape == (0,)


def test_rows_are_independent(each: Target) -> None:
    x = each.sample(6, seeded(7))
    torch.testing.assert_close(torch.cat([each(row[None]) for row in x]), each(x))
    torch.testing.assert_close(torch.func.vmap(lambda row: each(row[None])[0])(x), each(x))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(each(leaf).sum(), leaf)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda row: each(row[None])[0]))(x), gradient)


def test_what_each_knows(each: Target) -> None:
    check(each, each.sample(20, seeded(8)).float())
    check(each, torch.randn(20, each.dimension, generator=seeded()))
    assert each.log_normaliser is not None
    assert (each.window is not None) == (each.dimension == 2)
    if each.window is not None:  # it shows nearly everything, and not from afar
        x = each.sample(10_000, seeded(9))
        low, high = torch.tensor(each.window).T
        inside = ((x > low) & (x < high)).all(1)
        assert float(inside.double().mean()) > 0.9
        assert bool(((x[inside].amax(0) - x[inside].amin(0)) > 0.6 * (high - low)).all())
    with pytest.raises(ValueError, match=f"--dimension 3 and its own dimension, {each.dimension}, differ; leave out"):
        target(each, dimension=3)
    assert target(each, dimension=each.dimension) is each


def test_names() -> None:
    for name in TARGETS:
        assert target(name).name == name
    assert isinstance(target(Ring), Ring)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Funnel(0.0),
        lambda: Banana(scale=-1.0),
        lambda: Mixture(modes=0),
        lambda: Mixture(modes=2.5),  # type: ignore[arg-type]
        lambda: Mixture(scale=math.nan),
        lambda: Ring(width=math.inf),
        lambda: Autoregressive(0),
    ],
)
def test_bad_arguments(make: Callable[[], Target]) -> None:
    with pytest.raises(ValueError, match="it must be"):
        make()
