"""A user's own log-density as a target."""

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.targets.target import Target, Window, check_shape, same_dimension, what, whole


class Custom(Target):
    r"""A user's own log-density f, as a function or any other callable.

    If it has attributes `dimension`, `log_normaliser`, `window`, `sample`, `quantities` or `reference`, they are used, with
    the meaning they have in `Target`; a function can have attributes, too.

    Example:
        >>> target = Custom(lambda x: -x.square().sum(-1) / 2, dimension=3)
        >>> target(torch.ones(2, 3))
        tensor([-1.5000, -1.5000])
        >>> Custom(torch.sum)
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: sum: how many dimensions does it have? give --dimension N, or the function an attribute dimension
    """

    def __init__(self, function: Callable[[Tensor], Tensor], dimension: int | None = None, name: str | None = None) -> None:
        self.function = function
        self.name = name if name is not None else str(getattr(function, "__name__", type(function).__name__))
        own = getattr(function, "dimension", None)
        if dimension is None and own is None:
            raise DohyoError(
                f"{self.name}: how many dimensions does it have? give --dimension N, or the function an attribute dimension"
            )
        self.dimension = whole(f"{self.name}: its dimension", own if dimension is None else dimension)
        same_dimension(self.name, self.dimension, own)
        self._log_normaliser = self._number("log_normaliser")
        self._window = self._read_window()
        for attribute, arguments in {"sample": ("n", "generator"), "quantities": ("x",), "reference": ()}.items():
            self._takes(attribute, arguments)

    def __call__(self, x: Tensor) -> Tensor:
        try:
            log_p = self.function(x)
        except Exception as error:  # a user's function may raise anything, at the first draws or after an hour
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DohyoError(f"{self.name} raised {line} at x {tuple(x.shape)}") from error
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
        draws = own(n, generator) if own is not None else None
        if draws is None:
            return None
        if not isinstance(draws, Tensor) or draws.shape != (n, self.dimension):
            raise DohyoError(f"{self.name}: sample({n}) gave {what(draws)}; it must be a tensor ({n}, {self.dimension})")
        return draws.detach().double()

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

    def reference(self) -> dict[str, tuple[float, float]] | None:
        own = getattr(self.function, "reference", None)
        values = own() if own is not None else None
        if values is None:
            return None
        try:
            return {str(key): (float(mean), float(spread)) for key, (mean, spread) in values.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise DohyoError(f"{self.name}: reference must give a dict from names to (mean, standard deviation)") from error

    def _number(self, attribute: str) -> float | None:
        value = getattr(self.function, attribute, None)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not math.isfinite(number):
            raise DohyoError(f"{self.name}: its {attribute} is {value!r}; it must be a finite number, or None where not known")
        return number

    def _read_window(self) -> Window | None:
        value = getattr(self.function, "window", None)
        if value is None:
            return None
        try:
            (left, right), (bottom, top) = ((float(low), float(high)) for low, high in value)
        except (TypeError, ValueError) as error:
            raise DohyoError(f"{self.name}: its window is {value!r}; write ((left, right), (bottom, top)), or None") from error
        return (left, right), (bottom, top)

    def _takes(self, attribute: str, arguments: tuple[str, ...]) -> None:
        method = getattr(self.function, attribute, None)
        if method is None:
            return
        wanted = f"{attribute}({', '.join(arguments)})"
        if not callable(method):
            raise DohyoError(f"{self.name}: its {attribute} is {what(method)}; it must be a function {wanted}")
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise DohyoError(f"{self.name}: its {attribute} does not take these arguments; write {wanted}") from error
        except ValueError:  # a builtin without a signature
            return
