"""Models with exact answers."""

import itertools
import math
from dataclasses import dataclass

import scipy.special
import torch
from torch import Tensor

from dohyo import Estimator
from dohyo.models import ExactPolicy, IndependentPolicy, LatentPolicy


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
