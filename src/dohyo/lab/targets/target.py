"""What a target is: a log-density up to a constant, with its normaliser, draws and moments where they are known."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError

Window = tuple[tuple[float, float], tuple[float, float]]


class Target(ABC):
    r"""A density p* known up to a constant, from which reverse-KL inference learns.

    .. math:: p^*(x) = e^{f(x)} / Z, \qquad Z = \int e^{f(x)} \, dx

    Calling a target gives f, one value for each row of x, differentiable, in x's dtype and on x's device. Everything else
    is for looking at the result, and may be unknown.

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
        """log Z, or None where it is not known."""
        return None

    @property
    def window(self) -> Window | None:
        """((left, right), (bottom, top)) of a picture in two dimensions, or None."""
        return None

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor | None:
        """n independent draws, (n, dimension) float64 on the generator's device, or None where nobody knows how."""
        return None

    def quantities(self, x: Tensor) -> dict[str, Tensor]:
        """What a user wants moments of, by name, each (n,)."""
        return {f"x{i + 1}": column for i, column in enumerate(x.unbind(1))}

    def reference(self) -> dict[str, tuple[float, float]] | None:
        """The exact mean and standard deviation of each of `quantities`, or None where they are not known."""
        return None


def same_dimension(name: str, dimension: int, other: int | None) -> None:
    """A ValueError where a target's own dimension and the one that was asked for differ."""
    if other is not None and other != dimension:
        raise DohyoError(f"{name}: --dimension {dimension} and its own dimension, {other!r}, differ; leave out --dimension")


def what(value: object) -> str:
    """What came, for an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def check_shape(name: str, log_p: object, x: Tensor) -> None:
    """A ValueError unless `log_p` is one number for each row of x."""
    needed = f"it must be ({len(x)},), one log-density for each row of x {tuple(x.shape)}"
    if not isinstance(log_p, Tensor):
        raise DohyoError(f"{name} gave {what(log_p)}; it must be a tensor ({len(x)},), one log-density for each row of x")
    if log_p.shape != (len(x),):
        raise DohyoError(f"{name} gave {what(log_p)}; {needed}: sum over x's last axis alone, as in .sum(-1)")


def positive(**values: float) -> None:
    """A ValueError unless all of these are finite and more than 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise DohyoError(f"{name} is {value!r}; it must be finite and more than 0")


def log_gaussian(x: Tensor, mean: Tensor | float, log_scale: Tensor | float) -> Tensor:
    """log N(x; mean, exp(log_scale)^2)."""
    shrink = torch.exp(-log_scale) if isinstance(log_scale, Tensor) else math.exp(-log_scale)
    return -0.5 * ((x - mean) * shrink).square() - log_scale - 0.5 * math.log(2 * math.pi)


def gaussian_noise(n: int, dimension: int, generator: torch.Generator | None) -> Tensor:
    """(n, dimension) standard Gaussian numbers in float64 on the generator's device."""
    return torch.randn(n, dimension, generator=generator, dtype=torch.float64, device=device_of(generator))


def device_of(generator: torch.Generator | None) -> torch.device:
    """The generator's device, or the processor."""
    return generator.device if generator is not None else torch.device("cpu")


def whole(name: str, value: Any) -> int:
    """A whole number from 1, or a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DohyoError(f"{name} is {value!r}; it must be a whole number from 1")
    return value
