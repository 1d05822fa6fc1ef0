"""Targets about which everything is known: a funnel, a banana, separated modes and a ring in two dimensions, and a sequence."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from dohyo.errors import whole
from dohyo.lab.targets.target import Moments, Target, Window, device_of, gaussian_noise, log_gaussian, positive


class Conditional(Target):
    """x1 ~ N(0, scale^2), and a Gaussian x2 whose mean and log standard deviation depend on x1."""

    scale: float
    dimension = 2
    log_normaliser = 0.0

    @abstractmethod
    def given(self, x1: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the log standard deviation of x2."""

    def __post_init__(self) -> None:
        positive(scale=self.scale)

    def __call__(self, x: Tensor) -> Tensor:
        x1, x2 = x.unbind(1)
        return log_gaussian(x1, 0.0, math.log(self.scale)) + log_gaussian(x2, *self.given(x1))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise1, noise2 = gaussian_noise(n, 2, generator).unbind(1)
        mean, log_scale = self.given(self.scale * noise1)
        return torch.stack([self.scale * noise1, mean + log_scale.exp() * noise2], 1)


@dataclass(frozen=True)
class Funnel(Conditional):
    r"""The paper's funnel: the standard deviation of the second coordinate is the exponential of the first.

    .. math:: p^*(x) = N(x_1; 0, s^2) \, N(x_2; 0, e^{2 x_1}), \qquad s = 1.35

    References:
        Neal, Slice Sampling, 2003, section 8, in two dimensions as in the SUMO paper, section 6.2.

    Example:
        >>> round(Funnel().reference()["x2"][1], 3)
        6.187
    """

    scale: float = 1.35
    name = "funnel"

    @property
    def window(self) -> Window:
        return (-3 * self.scale, 2.5 * self.scale), (-8.0, 8.0)

    def given(self, x1: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x1), x1

    def reference(self) -> Moments:
        return {"x1": (0.0, self.scale), "x2": (0.0, math.exp(self.scale**2))}  # E e^(2 x1) = e^(2 s^2)


@dataclass(frozen=True)
class Banana(Conditional):
    r"""A Gaussian bent along a parabola.

    .. math:: p^*(x) = N(x_1; 0, s^2) \, N(x_2; b (x_1^2 - s^2), 1)

    References:
        Haario, Saksman and Tamminen, Adaptive proposal distribution for random walk Metropolis algorithm, 1999.

    Example:
        >>> Banana().reference()
        {'x1': (0.0, 2.0), 'x2': (0.0, 3.0)}
    """

    scale: float = 2.0
    bend: float = 0.5
    name = "banana"

    @property
    def window(self) -> Window:
        ends = sorted([self.bend * 8 * self.scale**2, -self.bend * self.scale**2])  # at three standard deviations, at zero
        return (-3 * self.scale, 3 * self.scale), (ends[0] - 3, ends[1] + 1)

    def given(self, x1: Tensor) -> tuple[Tensor, Tensor]:
        return self.bend * (x1.square() - self.scale**2), torch.zeros_like(x1)

    def reference(self) -> Moments:
        return {"x1": (0.0, self.scale), "x2": (0.0, math.sqrt(1 + 2 * self.bend**2 * self.scale**4))}


@dataclass(frozen=True)
class Mixture(Target):
    r"""Equal Gaussians on a circle, so distant from each other that a model which misses one never learns of it.

    .. math:: p^*(x) = \frac1M \sum_{j=1}^M N(x; r (\cos 2 \pi j / M, \sin 2 \pi j / M), s^2 I)

    By default the distance between neighbours is six standard deviations.

    Example:
        >>> target = Mixture()
        >>> (target(target.sample(1000)) > target(torch.zeros(1, 2))).all().item()
        True
    """

    modes: int = 8
    radius: float = 4.0
    scale: float = 0.5
    name = "mixture"
    dimension = 2
    log_normaliser = 0.0

    def __post_init__(self) -> None:
        whole("modes", self.modes)
        positive(radius=self.radius, scale=self.scale)

    @property
    def window(self) -> Window:
        edge = self.radius + 4 * self.scale
        return (-edge, edge), (-edge, edge)

    def __call__(self, x: Tensor) -> Tensor:
        log_each = log_gaussian(x[:, None, :], self._centres(x), math.log(self.scale)).sum(-1)
        return log_each.logsumexp(1) - math.log(self.modes)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        noise = gaussian_noise(n, 2, generator)
        mode = torch.randint(self.modes, (n,), generator=generator, device=noise.device)
        return self._centres(noise)[mode] + self.scale * noise

    def reference(self) -> Moments:
        centres = self._centres(torch.zeros((), dtype=torch.float64))
        mean, spread = centres.mean(0), (centres.var(0, correction=0) + self.scale**2).sqrt()
        return {f"x{i + 1}": (float(mean[i]), float(spread[i])) for i in range(2)}

    def _centres(self, like: Tensor) -> Tensor:
        angles = [2 * math.pi * j / self.modes for j in range(1, self.modes + 1)]
        return like.new_tensor([[self.radius * math.cos(angle), self.radius * math.sin(angle)] for angle in angles])


@dataclass(frozen=True)
class Ring(Target):
    r"""A ring of radius r and width about w, smooth everywhere, also at its centre.

    .. math:: f(x) = -\frac12 \Big( \frac{|x|^2 - r^2}{2 r w} \Big)^2,
              \qquad Z = \pi \, c \sqrt{2 \pi} \, \Phi(r^2 / c), \quad c = 2 r w

    The squared radius is a Gaussian N(r^2, c^2) truncated at zero, because equal steps of it are equal areas.

    Example:
        >>> round(Ring().log_normaliser, 4)
        2.6515
    """

    radius: float = 3.0
    width: float = 0.3
    name = "ring"
    dimension = 2

    def __post_init__(self) -> None:
        positive(radius=self.radius, width=self.width)

    @property
    def log_normaliser(self) -> float:
        return math.log(math.pi * self._spread * math.sqrt(2 * math.pi) * (1 - self._cut_off))

    @property
    def window(self) -> Window:
        edge = self.radius + 5 * self.width
        return (-edge, edge), (-edge, edge)

    def __call__(self, x: Tensor) -> Tensor:
        return -0.5 * ((x.square().sum(-1) - self.radius**2) / self._spread).square()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        level, turn = torch.rand(2, n, generator=generator, dtype=torch.float64, device=device_of(generator))
        standard = torch.special.ndtri(self._cut_off + (1 - self._cut_off) * level)
        radius = (self.radius**2 + self._spread * standard).clamp(min=0).sqrt()
        angle = 2 * math.pi * turn
        return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

    def reference(self) -> Moments:
        start = self.radius**2 / self._spread
        at_zero = math.exp(-(start**2) / 2) / math.sqrt(2 * math.pi)
        squared_radius = self.radius**2 + self._spread * at_zero / (1 - self._cut_off)
        return dict.fromkeys(["x1", "x2"], (0.0, math.sqrt(squared_radius / 2)))

    @property
    def _spread(self) -> float:
        return 2 * self.radius * self.width

    @property
    def _cut_off(self) -> float:
        """The share of N(r^2, c^2) below zero."""
        return math.erfc(self.radius**2 / self._spread / math.sqrt(2)) / 2


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
