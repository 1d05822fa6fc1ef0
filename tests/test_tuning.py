import json

import pytest
import torch

import dohyo
from dohyo import IWAE, SUMO, MultilevelRR, MultilevelSS, SymmetricSUMO, tune
from dohyo.diagnostics import moments
from dohyo.estimators.multilevel import r_at_cost


@pytest.fixture(scope="module")
def banks() -> tuple[torch.Tensor, torch.Tensor]:
    """Pilot and test: heavy log-weights with a spread and a skew of their own for each datum."""
    generator = torch.Generator().manual_seed(0)
    spread = 2 + 2 * torch.rand(300, 1, generator=generator)
    log_w = spread * torch.randn(300, 512, generator=generator) - torch.rand(300, 512, generator=generator).log().abs()
    return log_w[:150], log_w[150:]


@pytest.mark.parametrize("cost", [5, 15, 40])
def test_the_tuned_estimator_beats_the_others_on_fresh_weights(banks: tuple[torch.Tensor, torch.Tensor], cost: int) -> None:
    pilot, test = banks
    tuned = tune(pilot, cost, max_terms=64)
    assert tuned.target_terms == 64
    assert tuned.expected_cost == pytest.approx(cost, rel=1e-3)
    ours = moments(tuned, test)
    others = [SUMO.at_cost(cost, 64), SymmetricSUMO.at_cost(cost, 64)]
    for m, levels in ((1, 6), (2, 5), (4, 4), (8, 3), (16, 2), (32, 1)):
        if m < cost:
            others += [cls(m, r_at_cost(cost / m, levels), levels) for cls in (MultilevelRR, MultilevelSS)]
    for other in others:
        found = moments(other, test)
        assert ours.variance * ours.cost < found.variance * found.cost, other
    assert ours.mean == pytest.approx(moments(IWAE(64), test).mean, abs=0.1)


def test_without_a_cap_it_is_unbiased_with_finite_variance(banks: tuple[torch.Tensor, torch.Tensor]) -> None:
    tuned = tune(banks[0], 15)
    assert tuned.target_terms == float("inf")
    assert tuned.finite_variance
    assert tuned.expected_cost == pytest.approx(15, rel=0.05)


def test_the_gradients_variance_as_criterion() -> None:
    """Where log w depends on theta through a shift alone the gradient is constant: use a scale."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(60, 128, generator=generator)
    log_w = 2 * noise
    tuned = tune(log_w, 10, max_terms=32, grad_log_w=noise[:, :, None])
    assert tuned.target_terms == 32
    fresh = torch.randn(60, 128, generator=generator)
    by_gradient = moments(tuned, 2 * fresh, fresh[:, :, None])
    by_sumo = moments(SUMO.at_cost(10, 32), 2 * fresh, fresh[:, :, None])
    assert by_gradient.gradient_variance is not None
    assert by_sumo.gradient_variance is not None
    assert by_gradient.gradient_variance < by_sumo.gradient_variance


def test_it_can_be_saved_and_rebuilt(banks: tuple[torch.Tensor, torch.Tensor]) -> None:
    for max_terms in (None, 32):
        tuned = tune(banks[0], 8, max_terms)
        assert dohyo.from_dict(json.loads(json.dumps(dohyo.to_dict(tuned)))) == tuned
        assert repr(tuned).startswith(type(tuned).__name__)


def test_edges() -> None:
    assert tune(torch.randn(4, 20), 10, max_terms=10) == IWAE(10)
    assert tune(torch.randn(1, 64), 5, max_terms=20).target_terms == 20
    assert tune(torch.zeros(4, 64), 5, max_terms=20).expected_cost == pytest.approx(5)  # all differences are zero
    with pytest.raises(ValueError, match="at least 2 log-weights"):
        tune(torch.randn(4, 20), 1)
    with pytest.raises(ValueError, match="two blocks of 32"):
        tune(torch.randn(4, 20), 4, max_terms=32)
    with pytest.raises(ValueError, match="finite"):
        tune(torch.full((4, 20), torch.nan), 4, max_terms=8)
