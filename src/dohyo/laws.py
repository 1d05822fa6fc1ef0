"""Laws of the random depth K: how many terms of a series a roulette estimator computes.

A law is given by its survival function S(k) = P(K >= k): the j-th term is present exactly when K >= j, so its weight is
1 / S(j). K is drawn by inversion, K = max{k : S(k) >= u}, and agrees with `survival` to the last bit: the closed-form
inverse is only a first guess, which is then checked against `survival` on both sides.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dohyo.errors import DohyoError, whole

_LARGEST = 2.0**62  # K is an int64


class Law(ABC):
    """A law on the non-negative integers. A subclass defines `survival`, `mean` and `_guess`, and `cap` or `tail_exponent`."""

    @abstractmethod
    def survival(self, k: Tensor) -> Tensor:
        """P(K >= k) in float64 for a tensor of integers."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """E[K], exact."""

    @property
    def cap(self) -> float:
        """The largest K that can be drawn, or `math.inf`."""
        return math.inf

    @property
    def tail_exponent(self) -> float:
        """The a in S(k) ~ k^-a; `math.inf` if S falls faster than every power, or reaches zero."""
        return math.inf

    @abstractmethod
    def _guess(self, u: Tensor) -> Tensor:
        """max{k : S(k) >= u} up to rounding, as float64."""

    def quantile(self, u: Tensor) -> Tensor:
        """max{k : S(k) >= u} for u in (0, 1], as int64: the K that a uniform u gives."""
        k = self._guess(u.double()).clamp(0, _LARGEST).long()
        return k + (self.survival(k + 1) >= u).long() - (self.survival(k) < u).long()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n independent samples, (n,) int64, on the generator's device."""
        return self.quantile(uniform(n, generator))

    def capped(self, cap: int) -> "Finite":
        """The law of min(K, cap): the same survival up to `cap`, and zero beyond."""
        survival = self.survival(torch.arange(cap + 2))
        survival[cap + 1] = 0.0
        start = int((survival == 1.0).nonzero().max())
        return Finite(tuple((survival[start:-1] - survival[start + 1 :]).tolist()), start=start)


def uniform(n: int, generator: torch.Generator | None = None) -> Tensor:
    """Uniform numbers in (0, 1] whose small values keep their full precision.

    A plain 53-bit uniform is never below 1.1e-16, which would silently cut off every tail there. A second uniform supplies
    the bits below the last one of the first, down to 1e-32. On a CPU, n numbers at once equal n calls for one number.
    """
    device = generator.device if generator is not None else torch.device("cpu")
    high, low = torch.randint(2**53, (n, 2), generator=generator, device=device).double().unbind(1)
    return (high + (1.0 - low * 2.0**-53)) * 2.0**-53


@dataclass(frozen=True)
class HarmonicTail(Law):
    r"""The paper's law: harmonic at first, then geometric so that the mean is finite.

    .. math:: P(K \ge k) = 1/k \ (k < \alpha), \qquad \alpha^{-1} \, \mathrm{decay}^{k - \alpha} \ (k \ge \alpha)

    References:
        Luo et al., SUMO (ICLR 2020), Section 3.2; https://arxiv.org/abs/2004.00353

    Example:
        >>> round(HarmonicTail().mean, 5)
        5.07798
    """

    alpha: int = 80
    decay: float = 0.9

    def __post_init__(self) -> None:
        whole("alpha", self.alpha)
        if not 0 < self.decay < 1:
            raise DohyoError(f"decay is {self.decay}; it must lie strictly between 0 and 1")

    def survival(self, k: Tensor) -> Tensor:
        k = k.double().clamp(min=1.0)
        tail = (k - self.alpha).clamp(min=0.0)
        return self.decay**tail / k.clamp(max=float(self.alpha))

    @property
    def mean(self) -> float:
        return math.fsum(1 / k for k in range(1, self.alpha)) + 1 / (self.alpha * (1 - self.decay))

    def _guess(self, u: Tensor) -> Tensor:
        tail = self.alpha + ((u * self.alpha).log() / math.log(self.decay)).floor()
        return torch.where(u * self.alpha > 1, (1 / u).floor(), tail)


@dataclass(frozen=True)
class Geometric(Law):
    r"""The number of trials up to the first success, counted from `start`.

    .. math:: P(K \ge k) = (1 - p)^{k - \mathrm{start}} \quad (k \ge \mathrm{start})

    Example:
        >>> Geometric(0.25).mean
        4.0
    """

    p: float = 0.2
    start: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise DohyoError(f"p is {self.p}; it must lie strictly between 0 and 1")
        whole("start", self.start, 0)

    def survival(self, k: Tensor) -> Tensor:
        return torch.exp(math.log1p(-self.p) * (k.double() - self.start).clamp(min=0.0))

    @property
    def mean(self) -> float:
        return self.start + (1 - self.p) / self.p

    def _guess(self, u: Tensor) -> Tensor:
        return self.start + (u.log() / math.log1p(-self.p)).floor()


@dataclass(frozen=True)
class PowerLaw(Law):
    r"""A power tail, heavy enough for a finite variance where the terms permit one; K can be 0.

    .. math:: P(K \ge k) = (1 + k / \mathrm{scale})^{-\mathrm{exponent}} \quad (0 \le k \le \mathrm{cap})

    References:
        Rhee and Glynn, Unbiased estimation with square root convergence (2015), on which tails give finite variance
        and finite cost at once.

    Example:
        >>> PowerLaw(exponent=1.5, scale=4.0).survival(torch.tensor([0, 4, 12]))
        tensor([1.0000, 0.3536, 0.1250], dtype=torch.float64)
    """

    exponent: float = 1.5
    scale: float = 4.0
    cap: float = math.inf  # None is accepted for "no cap"

    def __post_init__(self) -> None:
        if self.cap is None:
            object.__setattr__(self, "cap", math.inf)
        if not (math.isfinite(self.scale) and self.scale > 0 and math.isfinite(self.exponent) and self.exponent > 0):
            raise DohyoError(f"exponent is {self.exponent} and scale is {self.scale}; both must be positive and finite")
        if self.cap == math.inf and self.exponent <= 1:
            raise DohyoError(f"exponent {self.exponent} has an infinite mean; use more than 1, or give a cap")
        if self.cap != math.inf and (self.cap != int(self.cap) or self.cap < 0):
            raise DohyoError(f"cap is {self.cap}; it must be a whole number of at least 0, or None")

    def survival(self, k: Tensor) -> Tensor:
        k = k.double().clamp(min=0.0)
        return torch.where(k > self.cap, 0.0, (1 + k / self.scale) ** -self.exponent)

    @property
    def mean(self) -> float:
        if self.cap == math.inf:  # a Hurwitz zeta function
            zeta = torch.special.zeta(*torch.tensor([self.exponent, self.scale + 1], dtype=torch.float64))
            return float(self.scale**self.exponent * zeta)
        return float(self.survival(torch.arange(1, int(self.cap) + 1)).sum())

    @property
    def tail_exponent(self) -> float:
        return self.exponent if self.cap == math.inf else math.inf

    def _guess(self, u: Tensor) -> Tensor:
        return (self.scale * (u ** (-1 / self.exponent) - 1)).floor().clamp(max=self.cap)


@dataclass(frozen=True)
class Finite(Law):
    r"""Any law with finitely many values: `pmf[i]` = P(K = start + i).

    Example:
        >>> law = Finite((0.5, 0.25, 0.25), start=0)
        >>> law.survival(torch.tensor([1, 2, 3])), law.mean
        (tensor([0.5000, 0.2500, 0.0000], dtype=torch.float64), 0.75)
    """

    pmf: tuple[float, ...] = (1.0,)
    start: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "pmf", tuple(float(p) for p in self.pmf))
        whole("start", self.start, 0)
        if not self.pmf or not all(math.isfinite(p) and p >= 0 for p in self.pmf):
            raise DohyoError("pmf must be a non-empty sequence of finite probabilities of at least 0")
        if abs(math.fsum(self.pmf) - 1) > 1e-9:
            raise DohyoError(f"pmf sums to {math.fsum(self.pmf)!r}; divide it by its sum")

    @cached_property
    def _table(self) -> Tensor:
        """P(K >= start + i), exactly 1 first and 0 last."""
        with torch.inference_mode(False):
            pmf = torch.tensor(self.pmf, dtype=torch.float64)
            survival = (pmf / pmf.sum()).flip(0).cumsum(0).flip(0)
            survival[0] = 1.0
            return torch.cat([survival, survival.new_zeros(1)])

    def survival(self, k: Tensor) -> Tensor:
        table = self._table.to(k.device)
        return table[(k.long() - self.start).clamp(0, len(self.pmf))]

    @property
    def mean(self) -> float:
        return self.start + float(self._table[1:].sum())

    @property
    def cap(self) -> float:
        return self.start + max(i for i, p in enumerate(self.pmf) if p > 0)

    def _guess(self, u: Tensor) -> Tensor:
        falling = self._table.to(u.device).neg()
        return self.start + torch.searchsorted(falling, u.neg(), right=True).double() - 1
