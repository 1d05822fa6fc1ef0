r"""Russian roulette over a telescoping series, term by term: SUMO and its symmetric successor.

Let the differences :math:`d_j` have the means of IWAE_{m+j} - IWAE_{m+j-1}, and let S(j) = P(K >= j). Then

.. math:: \mathrm{IWAE}_m + \sum_{j \le K} d_j / S(j)

has mean log p(x), or that of IWAE_{m + cap} under a capped law. So does what is computed here,

.. math:: \mathrm{IWAE}_{m+K} + \sum_{j \le K} d_j (1/S(j) - 1) + \Big[\sum_j g_j - \sum_{j \le K} g_j / S(j)\Big]

which is the same number for SUMO, whose differences telescope in each realisation. The bracket centres by constants
:math:`g_j`; it depends on K alone, and its mean is zero for any constants.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from dohyo.bounds import FLOOR, leave_one_out_differences, prefix_log_mean, settle
from dohyo.errors import DohyoError, whole
from dohyo.estimators.estimator import Estimator, check_cost
from dohyo.estimators.folding import Fold, PrefixFold
from dohyo.laws import HarmonicTail, Law, PowerLaw


@dataclass(frozen=True)
class PrefixRoulette(Estimator):
    """Roulette over prefixes m, m + 1, ...; a final class defines the differences."""

    m: int = 1
    law: Law = field(default_factory=HarmonicTail)
    centre: tuple[float, ...] = ()
    _decay: ClassVar[int]  # nu_k ~ k^-decay, where the k-th term adds nu_k / S(k) to the variance

    def __post_init__(self) -> None:
        whole("m", self.m)
        object.__setattr__(self, "centre", check_centre(self.centre, self.law))

    @property
    def depth_law(self) -> Law:
        return self.law

    def terms(self, depth: Tensor) -> Tensor:
        return self.m + depth

    def depth(self, counts: Tensor) -> Tensor:
        return counts - self.m

    def paths(self, log_w: Tensor) -> Tensor:
        width = int(min(log_w.shape[-1], self.m + self.law.cap))
        log_w, anchor, empty = settle(log_w[:, :width])
        iwae = prefix_log_mean(log_w)[:, self.m - 1 :]
        value = self.combine(iwae, self._differences(log_w, iwae)) + anchor
        excess, _ = roulette_weights(self.law, self.centre, width - self.m, log_w.device)
        # Which blocks have only zero weights follows from the number of non-zero weights in each prefix.
        alive = (~empty).cumsum(-1)[:, self.m - 1 :]
        dead_term = (self._fewest_alive(alive) == 0) & (excess != 0)
        dead = (alive == 0) | (pad(dead_term.long().cumsum(-1), (1, 0)) > 0)
        return torch.where(dead, -torch.inf, value)

    def combine(self, iwae: Tensor, differences: Tensor) -> Tensor:
        """The estimate at every depth from IWAE_m, IWAE_{m+1}, ... and d_1, d_2, ..., each (batch, ...)."""
        excess, offset = roulette_weights(self.law, self.centre, differences.shape[-1], iwae.device)
        return iwae + pad((differences * excess).cumsum(-1), (1, 0)) + offset

    @abstractmethod
    def _differences(self, log_w: Tensor, iwae: Tensor) -> Tensor:
        """d_j for j = 1, ..., width - m."""

    @abstractmethod
    def _fewest_alive(self, alive: Tensor) -> Tensor:
        """The smallest number of non-zero weights in a block of d_j, from that number in prefixes m, m + 1, ..."""

    def unseen_share(self, draws: int) -> float:
        """From the asymptotic rate nu_k ~ k^-decay."""
        depth = int(min(self.law.cap, 10_000))
        j = torch.arange(1, depth + 1)
        survival = self.law.survival(j)
        j, survival = j[survival > 0], survival[survival > 0]
        part = (self.m + j).double() ** -self._decay / survival
        return float(part[survival * draws < 5].sum() / part.sum()) if len(part) else 0.0

    @property
    def expected_cost(self) -> float:
        return self.m + self.law.mean

    @property
    def target_terms(self) -> float | None:
        return self.m + self.law.cap


@dataclass(frozen=True)
class SUMO(PrefixRoulette):
    r"""The paper's estimator: roulette over the differences of consecutive IWAE bounds.

    .. math:: \mathrm{SUMO} = \mathrm{IWAE}_m + \sum_{j=1}^K \frac{\mathrm{IWAE}_{m+j} - \mathrm{IWAE}_{m+j-1}}{P(K \ge j)}

    The paper's Algorithm 1 leaves open at which index the K differences are weighted. The j-th one is present exactly when
    K >= j, so the weight is 1 / P(K >= j); 1 / P(K >= m + j) would be biased. Uncapped, the variance is infinite under every
    law with a finite mean: E[d_j^2] falls as j^-2, and (sum 1/j)^2 <= sum S(j) * sum j^-2 / S(j).

    References:
        Luo et al., SUMO (ICLR 2020), Algorithm 1; https://arxiv.org/abs/2004.00353

    Example:
        >>> SUMO.at_cost(15)
        SUMO(m=10, law=HarmonicTail(alpha=80, decay=0.9), centre=())
    """

    _decay = 2

    def _differences(self, log_w: Tensor, iwae: Tensor) -> Tensor:
        return iwae[:, 1:] - iwae[:, :-1]

    def _fewest_alive(self, alive: Tensor) -> Tensor:
        return alive[:, :-1]

    def slopes(self, log_w: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        r"""In closed form; on a CPU it takes a third to half of the time.

        With :math:`e_j = 1/S(j) - 1` the estimate is :math:`\mathrm{IWAE}_{m+K} + \sum_{j<K} (e_{j+1} - e_j)
        (\mathrm{IWAE}_{m+K} - \mathrm{IWAE}_{m+j})`, in which no coefficient is negative.
        """
        width = log_w.shape[1]
        if log_w.device.type != "cpu" or self.m + self.law.cap < width:
            return super().slopes(log_w, counts)
        prefix, log_prefix, first, excess, gaps, log_gaps, offset = _closed(self.m, self.law, self.centre, width)
        log_w, anchor, empty = settle(torch.where(torch.arange(width) < counts[:, None], log_w.detach().double(), -torch.inf))
        depth = (counts - self.m)[:, None]
        sums = log_w.logcumsumexp(-1)[:, self.m - 1 :]
        iwae, before = sums - log_prefix, prefix < counts[:, None]
        last = iwae.gather(1, depth)
        value = last + (torch.where(before, last - iwae, 0.0) * gaps).sum(-1, keepdim=True) + anchor + offset[depth]
        # A weight acts through the last prefix and, with the opposite sign, through every earlier one that holds it.
        earlier = torch.where(before, log_gaps - sums, -torch.inf).flip(-1).logcumsumexp(-1).flip(-1)
        slopes = (log_w + excess[depth].log1p() - sums.gather(1, depth)).exp() - (log_w + earlier[:, first]).exp()
        lost = (sums < FLOOR / 2).sum(-1, keepdim=True)  # prefixes whose weights are all zero
        dead = (lost > depth) | (excess[torch.minimum(lost, depth)] > 0)
        return torch.where(dead, -torch.inf, value)[:, 0], torch.where(dead | empty, 0.0, slopes)

    def fold(self, count: int) -> Fold | None:
        def offset(depth: int) -> float:
            return float(roulette_weights(self.law, self.centre, min(depth, len(self.centre)), torch.device("cpu"))[1][-1])

        return PrefixFold(self.m, lambda first, last: inverse_survival(self.law, first, last) - 1, offset)

    @property
    def finite_variance(self) -> bool | None:
        return self.law.cap < math.inf

    @classmethod
    def at_cost(cls, cost: float, max_terms: int | None = None) -> Self:
        """The paper's law with the m whose cost is nearest; if m = 1 still costs too much, a smaller alpha."""
        check_cost(cost, max_terms)
        law = HarmonicTail()
        if max_terms is None:
            m = max(1, round(cost - law.mean))
        else:
            options = torch.arange(1, max(2, max_terms))
            capped = law.survival(options).cumsum(0).flip(0)  # E[min(K, max_terms - m)]
            m = 1 + int((options + capped - cost).abs().argmin())
        laws = [law] if m > 1 else [HarmonicTail(alpha) for alpha in range(10, 81)]  # the mean grows with alpha from 10 on
        members = [cls(m, law if max_terms is None else law.capped(max_terms - m)) for law in laws]
        if cost < members[0].expected_cost - 0.01 and m == 1:
            raise DohyoError(f"cost is {cost}; SUMO with the paper's law costs at least {members[0].expected_cost:.2f}: use "
                             "SymmetricSUMO or MultilevelRR, or SUMO(m=1, law=Geometric(p))")  # fmt: skip
        return min(members, key=lambda member: abs(member.expected_cost - cost))


@dataclass(frozen=True)
class SymmetricSUMO(PrefixRoulette):
    r"""Roulette over leave-one-out differences, with every sample in the leading term.

    .. math:: d_j = \mathrm{IWAE}_{m+j} - \frac{1}{m+j} \sum_{i=1}^{m+j} \mathrm{IWAE}_{m+j}^{(-i)}

    The average over the sample left out cancels the first order of the difference, so E[d_j^2] falls as j^-4 (SUMO: j^-2),
    and a power tail with exponent between 1 and 2 gives finite variance at finite cost. Time and memory grow as n log n with the
    number of terms (`bounds.leave_one_out_differences`).

    Example:
        >>> SymmetricSUMO.at_cost(15).finite_variance
        True
    """

    m: int = 4
    law: Law = field(default_factory=PowerLaw)
    _decay = 3

    def _differences(self, log_w: Tensor, iwae: Tensor) -> Tensor:
        return leave_one_out_differences(log_w, self.m + 1)

    def _fewest_alive(self, alive: Tensor) -> Tensor:
        return alive[:, 1:] - 1

    @property
    def finite_variance(self) -> bool | None:
        return self.law.cap < math.inf or self.law.tail_exponent < 2

    @classmethod
    def at_cost(cls, cost: float, max_terms: int | None = None) -> Self:
        check_cost(cost, max_terms, least=1.1)
        m = max(1, round(cost / 3.5))
        cap = math.inf if max_terms is None else max_terms - m
        return cls(m, power_law_with_mean(cost - m, 1.5, cap))


def power_law_with_mean(mean: float, exponent: float, cap: float) -> PowerLaw:
    """The power law with this mean, by bisection on its scale."""
    low, high = 1e-6, 1e9
    for _ in range(100):
        scale = math.sqrt(low * high)
        low, high = (scale, high) if PowerLaw(exponent, scale, cap).mean < mean else (low, scale)
    return PowerLaw(exponent, scale, cap)


def check_centre(centre: tuple[float, ...], law: Law) -> tuple[float, ...]:
    centre = tuple(float(g) for g in centre)
    if len(centre) > law.cap or not all(math.isfinite(g) for g in centre):
        raise DohyoError(f"centre is {centre}; it must be finite, with at most {law.cap:.0f} entries under {law}")
    return centre


def inverse_survival(law: Law, first: int, last: int) -> Tensor:
    """1/S(j) for j = first, ..., last - 1, finite also beyond a law's cap."""
    return (1 / law.survival(torch.arange(first, last))).clamp(max=1e300)


@lru_cache(maxsize=128)
def roulette_weights(law: Law, centre: tuple[float, ...], depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """1/S(j) - 1 for j = 1..depth, and the bracket in the module's docstring for K = 0..depth."""
    with torch.inference_mode(False):
        inverse = inverse_survival(law, 1, depth + 1)
        g = torch.tensor(centre + (0.0,) * depth, dtype=torch.float64)[:depth]
        offset = math.fsum(centre) - pad((g * inverse).cumsum(0), (1, 0))
        return (inverse - 1).to(device), offset.to(device)


@lru_cache(maxsize=128)
def _closed(m: int, law: Law, centre: tuple[float, ...], width: int) -> tuple[Tensor, ...]:
    """What `SUMO.slopes` needs of its prefixes m, ..., width: their sizes and the logarithms of these, the first of them that
    holds each weight, e_j, the gaps of these and their logarithms, and the offset."""
    with torch.inference_mode(False):
        excess, offset = roulette_weights(law, centre, width - m, torch.device("cpu"))
        prefix, first = torch.arange(m, width + 1), (torch.arange(width) + 1 - m).clamp(min=0)
        excess = pad(excess, (1, 0))
        gaps = pad(excess.diff(), (0, 1))
        return prefix, prefix.double().log(), first, excess, gaps, gaps.log(), offset
