"""What a target is: a log-density up to a constant, with its normaliser, samples and moments if they are known."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dohyo.errors import DohyoError

Window = tuple[tuple[float, float], tuple[float, float]]
Moments = dict[str, tuple[float, float]]  # mean and standard deviation of each quantity


class Target(ABC):
    r"""A density p* known up to a constant, to which reverse-KL inference fits a model.

    .. math:: p^*(x) = e^{f(x)} / Z, \qquad Z = \int e^{f(x)} \, dx

    Calling a target gives f, one value for each row of x, differentiable, with x's dtype and device. Everything else serves to
    judge the result, and may be unknown.

    Example:
        >>> class Exponential(Target):
        ...     name, dimension = "log-exponential", 1  # the logarithm of an exponential variable
        ...     def __call__(self, x):
        ...         return x[:, 0] - x[:, 0].exp()
        >>> Exponential()(torch.zeros(2, 1))
        tensor([-1., -1.])
        >>> Exponential().sample(3) is None
        True
    """

    name: str = "unnamed"
    dimension: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """f(x): (n, dimension) to (n,)."""

    @property
    def log_normaliser(self) -> float | None:
        """log Z, or None if it is not known."""
        return None

    @property
    def window(self) -> Window | None:
        """((left, right), (bottom, top)) of a picture in two dimensions, or None."""
        return None

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor | None:
        """n independent samples, (n, dimension) float64 on the generator's device, or None if there is no way to draw them."""
        return None

    def quantities(self, x: Tensor) -> dict[str, Tensor]:
        """The quantities whose moments are of interest, by name, each (n,)."""
        return {f"x{i + 1}": column for i, column in enumerate(x.unbind(1))}

    def reference(self) -> Moments | None:
        """The exact mean and standard deviation of each of `quantities`, or None if they are not known."""
        return None


def same_dimension(name: str, dimension: int, own: int | None) -> None:
    """An error if a target's own dimension is not the one asked for."""
    if own is not None and own != dimension:
        raise DohyoError(f"{name}: --dimension {dimension} and its own dimension, {own!r}, differ; leave out --dimension")


def positive(**values: float) -> None:
    """An error unless all of these are finite and greater than 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise DohyoError(f"{name} is {value!r}; it must be finite and greater than 0")


def log_gaussian(x: Tensor, mean: Tensor | float, log_scale: Tensor | float) -> Tensor:
    """log N(x; mean, exp(log_scale)^2)."""
    shrink = torch.exp(-log_scale) if isinstance(log_scale, Tensor) else math.exp(-log_scale)
    return -0.5 * ((x - mean) * shrink).square() - log_scale - 0.5 * math.log(2 * math.pi)


def gaussian_noise(n: int, dimension: int, generator: torch.Generator | None) -> Tensor:
    """(n, dimension) standard Gaussian numbers in float64 on the generator's device."""
    return torch.randn(n, dimension, generator=generator, dtype=torch.float64, device=device_of(generator))


def device_of(generator: torch.Generator | None) -> torch.device:
    """The generator's device, or the CPU."""
    return generator.device if generator is not None else torch.device("cpu")
