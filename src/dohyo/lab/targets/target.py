"""What a target is, a user's own log-density as one, and whether it is fit for reverse KL, before an hour is spent on it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError, in_one_line, reporting, whole

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


class Custom(Target):
    r"""A user's own log-density f, as a function or any other callable.

    Its attributes `dimension`, `log_normaliser`, `window`, `sample`, `quantities` and `reference` are used if it has them, with
    the same meaning as in `Target`; functions can have attributes, too.

    Example:
        >>> target = Custom(lambda x: -x.square().sum(-1) / 2, dimension=3)
        >>> target(torch.ones(2, 3))
        tensor([-1.5000, -1.5000])
        >>> Custom(torch.sum)
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: sum: how many dimensions does it have? give --dimension N, or its attribute dimension
    """

    def __init__(self, function: Callable[[Tensor], Tensor], dimension: int | None = None, name: str | None = None) -> None:
        self.function = function
        self.name = name if name is not None else str(getattr(function, "__name__", type(function).__name__))
        own = getattr(function, "dimension", None)
        if dimension is None and own is None:
            raise DohyoError(f"{self.name}: how many dimensions does it have? give --dimension N, or its attribute dimension")
        self.dimension = whole(f"{self.name}: its dimension", own if dimension is None else dimension)
        same_dimension(self.name, self.dimension, own)
        self._log_normaliser: float | None = self._own("log_normaliser", _finite, "a finite number")
        self._window: Window | None = self._own("window", _window, "((left, right), (bottom, top))")

    def __call__(self, x: Tensor) -> Tensor:
        with reporting(f"{self.name} raised {{}} at x {tuple(x.shape)}"):
            log_p = self.function(x)
        check_shape(self.name, log_p, x)
        return log_p

    @property
    def log_normaliser(self) -> float | None:
        return self._log_normaliser

    @property
    def window(self) -> Window | None:
        return self._window

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor | None:
        own = getattr(self.function, "sample", None)
        x = own(n, generator) if own is not None else None
        if x is None:
            return None
        if not isinstance(x, Tensor) or x.shape != (n, self.dimension):
            raise DohyoError(f"{self.name}: sample({n}) gave {what(x)}; it must be a tensor ({n}, {self.dimension})")
        return x.detach().double()

    def quantities(self, x: Tensor) -> dict[str, Tensor]:
        own = getattr(self.function, "quantities", None)
        if own is None:
            return super().quantities(x)
        values = own(x)
        if not isinstance(values, dict):
            raise DohyoError(f"{self.name}: quantities gave {what(values)}; it must be a dict of tensors ({len(x)},)")
        for key, value in values.items():
            if not isinstance(value, Tensor) or value.shape != (len(x),):
                raise DohyoError(f"{self.name}: the quantity {key!r} is {what(value)}; it must be a tensor ({len(x)},)")
        return values

    def reference(self) -> Moments | None:
        own = getattr(self.function, "reference", None)
        values = own() if own is not None else None
        if values is None:
            return None
        try:
            return {str(key): (float(mean), float(spread)) for key, (mean, spread) in values.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise DohyoError(f"{self.name}: reference must give a dict from names to (mean, standard deviation)") from error

    def _own(self, attribute: str, convert: Callable[[Any], Any], needed: str) -> Any:
        """The function's attribute, if it has it."""
        value = getattr(self.function, attribute, None)
        try:
            return None if value is None else convert(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DohyoError(f"{self.name}: its {attribute} is {value!r}; it must be {needed}, or None if unknown") from error


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError
    return float(value)


def _window(value: Any) -> Window:
    (left, right), (bottom, top) = ((float(low), float(high)) for low, high in value)
    return (left, right), (bottom, top)


def check(target: Target, x: Tensor) -> None:
    """Evaluate a target and its gradient once, and say in one line what is wrong with them.

    A log-density of -inf is a density of zero, which is allowed at some of the points but not at all of them. What else the
    target offers, such as samples, is tried as well: better now than after the training.

    Args:
        x: Points such as a model samples at first, (n, dimension).

    Example:
        >>> from dohyo.lab.targets import Custom, Funnel
        >>> check(Funnel(), torch.randn(10, 2))
        >>> check(Custom(lambda x: -x.square(), dimension=2, name="mine"), torch.randn(10, 2))
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: mine gave a float32 tensor (10, 2); it must be a tensor (10,), one log-density for each row of x: ...
    """
    name = target.name
    if x.ndim != 2 or x.shape[1] != target.dimension or len(x) == 0 or not x.is_floating_point():
        raise DohyoError(f"x is {what(x)}; {name} needs floating-point numbers (n, {target.dimension})")
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        with reporting(f"{name} raised {{}} at x {tuple(x.shape)}"):
            log_p = target(x)
        check_shape(name, log_p, x)
        _check_values(name, log_p, x)
        _check_gradient(name, log_p, x)
    x, generator = x.detach(), torch.Generator().manual_seed(0)
    calls: dict[str, Callable[[], object]] = {
        "quantities(x)": lambda: target.quantities(x),
        "sample(n, generator)": lambda: target.sample(2, generator),
        "reference()": target.reference,
    }
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a sampler that ignores the generator leaves no trace
        for method, call in calls.items():
            with reporting(f"{name}: its {method} raised {{}}"):
                call()


def check_shape(name: str, log_p: object, x: Tensor) -> None:
    """An error unless `log_p` is a tensor with one number for each row of x."""
    if not isinstance(log_p, Tensor) or log_p.shape != (len(x),):
        raise DohyoError(
            f"{name} gave {what(log_p)}; it must be a tensor ({len(x)},), one log-density for each row of x: sum over x's last "
            "axis only, as in .sum(-1)"
        )


def what(value: object) -> str:
    """A value's type, for an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _check_values(name: str, log_p: Tensor, x: Tensor) -> None:
    if not log_p.is_floating_point():
        raise DohyoError(f"{name} gave {what(log_p)}; log-densities must be floating-point numbers, with a gradient")
    if log_p.device != x.device:
        raise DohyoError(f"{name} gave a tensor on {log_p.device} for x on {x.device}; make its constants on x.device")
    for bad, word in ((log_p.isnan(), "NaN"), (log_p == torch.inf, "+inf")):
        if bool(bad.any()):
            raise DohyoError(f"{name} is {word} at {where(bad, x)}; it must be a number, or -inf where the density is zero")
    if bool((log_p == -torch.inf).all()):
        raise DohyoError(f"{name} is -inf at {where(log_p == -torch.inf, x)}; move or scale it to where a model starts")


def _check_gradient(name: str, log_p: Tensor, x: Tensor) -> None:
    gradient = None
    if log_p.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(log_p.sum(), x, allow_unused=True)
        except RuntimeError as error:
            raise DohyoError(f"{name} cannot be differentiated: {in_one_line(error)}") from error
    if gradient is None:
        raise DohyoError(
            f"{name} has no gradient; compute it from x with torch operations alone: no .detach(), .item(), .numpy(), "
            "integers or torch.no_grad()"
        )
    bad = ~gradient.isfinite().all(1)
    if bool(bad.any()):
        raise DohyoError(
            f"{name} has a gradient that is NaN or infinite at {where(bad, x)}; both branches of a torch.where must be finite, "
            "and sqrt, log and norm have no gradient at zero"
        )


def where(bad: Tensor, x: Tensor, what: str = "points") -> str:
    """How many of x are bad, and the first of them, for an error message."""
    point = x[bad][0].tolist()
    shown = ", ".join(f"{value:.4g}" for value in point[:4]) + (", ..." if len(point) > 4 else "")
    return f"{int(bad.sum())} of {len(x)} {what}, such as x = ({shown})"


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
