"""Models with exact answers."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import scipy.special
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from dohyo import Estimator
from dohyo.annealing import chain
from dohyo.annealing.chain import Bridge
from dohyo.models import ExactPolicy, IndependentPolicy, LatentPolicy, LatentVariableModel
from dohyo.models.vae import _Chain


class LinearGaussian:
    """The paper's toy: z ~ N(theta, I), x | z ~ N(z, I), q(z; x) = N(Ax + b, 2/3 I), near the optimum."""

    def __init__(self, dimension: int = 20, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.theta = torch.randn(dimension, generator=generator, dtype=torch.float64)
        self.A = torch.eye(dimension, dtype=torch.float64) / 2
        self.A = self.A + 0.01 * torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
        self.b = self.theta / 2 + 0.01 * torch.randn(dimension, generator=generator, dtype=torch.float64)

    def log_weights(self, x: Tensor, rows: Tensor, theta: Tensor | None = None) -> Tensor:
        """`theta` may be (batch, dimension), to get a gradient for each datum."""
        theta = self.theta if theta is None else theta[rows]
        x = x[rows]
        mean = x @ self.A.T + self.b
        noise = torch.randn_like(mean)
        z = mean + math.sqrt(2 / 3) * noise
        log_q = -noise.square() / 2 - math.log(2 / 3) / 2
        return (-(z - theta).square() / 2 - (x - z).square() / 2 - log_q - math.log(2 * math.pi) / 2).sum(-1)

    def sample(self, n: int) -> Tensor:
        return self.theta + math.sqrt(2) * torch.randn(n, len(self.theta), dtype=torch.float64)

    def exact(self, x: Tensor) -> Tensor:
        return (-(x - self.theta).square() / 4 - math.log(4 * math.pi) / 2).sum(-1)

    def exact_score(self, x: Tensor) -> Tensor:
        return (x - self.theta) / 2


class LinearLayers(LatentVariableModel):
    """z_L ~ N(theta, I), each lower layer N(M z, 0.6^2 I), x ~ N(M z_1, 0.7^2 I); q is too wide and in the wrong place.

    One layer: z = z_1. Two layers: z = (z_1, z_2), and q(z_1; x) q(z_2 | z_1) is a chain, as in `TwoLayerVAE`.
    """

    def __init__(self, layers: int = 1, size: int = 2, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers, self.size = layers, size
        self.M = 0.8 * torch.randn(size, size, generator=generator, dtype=torch.float64)
        self.theta = torch.nn.Parameter(torch.full((size,), 0.3, dtype=torch.float64))

    def encoder_parameters(self) -> Iterator[torch.nn.Parameter]:
        return iter(())

    def encode(self, x: Tensor) -> Tensor:
        return x

    def posterior(self, code: Tensor) -> Distribution:
        first = normal(0.5 * code - 0.1, 0.9)
        if self.layers == 1:
            return first
        return _Chain(first, lambda z: normal(0.3 * z + 0.2, 1.1), self.size)

    def prior(self) -> Distribution:
        top = normal(self.theta, 1.0)
        if self.layers == 1:
            return top
        return _Chain(top, lambda z: normal(z @ self.M.T, 0.6), self.size, reverse=True)

    def likelihood(self, z: Tensor) -> Distribution:
        return normal(z[..., : self.size] @ self.M.T, 0.7)

    def exact(self, x: Tensor) -> Tensor:
        mean, covariance = self.theta, torch.eye(self.size, dtype=torch.float64)
        for noise in (0.6, 0.7)[2 - self.layers :]:
            mean = mean @ self.M.T
            covariance = self.M @ covariance @ self.M.T + noise**2 * torch.eye(self.size, dtype=torch.float64)
        return torch.distributions.MultivariateNormal(mean, covariance).log_prob(x)


def forget(monkeypatch: pytest.MonkeyPatch, forgotten: int) -> None:
    """The twin of every chain: the momentum ratio of one leapfrog is left out of the weight."""
    ratio, leapfrog, now = chain.momentum_ratio, Bridge._leapfrog, [-1]

    def noting(self: Bridge, t: int, *rest: Any) -> Any:
        now[0] = t
        return leapfrog(self, t, *rest)

    monkeypatch.setattr(Bridge, "_leapfrog", noting)
    monkeypatch.setattr(chain, "momentum_ratio", lambda *v: ratio(*v) * (now[0] != forgotten))


def normal(mean: Tensor, scale: float) -> Distribution:
    return Independent(Normal(mean, scale), 1)


@dataclass(frozen=True)
class FewPoints:
    """Weights with finitely many values, so that every expectation is a finite sum."""

    log_w: tuple[float, ...] = (-1.3, 0.4, 2.0)
    probability: tuple[float, ...] = (0.2, 0.5, 0.3)

    def outcomes(self, n: int) -> tuple[Tensor, Tensor]:
        """All sequences of n log-weights, and their probabilities."""
        index = torch.tensor(list(itertools.product(range(len(self.log_w)), repeat=n)))
        values = torch.tensor(self.log_w, dtype=torch.float64)
        return values[index], torch.tensor(self.probability, dtype=torch.float64)[index].prod(-1)

    def mean_iwae(self, n: int) -> float:
        log_w, probability = self.outcomes(n)
        return float(((log_w.logsumexp(-1) - math.log(n)) * probability).sum())

    def mean(self, estimator: Estimator) -> float:
        """E[reduce] over the law of K and over all weights."""
        total = 0.0
        law = estimator.depth_law
        for depth in range(int(law.cap) + 1):
            chance = float(law.survival(torch.tensor(depth)) - law.survival(torch.tensor(depth + 1)))
            if chance > 0:
                count = int(estimator.terms(torch.tensor(depth)))
                log_w, probability = self.outcomes(count)
                total += chance * float((estimator.reduce(log_w, torch.full((len(log_w),), count)) * probability).sum())
        return total


def all_bits(variables: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=variables)), dtype=torch.float64)


def exact_policy(cls: type[ExactPolicy], variables: int = 4, hidden: int = 5) -> ExactPolicy:
    torch.manual_seed(3)
    policy = cls(variables) if cls is IndependentPolicy else cls(variables, hidden=hidden)  # type: ignore[call-arg]
    far_from_uniform(policy)
    return policy


def latent_policy(variables: int = 4) -> LatentPolicy:
    """One latent, so that log p(x) is an integral over a line; q wider than the posterior, for light tails."""
    torch.manual_seed(3)
    policy = LatentPolicy(variables, hidden=5, latent=1)
    far_from_uniform(policy)
    with torch.no_grad():
        policy.encoder[-1].weight.mul_(0.3)
        policy.encoder[-1].bias.copy_(torch.tensor([0.0, 0.4]))
    return policy


def far_from_uniform(policy: torch.nn.Module) -> None:
    """Double precision and weights large enough for every part to matter."""
    policy.double()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)


def quadrature(policy: LatentPolicy, x: Tensor, nodes: int = 150) -> Tensor:
    """log p(x) of a policy with one latent, by Gauss-Hermite quadrature in z."""
    points, weights = (torch.from_numpy(part) for part in scipy.special.roots_hermitenorm(nodes))
    log_likelihood = policy.likelihood(points[:, None, None].expand(-1, len(x), 1)).log_prob(x)
    return torch.as_tensor((log_likelihood + weights.log()[:, None]).logsumexp(0) - math.log(2 * math.pi) / 2)
