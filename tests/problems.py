"""Models with exact answers."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dohyo import Estimator


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
