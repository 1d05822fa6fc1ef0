"""Bayesian logistic regression on a small real data set: the O-rings of the space shuttle."""

import math
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dohyo.lab.targets.quadrature import Quadrature
from dohyo.lab.targets.target import Moments, Target, Window, log_gaussian

# The 23 launches before Challenger's: degrees Fahrenheit, and whether an O-ring showed distress.
TEMPERATURE = (66, 70, 69, 68, 67, 72, 73, 70, 57, 63, 70, 78, 67, 53, 67, 75, 70, 81, 76, 79, 75, 76, 58)
DISTRESS = (0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1)
PRIOR_SCALE = 5.0  # of intercept and slope


class ORings(Target):
    r"""The chance of O-ring distress given the temperature at launch: intercept and slope of a logistic regression.

    .. math:: f(a, b) = \log N(a; 0, 5^2) + \log N(b; 0, 5^2) + \sum_i \log \mathrm{sigmoid}(\pm_i (a + b t_i))

    t is the temperature, standardised by its mean and standard deviation (69.6 and 6.9 degrees Fahrenheit; the latter divides
    by 23); the sign is + if there was distress. Challenger was launched at 31 degrees, t = -5.6. The normaliser is the marginal
    likelihood. The moments and samples come from a grid with steps of 0.04 that is computed when first needed.

    References:
        Dalal, Fowlkes and Hoadley, Risk analysis of the space shuttle: pre-Challenger prediction of failure, 1989.

    Example:
        >>> target = ORings()
        >>> round(target.log_normaliser, 4)
        -14.29
        >>> [round(value, 2) for value in target.reference()["slope"]]
        [-1.93, 0.84]
    """

    name = "o-rings"
    dimension = 2

    @property
    def window(self) -> Window:
        return (-4.0, 1.5), (-5.5, 1.0)

    def __call__(self, x: Tensor) -> Tensor:
        intercept, slope = x.unbind(1)
        log_prior = log_gaussian(x, 0.0, math.log(PRIOR_SCALE)).sum(-1)
        mean = sum(TEMPERATURE) / len(TEMPERATURE)
        spread = math.sqrt(sum((value - mean) ** 2 for value in TEMPERATURE) / len(TEMPERATURE))
        temperature = x.new_tensor([(value - mean) / spread for value in TEMPERATURE])
        sign = x.new_tensor([2.0 * distress - 1 for distress in DISTRESS])
        return log_prior + logsigmoid(sign * (intercept[:, None] + slope[:, None] * temperature)).sum(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self._posterior.sample(n, generator)

    def quantities(self, x: Tensor) -> dict[str, Tensor]:
        return {"intercept": x[:, 0], "slope": x[:, 1]}

    @cached_property
    def log_normaliser(self) -> float:
        return self._posterior.log_integral

    def reference(self) -> Moments:
        return {name: self._posterior.mean_and_spread(x) for name, x in self.quantities(self._posterior.points).items()}

    @cached_property
    def _posterior(self) -> Quadrature:
        # The density is below e^-30 of its largest value at these ends.
        return Quadrature.over(self, (-13.0, 6.0, 0.04), (-18.0, 6.0, 0.04))
