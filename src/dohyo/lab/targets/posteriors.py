"""Posteriors of two small real data sets, with exact moments: a logistic regression and the eight schools."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from dohyo.lab.targets.target import Moments, Target, Window, device_of, gaussian_noise, log_gaussian

# The 23 launches before Challenger's: degrees Fahrenheit, and whether an O-ring showed distress.
TEMPERATURE = (66, 70, 69, 68, 67, 72, 73, 70, 57, 63, 70, 78, 67, 53, 67, 75, 70, 81, 76, 79, 75, 76, 58)
DISTRESS = (0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1)
# The effects of coaching in eight schools, and their standard errors.
EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)
PRIOR_SCALE = 5.0  # of intercept and slope, and of mu and tau


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


class EightSchools(Target):
    r"""Eight schools, non-centred: x = (mu, log tau, eta_1 .. eta_8) with theta_j = mu + tau eta_j.

    .. math:: f(x) = \log N(\mu; 0, 5^2) + \log C^+(\tau; 5) + \log \tau
              + \sum_j \log N(\eta_j; 0, 1) + \log N(y_j; \mu + \tau \eta_j, \sigma_j^2)

    The log tau is the Jacobian of tau = exp(x_2), and C+ is the half-Cauchy density. Centred, x = (mu, log tau, theta_1 ..
    theta_8), which is a funnel in log tau: N(eta_j; 0, 1) becomes N(theta_j; mu, tau^2). The normaliser is the marginal
    likelihood of the eight effects, with every constant. Given tau everything is Gaussian, so only the integral over log tau
    remains, which is computed on a grid.

    References:
        Rubin, Estimation in parallel randomized experiments, 1981; Gelman et al., Bayesian Data Analysis, section 5.5; the
        priors are those of Stan's and of posteriordb's model. Betancourt and Girolami, Hamiltonian Monte Carlo for
        hierarchical models, 2015, on why the centred one is harder.

    Example:
        >>> target = EightSchools()
        >>> round(target.log_normaliser, 4), EightSchools(centred=True).log_normaliser == target.log_normaliser
        (-31.3113, True)
        >>> [round(value, 2) for value in target.reference()["tau"]]
        [3.6, 3.22]
    """

    dimension = 10

    def __init__(self, centred: bool = False) -> None:
        self.centred = centred
        self.name = "eight-schools-centred" if centred else "eight-schools"

    def effects(self, x: Tensor) -> Tensor:
        """theta, (n, 8)."""
        return x[:, 2:] if self.centred else x[:, :1] + x[:, 1:2].exp() * x[:, 2:]

    def __call__(self, x: Tensor) -> Tensor:
        mu, log_tau = x[:, :1], x[:, 1:2]
        log_likelihood = log_gaussian(x.new_tensor(EFFECTS), self.effects(x), x.new_tensor(ERRORS).log()).sum(-1)
        log_schools = log_gaussian(x[:, 2:], *((mu, log_tau) if self.centred else (0.0, 0.0))).sum(-1)
        return log_gaussian(mu[:, 0], 0.0, math.log(PRIOR_SCALE)) + _log_prior(log_tau[:, 0]) + log_schools + log_likelihood

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """tau from a fine grid in log tau (with steps of 0.01), then mu and theta given tau exactly."""
        log_tau = self._posterior.sample(n, generator)
        noise = gaussian_noise(n, 9, generator)
        mean, precision = _mu_given_tau(log_tau)
        mu = mean[:, None] + noise[:, :1] / precision[:, None].sqrt()
        tau, variance = log_tau.exp(), noise.new_tensor(ERRORS).square()
        total = variance + tau.square()
        eta = tau * (noise.new_tensor(EFFECTS) - mu) / total + (variance / total).sqrt() * noise[:, 1:]
        return torch.cat([mu, log_tau, mu + tau * eta if self.centred else eta], 1)

    def quantities(self, x: Tensor) -> dict[str, Tensor]:
        theta = {f"theta{i + 1}": column for i, column in enumerate(self.effects(x).unbind(1))}
        return {"mu": x[:, 0], "tau": x[:, 1].exp(), **theta}

    @cached_property
    def log_normaliser(self) -> float:
        return self._posterior.log_integral

    def reference(self) -> Moments:
        """The exact posterior mean and standard deviation of mu, tau and each theta."""
        log_tau = self._posterior.points
        mean, precision = _mu_given_tau(log_tau)
        moments = {
            "mu": self._posterior.mean_and_spread(mean, 1 / precision),
            "tau": self._posterior.mean_and_spread(log_tau[:, 0].exp()),
        }
        for i, (effect, error) in enumerate(zip(EFFECTS, ERRORS, strict=True)):
            own = 1 / (1 + error**2 * (-2 * log_tau[:, 0]).exp())  # the weight of a school's own effect against mu
            moments[f"theta{i + 1}"] = self._posterior.mean_and_spread(
                own * effect + (1 - own) * mean, (1 - own).square() / precision + own * error**2
            )
        return moments

    @cached_property
    def _posterior(self) -> Quadrature:
        """The posterior of log tau. Its density falls as tau on the left and as tau^-9 on the right, to 1e-15 at these ends."""
        return Quadrature.over(_log_joint, (-35.0, 8.0, 0.01))


def _log_prior(log_tau: Tensor) -> Tensor:
    """The density of log tau where tau is half-Cauchy: (2 / pi) v / (1 + v^2) at v = tau / 5, for tau of any size."""
    log_v = log_tau - math.log(PRIOR_SCALE)
    return math.log(2 / math.pi) + log_v - softplus(2 * log_v)


def _mu_given_tau(log_tau: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and precision, (n,), of mu given the data and tau, from log tau (n, 1)."""
    weights = 1 / (log_tau.new_tensor(ERRORS).square() + (2 * log_tau).exp())
    precision = weights.sum(-1) + PRIOR_SCALE**-2
    return (weights * log_tau.new_tensor(EFFECTS)).sum(-1) / precision, precision


def _log_joint(log_tau: Tensor) -> Tensor:
    """log p(log tau, y) = log p(log tau, y, mu) - log p(mu | tau, y), at the mu where the latter is largest."""
    mean, precision = _mu_given_tau(log_tau)
    log_total = (log_tau.new_tensor(ERRORS).square() + (2 * log_tau).exp()).log() / 2
    log_likelihood = log_gaussian(log_tau.new_tensor(EFFECTS), mean[:, None], log_total).sum(-1)
    log_prior = log_gaussian(mean, 0.0, math.log(PRIOR_SCALE)) + _log_prior(log_tau[:, 0])
    return log_prior + log_likelihood - 0.5 * (precision / (2 * math.pi)).log()
