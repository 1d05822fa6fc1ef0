"""A user's own log-density as a target."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError, reporting, whole
from dohyo.lab.targets.checks import check_shape, what
from dohyo.lab.targets.target import Moments, Target, Window, same_dimension


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
