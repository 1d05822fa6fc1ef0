"""A small autoregressive density to distil into a model that samples all coordinates at once."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dohyo.errors import whole
from dohyo.lab.targets.target import Moments, Target, gaussian_noise, log_gaussian


@dataclass(frozen=True)
class Autoregressive(Target):
    r"""Gaussian conditionals whose mean and scale oscillate with the coordinates before them; it is normalised.

    .. math:: p^*(x) = \prod_i N(x_i; 2 \sin h_i, e^{\cos h_i - 1}), \qquad h_1 = 0, \quad h_{i+1} = x_i + h_i / 2

    Here e^(cos h - 1) is the variance. The density costs one pass, a sample one step for each coordinate: the case in which
    van den Oord et al., Parallel WaveNet, 2018, distil a slow sampler into a fast one by reverse KL.

    Example:
        >>> target = Autoregressive()
        >>> target(torch.zeros(1, 4)) + 2 * math.log(2 * math.pi)
        tensor([0.])
        >>> [round(spread, 2) for mean, spread in target.reference().values()]
        [1.0, 1.57, 1.55, 1.51]
    """

    dimension: int = 4
    name = "autoregressive"
    log_normaliser = 0.0

    def __post_init__(self) -> None:
        whole("dimension", self.dimension)

    def __call__(self, x: Tensor) -> Tensor:
        state, log_p = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
        for value in x.unbind(1):
            log_p = log_p + log_gaussian(value, *_conditional(state))
            state = value + state / 2
        return log_p

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise = gaussian_noise(n, self.dimension, generator)
        state, values = torch.zeros_like(noise[:, 0]), []
        for column in noise.unbind(1):
            mean, log_scale = _conditional(state)
            values.append(mean + log_scale.exp() * column)
            state = values[-1] + state / 2
        return torch.stack(values, 1)

    def reference(self) -> Moments:
        """By the Markov chain h on a grid. All means are zero, because x and -x have the same density."""
        step = 0.05
        grid = step * torch.arange(-300, 301, dtype=torch.float64, device="cpu")
        mean, log_scale = _conditional(grid)
        kernel = step * log_gaussian(grid[:, None], mean + grid / 2, log_scale).exp()  # from column to row
        moments = {"x1": (0.0, 1.0)}
        density = step * log_gaussian(grid, 0.0, 0.0).exp()  # of h_2 = x_1
        for i in range(2, self.dimension + 1):
            second = (density * (mean.square() + (2 * log_scale).exp())).sum()
            moments[f"x{i}"] = (0.0, math.sqrt(float(second)))
            density = kernel @ density
        return moments


def _conditional(state: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the log of the standard deviation."""
    return 2 * state.sin(), (state.cos() - 1) / 2
