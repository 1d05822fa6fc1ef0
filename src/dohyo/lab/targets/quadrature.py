"""A density on a fine regular grid: its integral, its moments, and samples from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dohyo.lab.targets.target import device_of


@dataclass(frozen=True, eq=False)
class Quadrature:
    r"""Sums over a regular grid in place of integrals, in float64.

    .. math:: \int e^{f(x)} \, dx \approx h_1 \cdots h_d \sum_i e^{f(x_i)}

    For a smooth density that vanishes at the grid's ends the error of the sums falls faster than every power of the step.
    Samples are uniform in the cell around a grid point, which adds h^2 / 12 to each variance.

    Example:
        >>> grid = Quadrature.over(lambda x: -x[:, 0].square() / 2, (-12.0, 12.0, 0.1))
        >>> round(grid.log_integral - math.log(2 * math.pi) / 2, 12)
        0.0
        >>> [round(value, 12) + 0.0 for value in grid.mean_and_spread(grid.points[:, 0])]
        [0.0, 1.0]
    """

    points: Tensor  # (size, dimension)
    log_density: Tensor  # (size,)
    steps: tuple[float, ...]

    @classmethod
    def over(cls, log_density: Callable[[Tensor], Tensor], *axes: tuple[float, float, float]) -> "Quadrature":
        """The density on the product of axes, each (first, last, step)."""
        lines = [
            first + step * torch.arange(round((last - first) / step) + 1, dtype=torch.float64, device="cpu")
            for first, last, step in axes
        ]
        points = torch.cartesian_prod(*lines).view(-1, len(axes))
        with torch.no_grad():
            return cls(points, log_density(points), tuple(step for _, _, step in axes))

    @property
    def log_integral(self) -> float:
        return float(self.log_density.logsumexp(0)) + math.log(math.prod(self.steps))

    def mean_and_spread(self, mean: Tensor, variance: Tensor | float = 0.0) -> tuple[float, float]:
        """The mean and standard deviation of a variable whose mean and variance given the grid point are known."""
        weights = self.log_density.softmax(0)
        centre = (weights * mean).sum()
        return float(centre), float((weights * ((mean - centre).square() + variance)).sum().sqrt())

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n independent samples, (n, dimension)."""
        device = device_of(generator)
        cumulative = self.log_density.to(device).softmax(0).cumsum(0)
        level = torch.rand(n, generator=generator, dtype=torch.float64, device=device) * cumulative[-1]
        cell = torch.searchsorted(cumulative, level, right=True).clamp(max=len(cumulative) - 1)
        within = torch.rand(n, len(self.steps), generator=generator, dtype=torch.float64, device=device) - 0.5
        return self.points.to(device)[cell] + within * within.new_tensor(self.steps)
