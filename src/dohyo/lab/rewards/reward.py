"""What a reward is, and a user's own function as one."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError, reporting, whole
from dohyo.names import users_function


class Reward(ABC):
    """R(x) on {0, 1}^d, to be maximised.

    Attributes:
        name: For messages and tables.
        variables: d.
        tolerance: Differences of rewards up to this are rounding; 0 for whole numbers, and for a user's own function.
    """

    name: str
    variables: int
    tolerance: float = 0.0

    @property
    def maximum(self) -> float | int | None:
        """The best known value of R, or None."""
        return None

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """(n, d) of 0 and 1, of any dtype and device -> (n,), int64 or float64 on the same device, without a gradient."""

    def check(self, x: Tensor) -> None:
        """An error if x is not (n, d) of 0 and 1."""
        if x.ndim != 2 or x.shape[1] != self.variables or x.is_complex():
            raise DohyoError(f"x is {x.dtype} {tuple(x.shape)}; {self.name} needs (n, {self.variables}), one row for each x")
        if x.dtype != torch.bool and not bool(((x == 0) | (x == 1)).all()):
            raise DohyoError(f"x holds other values than 0 and 1; {self.name} is a function of bits: round or threshold x")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, variables={self.variables})"


class Custom(Reward):
    """A vectorised function x (n, d) -> (n,) of bits, whose every result is checked.

    The function gets a copy of x in x's own dtype, float 0 and 1 from a policy, and no gradient is recorded. Larger is
    better. NaN and infinities are errors: give an x that is not allowed a low finite reward. Integers are returned as int64,
    floats as float64.

    Args:
        function: It may be noisy; each row must depend on its own x alone.
        variables: d.
        name: For messages; the function's own name unless given.

    Example:
        >>> ones = Custom(lambda x: x.sum(1), variables=3, name="ones")
        >>> ones(torch.tensor([[0, 1, 1], [0, 0, 0]]))
        tensor([2, 0])
    """

    def __init__(self, function: Callable[[Tensor], Any], variables: int, name: str | None = None) -> None:
        if not callable(function):
            raise DohyoError(f"the reward is a {type(function).__name__}; it must be a function of a tensor (n, d)")
        self.function = function
        self.variables = whole("variables", variables)
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        self.check(x)
        called = f"{self.name}, called with {x.dtype} {tuple(x.shape)},"
        with reporting(f"{called} raised {{}}"):
            value = self.function(x.detach().clone())  # a copy, because the function may write into it
        needed = f"it must return a tensor of shape ({len(x)},), one finite number for each row of x"
        if not isinstance(value, Tensor):
            raise DohyoError(f"{called} returned a {type(value).__name__}; {needed}: see torch.as_tensor")
        if value.shape != (len(x),) or value.is_complex():
            raise DohyoError(f"{called} returned {value.dtype} {tuple(value.shape)}; {needed}")
        value = value.detach().to(x.device, torch.float64 if value.is_floating_point() else torch.int64)
        wrong = (~value.isfinite()).nonzero().flatten()
        if len(wrong):
            raise DohyoError(
                f"{called} returned {float(value[wrong[0]])} for row {int(wrong[0]) + 1} ({len(wrong)} rows are not finite); "
                "give an x that is not allowed a low finite reward"
            )
        return value


def reward(function: str | Callable[[Tensor], Any], variables: int) -> Custom:
    """A user's function as a reward, tried on a few random x so that errors show before the work begins.

    Args:
        function: A callable x (n, d) -> (n,), or `package.module:function`, for which the current folder is searched first.
        variables: d.

    Example:
        >>> reward(lambda x: x.sum(), variables=3)
        Traceback (most recent call last):
        dohyo.DohyoError: <lambda>, called with torch.float32 (4, 3), returned torch.float32 (); it must return a tensor of ...
    """
    made = Custom(users_function(function), variables, function) if isinstance(function, str) else Custom(function, variables)
    bits = torch.randint(2, (4, variables), generator=torch.Generator().manual_seed(0)).float()
    made(bits)
    made(bits[:1])
    return made
