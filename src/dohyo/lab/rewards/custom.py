"""A user's own function as a reward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.rewards.reward import Reward
from dohyo.names import users_function


class Custom(Reward):
    """A vectorised function x (n, d) -> (n,) on bits, whose every answer is checked.

    The function gets a copy of x in x's own dtype, float 0 and 1 from a policy, and no gradient is recorded. Larger is
    better. NaN and infinities are errors: give an x that is not allowed a low finite reward. Integers come out as int64,
    floats as float64.

    Args:
        function: It may be noisy; that each row depends on its own x alone is up to it.
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
        if variables < 1:
            raise DohyoError(f"variables is {variables}; it must be at least 1")
        self.function = function
        self.variables = variables
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        self.check(x)
        try:
            value = self.function(x.detach().clone())  # a copy, for the function may write into it
        except Exception as error:  # a user's function may raise anything
            reason = " ".join(str(error).split())
            raise DohyoError(f"{self._called_with(x)} raised {type(error).__name__}: {reason}") from error
        return self._checked(value, x)

    def try_out(self) -> None:
        """Call the function with four random x and with one alone, so that a wrong one is found before the work begins."""
        bits = torch.randint(2, (4, self.variables), generator=torch.Generator().manual_seed(0)).float()
        self(bits)
        self(bits[:1])

    def _checked(self, came: object, x: Tensor) -> Tensor:
        needed = f"it must return a tensor of shape ({len(x)},), one finite number for each row of x"
        if not isinstance(came, Tensor):
            raise DohyoError(f"{self._called_with(x)} returned a {type(came).__name__}; {needed}: see torch.as_tensor")
        if came.shape != (len(x),) or came.is_complex():
            raise DohyoError(f"{self._called_with(x)} returned {came.dtype} {tuple(came.shape)}; {needed}")
        value = came.detach().to(x.device, torch.float64 if came.is_floating_point() else torch.int64)
        wrong = (~value.isfinite()).nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            raise DohyoError(
                f"{self._called_with(x)} returned {float(value[first])} for row {first + 1} ({len(wrong)} rows are not finite); "
                "give an x that is not allowed a low finite reward"
            )
        return value

    def _called_with(self, x: Tensor) -> str:
        return f"{self.name}, called with {x.dtype} {tuple(x.shape)},"


def reward(function: str | Callable[[Tensor], Any], variables: int) -> Custom:
    """A user's function as a reward, tried out on a few random x.

    Args:
        function: A callable x (n, d) -> (n,), or its `package.module:function`, looked for in the current folder first.
        variables: d.

    Example:
        >>> reward(lambda x: x.sum(), variables=3)
        Traceback (most recent call last):
        ValueError: <lambda>, called with torch.float32 (4, 3), returned torch.float32 (); it must return a tensor of ...
    """
    if isinstance(function, str):
        made = Custom(users_function(function), variables, function)
    else:
        made = Custom(function, variables)
    made.try_out()
    return made
