"""Slopes on log-log axes with intervals, and what they say about a claimed rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dohyo.lab.studies.verdicts import student_quantile

CLOSE = 0.2  # a slope within this of a claimed one, interval and all, is that one


@dataclass(frozen=True)
class Rate:
    """A slope with half the width of its 95% interval; both NaN where there is none."""

    slope: float
    half: float

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.half:.2f}" if math.isfinite(self.half) else "unknown"

    def close_to(self, claimed: float) -> bool | None:
        """Whether this is the claimed slope; None where the interval is too wide to say."""
        away = abs(self.slope - claimed)
        return True if away + self.half < CLOSE else False if away - self.half > CLOSE else None

    def below(self, limit: float) -> bool | None:
        """Whether the slope is less than `limit`; None where the interval holds it."""
        return self.slope < limit if abs(self.slope - limit) > self.half else None


def rate(curves: Tensor, ks: Sequence[int], start: int = 1) -> Rate:
    """The slope of log E against log k from `start` on, fitted to the mean of curves (trials, ks)."""
    use = [i for i, k in enumerate(ks) if k >= start]
    return _fit(curves[:, use], torch.tensor([[math.log(ks[i])] for i in use], dtype=torch.float64))[0]


def cross_rate(tables: Tensor, ks: Sequence[float], start: int = 1) -> tuple[Rate, Rate]:
    """The slopes of log E_ij against log i and log j, for start <= i < j, fitted to the mean of tables (trials, ks, ks)."""
    pairs = [(i, j) for j in range(tables.shape[-1]) for i in range(j) if ks[i] >= start]
    at = torch.tensor([[math.log(ks[i]), math.log(ks[j])] for i, j in pairs], dtype=torch.float64).view(-1, 2)
    curves = torch.stack([tables[:, i, j] for i, j in pairs], -1) if pairs else tables[:, :0, 0]
    first, second = _fit(curves, at)
    return first, second


def _fit(curves: Tensor, at: Tensor) -> list[Rate]:
    """Least squares for the mean curve, with a jackknife over the trials."""
    trials, (points, slopes) = len(curves), at.shape
    without_each = (curves.sum(0) - curves) / max(1, trials - 1)
    every = torch.cat([curves.mean(0, keepdim=True), without_each])
    if trials < 2 or points <= slopes or not bool((every > 0).all()):
        return [Rate(math.nan, math.nan)] * slopes
    design = torch.cat([torch.ones(points, 1, dtype=torch.float64), at], 1)
    fitted = torch.linalg.lstsq(design, every.log().T).solution[1:]
    spread = (fitted[:, 1:].var(-1, correction=0) * (trials - 1)).sqrt() * student_quantile(0.975, trials - 1)
    return [Rate(float(slope), float(half)) for slope, half in zip(fitted[:, 0], spread, strict=True)]
