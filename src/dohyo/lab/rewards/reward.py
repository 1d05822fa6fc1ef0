"""What a reward is."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dohyo.errors import DohyoError


class Reward(ABC):
    """R(x) on {0, 1}^d, to be maximised.

    Attributes:
        name: What people call it.
        variables: d.
    """

    name: str
    variables: int

    @property
    def maximum(self) -> float | int | None:
        """The best known value of R, None where none is known."""
        return None

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """(n, d) of 0 and 1, of any dtype and device -> (n,), int64 or float64 on the same device, no gradient."""

    def check(self, x: Tensor) -> None:
        """A ValueError if x is not (n, d) of 0 and 1."""
        if x.ndim != 2 or x.shape[1] != self.variables or x.is_complex():
            raise DohyoError(f"x is {x.dtype} {tuple(x.shape)}; {self.name} needs (n, {self.variables}), one row for each x")
        if x.dtype != torch.bool and not bool(((x == 0) | (x == 1)).all()):
            raise DohyoError(f"x holds other values than 0 and 1; {self.name} is a function of bits: round or threshold x")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, variables={self.variables})"
