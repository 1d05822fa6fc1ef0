"""The paper's toy: a linear-Gaussian model near its optimum."""

import math

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from dohyo.models import LatentVariableModel


class Toy(LatentVariableModel):
    r"""Gaussians throughout, in float64, with the best parameters for data x and noise added to each of them.

    .. math:: p(z) = N(\theta, I), \quad p(x \mid z) = N(z, I), \quad q(z; x) = N(A x + b, \tfrac23 I)

    At the optimum theta is the mean of the data, A is I/2 and b half that mean.

    References:
        Rainforth et al., Tighter variational bounds are not necessarily better (ICML 2018); Luo et al., SUMO (ICLR 2020),
        the appendix.

    Example:
        >>> x = toy_data(20, 1000, seed=0)
        >>> Toy(x, perturbation=0.01, seed=1).exact(x).shape
        torch.Size([1000])
    """

    def __init__(self, x: Tensor, perturbation: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        dimension, mean = x.shape[1], x.mean(0)

        def near(best: Tensor) -> nn.Parameter:
            noise = torch.randn(best.shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(best + perturbation * noise)

        self.encoder = nn.utils.skip_init(nn.Linear, dimension, dimension, dtype=torch.float64)
        self.encoder.weight, self.encoder.bias = near(torch.eye(dimension, dtype=torch.float64) / 2), near(mean / 2)
        self.theta = near(mean)

    def encode(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.encoder(x))

    def posterior(self, code: Tensor) -> Distribution:
        return _normal(code, math.sqrt(2 / 3))

    def prior(self) -> Distribution:
        return _normal(self.theta, 1.0)

    def likelihood(self, z: Tensor) -> Distribution:
        return _normal(z, 1.0)

    def exact(self, x: Tensor) -> Tensor:
        """log p(x), (batch,)."""
        return torch.as_tensor(_normal(self.theta, math.sqrt(2)).log_prob(x))


def toy_data(dimension: int, count: int, seed: int) -> Tensor:
    """Samples of x, (count, dimension), with a standard normal true theta."""
    generator = torch.Generator().manual_seed(seed)
    theta, noise = (torch.randn(n, dimension, generator=generator, dtype=torch.float64) for n in (1, count))
    return theta + math.sqrt(2) * noise


def _normal(mean: Tensor, scale: float) -> Distribution:
    return Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)
