import math

import pytest
import torch

from dohyo import ELBO, IWAE, JVI, SUMO, Finite, MultilevelRR, MultilevelSS, SymmetricSUMO
from dohyo.diagnostics import khat, median_of_means, moments

from problems import FewPoints

PROBLEM = FewPoints()


def exact_moments(estimator: SUMO | MultilevelRR) -> tuple[float, float]:
    """By enumeration of the depth and of all weights."""
    width = int(estimator.target_terms)
    log_w, probability = PROBLEM.outcomes(width)
    depths = estimator.depths(width)
    chance = estimator.depth_law.survival(depths) - estimator.depth_law.survival(depths + 1)
    joint = probability[:, None] * chance
    paths = estimator.paths(log_w)
    mean = float((joint * paths).sum())
    return mean, float((joint * paths.square()).sum()) - mean**2


@pytest.mark.parametrize(
    "estimator",
    [
        SUMO(1, Finite((0.5, 0.2, 0.3), start=0)),
        SymmetricSUMO(2, Finite((0.6, 0.2, 0.2)), centre=(0.1, 0.05)),
        MultilevelRR(1, max_level=2),
        MultilevelSS(2, max_level=1, centre=(0.3,)),
    ],
)
def test_stratified_moments_against_enumeration(estimator: SUMO) -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.multinomial(torch.tensor(PROBLEM.probability), 400 * 500, replacement=True, generator=generator)
    log_w = torch.tensor(PROBLEM.log_w, dtype=torch.float64)[index].view(400, 500)
    found = moments(estimator, log_w)
    mean, variance = exact_moments(estimator)
    for values, exact in ((found.per_datum_mean, mean), (found.per_datum_variance, variance)):
        assert abs(float(values.mean()) - exact) < 4.9 * float(values.std()) / math.sqrt(len(values))
    assert found.cost == pytest.approx(estimator.expected_cost)
    assert found.uncovered == 0


def test_few_blocks_do_not_bias_the_variance() -> None:
    """Two blocks for each datum: the square of the mean needs its correction."""
    log_w = torch.randn(20_000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = moments(IWAE(4), log_w).per_datum_variance
    many = (torch.randn(400_000, 4, dtype=torch.float64).logsumexp(-1)).var()
    assert abs(float(values.mean()) - float(many)) < 5 * float(values.std()) / math.sqrt(len(values))


def test_fixed_estimators_use_all_their_weights() -> None:
    """An ELBO of k has target_terms 1 and needs k weights all the same."""
    log_w = 2 * torch.randn(400, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert moments(ELBO(5), log_w).variance == pytest.approx(4 / 5, rel=0.05)
    with pytest.raises(ValueError, match="two blocks of 80"):
        moments(JVI(80), log_w)


def test_depths_that_are_never_drawn_do_not_overflow() -> None:
    assert math.isfinite(moments(SUMO(), torch.randn(2, 20_000)).variance)


def test_uncapped_laws_are_measured_up_to_the_width() -> None:
    found = moments(SUMO(10), torch.randn(5, 100))
    assert found.uncovered == pytest.approx(1 / 41)  # P(K >= 41) when blocks of 50 hold K <= 40
    assert found.cost < SUMO(10).expected_cost


def test_gradient_variance_against_autograd() -> None:
    estimator = SymmetricSUMO(2, Finite((0.6, 0.2, 0.2)))
    generator = torch.Generator().manual_seed(0)
    theta = torch.tensor([0.3, -0.2], dtype=torch.float64)
    noise = torch.randn(3, 10, dtype=torch.float64, generator=generator)

    def log_w(t: torch.Tensor) -> torch.Tensor:
        return t[0] * noise + t[1] * noise**2

    jacobian = torch.autograd.functional.jacobian(log_w, theta)
    found = moments(estimator, log_w(theta), jacobian)
    blocks = log_w(theta).view(6, 5)
    paths = torch.autograd.functional.jacobian(lambda t: estimator.paths(log_w(t).view(6, 5)), theta)
    chance = torch.tensor([0.0, 0.6, 0.2, 0.2], dtype=torch.float64)
    averaged = (paths * chance[:, None]).sum(1).view(3, 2, 2)
    second = (paths.square() * chance[:, None]).sum(1).view(3, 2, 2).mean(1)
    expected = (second - averaged.mean(1).square() + averaged.var(1) / 2).sum(-1).mean()
    assert blocks.shape == (6, 5)
    assert found.gradient_variance == pytest.approx(float(expected))


@pytest.mark.parametrize("shape", [-0.3, 0.2, 0.5, 0.9, 1.5])
def test_khat_finds_the_shape_of_pareto_weights(shape: float) -> None:
    u = torch.rand(200, 4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = 1 + (u**-shape - 1) / shape  # generalised Pareto
    found = khat(weights.log())
    regularised = (190 * shape + 5) / 200  # the prior's pull at a tail of 190
    assert float(found.mean()) == pytest.approx(regularised, abs=0.05)


def test_khat_of_constant_and_of_few_weights() -> None:
    assert bool(khat(torch.zeros(3, 10)).isnan().all())
    assert not bool((khat(torch.zeros(3, 1000)) > 0.7).any())


def test_median_of_means_ignores_an_outlier() -> None:
    values = torch.randn(3200, generator=torch.Generator().manual_seed(0))
    values[5] = 1e9
    centre, (low, high) = median_of_means(values)
    assert low < centre < high
    assert low < 0 < high
    assert high - low < 0.3


def test_median_of_means_covers() -> None:
    """95% intervals of a skewed, heavy-tailed law: Student's t with 2.1 degrees of freedom."""
    torch.manual_seed(0)
    law = torch.distributions.StudentT(2.1)
    covered = 0
    for _ in range(300):
        _, (low, high) = median_of_means(law.sample((640,)))
        covered += low <= 0 <= high
    assert covered / 300 > 0.95 - 4.9 * math.sqrt(0.05 * 0.95 / 300)


def test_bad_pilots() -> None:
    with pytest.raises(ValueError, match="two blocks of 4"):
        moments(IWAE(4), torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"\(data, samples\)"):
        moments(IWAE(4), torch.zeros(7))
    with pytest.raises(ValueError, match="finite"):
        moments(IWAE(1), torch.full((2, 4), math.nan))
    with pytest.raises(ValueError, match="too short"):
        moments(SUMO(30), torch.zeros(2, 20))
    with pytest.raises(ValueError, match="grad_log_w"):
        moments(IWAE(2), torch.zeros(2, 4), torch.zeros(2, 4))
