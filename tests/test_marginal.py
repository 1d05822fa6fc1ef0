"""Analytic models: estimates and their gradients against exact answers, with a biased estimator that must fail."""

import math

import pytest
import torch
from torch import Tensor

import dohyo
from dohyo import IWAE, SUMO, Estimator, MultilevelRR, SymmetricSUMO
from dohyo.models import VAE

from problems import LinearGaussian
from stats import errors_off

DRAWS = 60_000


def value_and_gradient(estimator: Estimator, problem: LinearGaussian, x: Tensor) -> Tensor:
    """(draws, 1 + dimension): estimates of log p(x) for one x, and their theta-gradients."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(20):
        batch = DRAWS // 20
        theta = problem.theta.expand(batch, -1).clone().requires_grad_()
        data = x.expand(batch, -1)
        value = dohyo.estimate(lambda rows, t=theta, d=data: problem.log_weights(d, rows, t), batch, estimator, generator)
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        parts.append(torch.cat([value.detach()[:, None], gradient], -1))
    return torch.cat(parts)


def test_value_and_score_are_unbiased() -> None:
    problem = LinearGaussian()
    torch.manual_seed(0)
    x = problem.sample(1)
    exact = torch.cat([problem.exact(x)[:, None], problem.exact_score(x)], -1)
    unbiased = value_and_gradient(MultilevelRR(4), problem, x)
    biased = value_and_gradient(IWAE(5), problem, x)
    assert errors_off(unbiased[:, :1], exact[:, :1]) < 4
    assert errors_off(unbiased[:, 1:], exact[:, 1:]) < 4
    assert errors_off(biased[:, :1], exact[:, :1]) > 4  # the power twin
    assert errors_off(biased[:, 1:], exact[:, 1:]) > 4


def test_symmetric_sumo_is_unbiased_on_the_toy() -> None:
    problem = LinearGaussian()
    torch.manual_seed(1)
    x = problem.sample(1).expand(20_000, -1)
    value = dohyo.log_marginal(problem, x, SymmetricSUMO.at_cost(10), torch.Generator().manual_seed(0))
    assert errors_off(value, problem.exact(x[:1])) < 4
    shifted = dohyo.log_marginal(problem, x, IWAE(10))
    assert errors_off(shifted, problem.exact(x[:1])) > 4


def test_gradients_of_a_model_reach_all_its_parameters() -> None:
    torch.manual_seed(0)
    model = VAE(data=12, hidden=8, latent=3)
    x = torch.rand(7, 12).round()
    dohyo.log_marginal(model, x, SUMO(2), torch.Generator().manual_seed(0)).mean().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in model.parameters())
    phi, theta = list(model.encoder_parameters()), list(model.decoder_parameters())
    assert len(phi) + len(theta) == len(list(model.parameters()))
    assert model.sample(5).shape == (5, 12)


def test_a_detached_posterior_leaves_the_value_and_the_decoders_gradient() -> None:
    model = VAE(data=12, hidden=8, latent=3)
    x, rows = torch.rand(4, 12).round(), torch.arange(4).repeat_interleave(3)
    gradients = []
    for detach in (False, True):
        torch.manual_seed(0)
        log_w = model.bind(x, detach_posterior=detach)(rows)
        wanted = [*model.decoder_parameters(), *model.encoder_parameters()]
        gradients.append((log_w, torch.autograd.grad(log_w.logsumexp(0), wanted)))
    theta = len(list(model.decoder_parameters()))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert all(torch.equal(a, b) for a, b in zip(gradients[0][1][:theta], gradients[1][1][:theta], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(gradients[0][1][theta:], gradients[1][1][theta:], strict=True))


def test_a_shared_k() -> None:
    problem = LinearGaussian()
    asked = []

    def source(rows: Tensor) -> Tensor:
        asked.append(rows.bincount(minlength=6))
        return torch.zeros(len(rows))

    dohyo.estimate(source, 6, SUMO(1), torch.Generator().manual_seed(0), shared=True)
    assert len(asked[0].unique()) == 1
    assert dohyo.log_marginal(problem, problem.sample(6), SUMO(1), shared=True).shape == (6,)


def test_checked_reduce() -> None:
    log_w = torch.zeros(2, 4)
    assert dohyo.reduce(log_w, torch.tensor([3, 4]), SUMO(2)).tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    nan_in_padding = torch.tensor([[0.0, 0.0, 0.0, math.nan]])
    assert float(dohyo.reduce(nan_in_padding, torch.tensor([3]), SUMO(2))) == pytest.approx(0, abs=1e-12)
    cases = [
        (log_w, torch.tensor([3, 5]), SUMO(2), "only 4 columns"),
        (log_w, torch.tensor([1, 4]), SUMO(2), "never uses 1 log-weights"),
        (log_w, torch.tensor([3, 4]), MultilevelRR(), "never uses 3"),
        (log_w[0], torch.tensor([3]), SUMO(2), "must be floats"),
        (log_w, torch.tensor([3]), SUMO(2), r"\(1,\)"),
        (log_w.long(), torch.tensor([3, 4]), SUMO(2), "int64"),
        (log_w[:0], torch.tensor([], dtype=torch.long), SUMO(2), "empty"),
        (nan_in_padding, torch.tensor([4]), SUMO(2), "NaN"),
    ]
    for log_weights, counts, estimator, message in cases:
        with pytest.raises(ValueError, match=message):
            dohyo.reduce(log_weights, counts, estimator)
