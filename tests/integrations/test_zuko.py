"""zuko's flows and mixtures inside a model, against exact answers and two separate passes."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import dohyo
from dohyo.models import LatentVariableModel

zuko = pytest.importorskip("zuko")
SCALE = 0.7  # of each component; small enough for the posterior to be narrower than the flow


class Flowed(LatentVariableModel):
    """z from a mixture of zuko's, x | z ~ N(z, 1), and a conditional flow as posterior, as on the guide page."""

    def __init__(self, components: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = zuko.flows.MAF(features=2, context=2, transforms=2, hidden_features=(8,))
        self.means = nn.Parameter(torch.tensor([[0.5, 0.0], [-1.0, 1.0], [1.5, -0.5]])[:components])
        self.logits = nn.Parameter(torch.tensor([0.0, 0.5, -0.5])[:components])
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        return x

    def posterior(self, code: Tensor) -> Any:
        return Wide(self.encoder(code), code)

    def frozen_posterior(self, code: Tensor) -> Any:
        return Wide(copy.deepcopy(self.encoder).requires_grad_(False)(code), code.detach())

    def prior(self) -> Any:
        scale = torch.full_like(self.means, SCALE)
        return zuko.distributions.Mixture(zuko.distributions.DiagNormal(self.means, scale), self.logits)

    def likelihood(self, z: Tensor) -> Any:
        return Independent(Normal(z, 1.0), 1)

    def exact(self, x: Tensor) -> Tensor:
        own = Independent(Normal(self.means, math.sqrt(SCALE**2 + 1)), 1)
        return MixtureSameFamily(Categorical(logits=self.logits), own).log_prob(x)


class Wide(torch.distributions.Distribution):
    """A flow shifted to half of x, where the posterior is."""

    has_rsample = True

    def __init__(self, flow: Any, x: Tensor) -> None:
        self.flow, self.centre = flow, x / 2
        super().__init__(x.shape[:1], x.shape[1:], validate_args=False)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        return self.flow.rsample() + self.centre  # type: ignore[no-any-return]

    def log_prob(self, value: Tensor) -> Tensor:
        return self.flow.log_prob(value - self.centre)  # type: ignore[no-any-return]


X = 1.5 * torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("components", [1, 3], ids=["linear Gaussian", "finite mixture"])
def test_exact_answers(components: int) -> None:
    model = Flowed(components)
    exact = float(model.exact(X).mean().detach())
    found = dohyo.evaluate(model, X, dohyo.MultilevelRR.at_cost(15), replicates=20, khat_samples=200)
    assert found.noise_stderr is not None
    assert abs(found.mean - exact) < 4 * found.noise_stderr
    bound = dohyo.evaluate(model, X, dohyo.ELBO(15), replicates=20, khat_samples=0)  # what a loop of zuko's would have
    assert bound.noise_stderr is not None
    assert bound.mean < exact - 4 * bound.noise_stderr


def test_one_pass_is_two_passes() -> None:
    """theta follows the estimator, the flow follows DReG: against two separate derivatives of the written-out losses."""
    model, estimator, rows = Flowed(3), dohyo.IWAE(5), torch.arange(60).repeat_interleave(5)
    objective = dohyo.objectives.MaximumLikelihood(estimator, encoder="dreg")
    torch.manual_seed(7)
    objective(model, X).loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    torch.manual_seed(7)
    estimator.plan(60, shared=True)
    log_w = model.bind(X, detach_posterior=True)(rows).view(60, 5)
    theta = [model.means, model.logits]
    by_theta = torch.autograd.grad(-estimator.reduce(log_w, torch.full((60,), 5)).mean(), theta, retain_graph=True)
    phi = list(model.encoder.parameters())
    by_phi = torch.autograd.grad(-(log_w.detach().softmax(-1).square() * log_w).sum() / 60, phi)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, gradient in zip([*theta, *phi], [*by_theta, *by_phi], strict=True):
        assert torch.allclose(ours[names[id(parameter)]], gradient, atol=1e-12), names[id(parameter)]


def test_the_same_numbers_as_torchs_distributions() -> None:
    class Gaussian(nn.Module):
        def __init__(self, normal: Any) -> None:
            super().__init__()
            self.normal = normal

        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            q = self.normal(x[rows] / 2, 0.9 * torch.ones(2, dtype=torch.float64))
            z = q.rsample()
            one = torch.ones(2, dtype=torch.float64)
            return self.normal(0 * one, one).log_prob(z) + self.normal(z, one).log_prob(x[rows]) - q.log_prob(z)

    theirs, plain = zuko.distributions.DiagNormal, lambda mean, scale: Independent(Normal(mean, scale), 1)
    a, b = (dohyo.evaluate(Gaussian(normal), X, dohyo.MultilevelRR(2), khat_samples=0).per_datum for normal in (theirs, plain))
    assert torch.allclose(a, b, atol=1e-12)
