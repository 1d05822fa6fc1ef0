"""What a chain is made of besides the model: step sizes, bridge, persistence, widening. Any values leave E[w] = p(x)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from dohyo.errors import DohyoError


@dataclass(frozen=True)
class Constants:
    """The constants of chains of T leapfrogs for z of size d; where the size is 1 all dimensions share a value.

    Attributes:
        step: (T, d or 1), the step size of each leapfrog, in units of q's own spread.
        bridge: (T,) in [0, 1]: how much of p(x, z), and how little of q, each leapfrog feels.
        persistence: () in [0, 1]: the share of the momentum that is kept from one leapfrog to the next.
        widening: (d or 1,): how many times as wide as q the law is from which chains start.
        mixing: (d, d), the matrix M between momentum and movement, or None for the identity.
    """

    step: Tensor
    bridge: Tensor
    persistence: Tensor
    widening: Tensor
    mixing: Tensor | None = None

    @classmethod
    def plain(cls, steps: int, scale: float = 1.0) -> Self:
        """Those of a chain that was never tuned: what tuning finds for VAEs, roughly."""
        bridge = torch.arange(1, steps + 1, dtype=torch.float64) / (steps + 4)
        persistence, widening = torch.tensor(0.98, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        return cls(torch.full((steps, 1), 0.4 * scale, dtype=torch.float64), bridge, persistence, widening)

    @property
    def steps(self) -> int:
        """T, the number of leapfrogs."""
        return len(self.step)

    @property
    def size(self) -> int | None:
        """d, or None where all dimensions share a value."""
        sizes = self._sizes()
        return sizes.pop() if sizes else None

    def like(self, x: Tensor) -> Self:
        """The same where x lives, in its precision."""
        return self._map(lambda value: value.to(x))

    def of_size(self, size: int) -> Self:
        """The same with a value for each of `size` dimensions."""
        return replace(self, step=self.step.repeat(1, size // self.step.shape[-1]), widening=self.widening.expand(size).clone())

    def frozen(self) -> Self:
        """The same, detached, on the CPU."""
        return self._map(lambda value: value.detach().cpu())

    def to_dict(self) -> dict[str, Any]:
        """Plain lists of numbers for JSON."""
        return {name: None if value is None else value.tolist() for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, checked."""
        names = [field.name for field in fields(cls)]
        if not isinstance(plain, Mapping) or set(plain) | {"mixing"} != set(names):
            came = sorted(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
            raise DohyoError(f"the constants of a chain came as {came}; they must be a mapping of {', '.join(names)}")
        given = {name: value for name, value in plain.items() if name != "mixing" or value is not None}
        try:
            found = {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}
        except (TypeError, ValueError) as error:
            raise DohyoError(f"the constants of a chain hold something other than numbers: {error}") from error
        if found["step"].numel() == 0:
            found["step"] = found["step"].view(0, 1)
        constants = cls(**found)
        constants.check()
        return constants

    def check(self) -> None:
        """A DohyoError that names the first constant with a shape or value it cannot have."""
        limits: dict[str, tuple[int, float, float, str]] = {
            "step": (2, 0.0, math.inf, "positive"),
            "bridge": (1, -1e-30, 1.0, "in [0, 1]"),
            "persistence": (0, -1e-30, 1.0, "in [0, 1]"),
            "widening": (1, 0.0, math.inf, "positive"),
            "mixing": (2, -math.inf, math.inf, "real"),
        }
        for name, (ndim, low, high, bounds) in limits.items():
            value = getattr(self, name)
            if value is not None and (value.ndim != ndim or not bool((value.isfinite() & (value > low) & (value <= high)).all())):
                raise DohyoError(f"{name} of a chain must have {ndim} dimensions and be finite and {bounds}; it is {value}")
        sizes, square = self._sizes(), self.mixing is None or self.mixing.shape[0] == self.mixing.shape[1]
        if len(self.bridge) != self.steps or len(sizes) > 1 or 0 in sizes or not square:
            mixing = None if self.mixing is None else tuple(self.mixing.shape)
            raise DohyoError(
                f"step is {tuple(self.step.shape)}, bridge {tuple(self.bridge.shape)}, widening {tuple(self.widening.shape)}, "
                f"mixing {mixing}; they must be (T, d), (T,), (d,) and (d, d) or None, where d may be 1 in step and widening"
            )

    def _sizes(self) -> set[int]:
        """Every d that some constant says, 1 aside; they should agree."""
        mixed = set() if self.mixing is None else set(self.mixing.shape)
        return ({self.step.shape[-1], len(self.widening)} - {1}) | mixed

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, **{name: change(value) for name, value in vars(self).items() if value is not None})
