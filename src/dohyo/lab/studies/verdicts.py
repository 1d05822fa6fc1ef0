"""What means and slopes with error bars say about a claim: yes, no, or that these runs cannot tell (True, False, None)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import torch
from torch import Tensor

LEAST_PLACES = 3  # from which on a mean over places has an interval
CLOSE = 0.2  # a slope within this of a claimed one, interval and all, is that one


def all_hold(verdicts: Iterable[bool | None]) -> bool | None:
    """False if one is False, else None if one is None, else True.

    Example:
        >>> all_hold([True, None]), all_hold([True, None, False]), all_hold([True])
        (None, False, True)
    """
    found = list(verdicts)
    return False if False in found else None if None in found else True


def is_close(difference: float, half: float, tolerance: float) -> bool | None:
    """Whether a difference with half this interval is within a tolerance; None where the interval is too wide to say."""
    away = abs(difference)
    return True if away + half < tolerance else False if away - half > tolerance else None


def student_quantile(p: float, degrees: float) -> float:
    """The quantile of Student's t distribution."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # here, because it is slow to import

    return float(stdtrit(degrees, p))


@dataclass(frozen=True)
class Contrast:
    r"""A combination of means with its standard error and degrees of freedom (Welch and Satterthwaite).

    .. math:: \sum_i c_i \bar x_i, \quad \mathrm{se}^2 = \sum_i v_i, \quad v_i = c_i^2 s_i^2 / n_i, \quad
        \nu = \mathrm{se}^4 \Big/ \sum_i \frac{v_i^2}{n_i - 1}

    Example:
        >>> difference = Contrast.of((1, [1.0, 2.0, 3.0]), (-1, [2.0, 4.0, 6.0]))
        >>> print(f"{difference.mean:.1f} ± {difference.half():.1f}, p = {difference.p:.2f}")
        -2.0 ± 4.2, p = 0.22
    """

    mean: float
    stderr: float
    degrees: float

    @classmethod
    def of(cls, *terms: tuple[float, Sequence[float]]) -> "Contrast":
        """Of coefficients and samples, with at least two numbers in each sample."""
        shares = [c**2 * variance(sample) / len(sample) for c, sample in terms]
        below = sum(v**2 / (len(sample) - 1) for v, (_, sample) in zip(shares, terms, strict=True))
        degrees = sum(shares) ** 2 / below if below > 0 else math.inf
        return cls(sum(c * fmean(sample) for c, sample in terms), math.sqrt(sum(shares)), degrees)

    @property
    def p(self) -> float:
        """The two-sided p-value of a mean of zero."""
        from scipy.special import stdtr

        if self.stderr == 0:
            return float(self.mean == 0)
        return float(2 * stdtr(self.degrees, -abs(self.mean) / self.stderr))

    def half(self, claims: int = 1) -> float:
        """Half a 95% interval, of this many that hold together (Bonferroni)."""
        return -student_quantile(0.025 / claims, self.degrees) * self.stderr if self.stderr else 0.0


def all_below(contrasts: Sequence[Contrast]) -> bool | None:
    """Whether all are below zero: False if one is above, None if an interval holds zero; at 95% for all together."""
    verdicts = [c.mean < 0 if abs(c.mean) > c.half(len(contrasts)) else None for c in contrasts]
    return all_hold(verdicts) if verdicts else None


def listed(contrasts: Mapping[str, Contrast]) -> str:
    """Each contrast with half its interval, as text."""
    return ", ".join(f"{name} {c.mean:+.2f} ± {c.half(len(contrasts)):.2f}" for name, c in contrasts.items())


def pooled(differences: Sequence[float]) -> Contrast | None:
    """The mean over places with Student's t over them, since the replicas at one place may share their K; None for few places."""
    return Contrast.of((1, differences)) if len(differences) >= LEAST_PLACES else None


def pooled_text(differences: Sequence[float]) -> str:
    """The mean over places, with half its interval if there is one.

    Example:
        >>> pooled_text([0.1, -0.1, -0.3]), pooled_text([0.1, 0.2])
        ('-0.10 ± 0.50', '+0.15')
    """
    found = pooled(differences)
    return f"{fmean(differences):+.2f}" if found is None else f"{found.mean:+.2f} ± {found.half():.2f}"


@dataclass(frozen=True)
class Rate:
    """A slope with half the width of its 95% interval; both NaN where there is none."""

    slope: float
    half: float

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.half:.2f}" if math.isfinite(self.half) else "unknown"

    def close_to(self, claimed: float) -> bool | None:
        """Whether this is the claimed slope; None where the interval is too wide to say."""
        return is_close(self.slope - claimed, self.half, CLOSE)

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
