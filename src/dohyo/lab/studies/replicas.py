"""Cells that train replicas of one run, and what their spread says of a difference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

from dohyo.errors import DohyoError
from dohyo.lab.experiments.density import DensityConfig, DensityRun
from dohyo.lab.studies.runs import complete
from dohyo.lab.studies.study import Advance, Cell
from dohyo.lab.training.log import read_records

_OF_EACH = ("test_nll", "test_nll_stderr", "valid_nll", "epochs", "best_epoch")
_CLIPPED = ("clipped_decoder", "clipped_encoder")
SHARED_K = (
    "The replicas have their own parameters, data order and noise, but the K of each step is common to them, so that their "
    "spread leaves out what another sequence of K would change: for estimators with a random K the error bars are too small."
)


def train_replicas(config: DensityConfig, folder: Path, advance: Advance) -> Cell:
    """The numbers of each replica; trained only as far as they are not yet."""
    if config.replicas < 2:
        raise DohyoError(f"replicas is {config.replicas}; there must be at least 2, for a spread")
    run = DensityRun(folder, config)
    found = complete(run, advance)
    result: Cell = {key: [replica[key] for replica in found["replicas"]] for key in _OF_EACH}
    records = [read_records(replica.folder) for replica in run.replicas]
    result |= {key: [fmean(record[key] for record in each) for each in records] for key in _CLIPPED}
    return result | {key: found[key] for key in ("expected_cost", "estimator_arguments", "encoder", "test_terms")}


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
        """The chance of a mean at least so far from zero if there were nothing, two-sided."""
        from scipy.special import stdtr  # type: ignore[import-untyped]  # here, because it is slow to import

        if self.stderr == 0:
            return float(self.mean == 0)
        return float(2 * stdtr(self.degrees, -abs(self.mean) / self.stderr))

    def half(self, claims: int = 1) -> float:
        """Half a 95% interval, of so many that are to hold together (Bonferroni)."""
        from scipy.special import stdtrit

        return float(-stdtrit(self.degrees, 0.025 / claims)) * self.stderr if self.stderr else 0.0


def all_below(contrasts: Sequence[Contrast]) -> bool | None:
    """Whether all are below zero: False if one is above, None if an interval holds zero; at 95% for all together."""
    halves = [contrast.half(len(contrasts)) for contrast in contrasts]
    if not contrasts or any(c.mean > half for c, half in zip(contrasts, halves, strict=True)):
        return False if contrasts else None
    return True if all(c.mean < -half for c, half in zip(contrasts, halves, strict=True)) else None


def listed(contrasts: dict[str, Contrast]) -> str:
    """Each with half its interval, for a reader."""
    return ", ".join(f"{name} {c.mean:+.2f} ± {c.half(len(contrasts)):.2f}" for name, c in contrasts.items())
