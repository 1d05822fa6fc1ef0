r"""Roulette over doublings: level l compares blocks of m 2^l log-weights with their two halves.

Let A_l be the average log-mean over the blocks of m 2^l among the m 2^L log-weights drawn. The differences A_l - A_{l-1}
have means O(2^-l) and, because the halves are antithetic, second moments O(4^-l); so with P(L >= l) = (1-r)^l both the
variance and the cost are finite for 1/2 < r < 3/4. Shi and Cornish (On multilevel Monte Carlo unbiased gradient estimation
for deep latent variable models, AISTATS 2021; https://proceedings.mlr.press/v130/shi21d.html) use only the first block of
each size; the average over all blocks costs no more and has the same mean.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from dohyo.bounds import FLOOR, settle, tree_means
from dohyo.errors import DohyoError, whole
from dohyo.estimators.estimator import Estimator, check_cost
from dohyo.estimators.folding import Fold, TreeFold
from dohyo.estimators.roulette import check_centre, roulette_weights
from dohyo.laws import Geometric, Law


@dataclass(frozen=True)
class Multilevel(Estimator):
    """Levels of doubling blocks; a final class defines the weights of the differences."""

    m: int = 1
    r: float = 0.6
    max_level: int | None = None
    centre: tuple[float, ...] = ()
    finite_variance = True

    def __post_init__(self) -> None:
        whole("m", self.m)
        if self.max_level is not None:
            whole("max_level", self.max_level, 0)
        low, high = (0.5, 0.75) if self.max_level is None else (0, 1)
        if not low < self.r < high:
            raise DohyoError(f"r is {self.r}; it must lie strictly between {low} and {high}, or cost or variance is infinite")
        object.__setattr__(self, "centre", check_centre(self.centre, self.depth_law))

    @cached_property
    def depth_law(self) -> Law:
        law = Geometric(self.r, start=0)
        return law if self.max_level is None else law.capped(self.max_level)

    def terms(self, depth: Tensor) -> Tensor:
        return self.m * 2**depth

    def depth(self, counts: Tensor) -> Tensor:
        return ((counts.double() / self.m).log2() + 1e-9).floor().long()  # log2 of a power of two may fall short

    def paths(self, log_w: Tensor) -> Tensor:
        levels = self._levels(log_w)
        log_w, anchor, empty = settle(log_w[:, : self.m << levels])
        value = self.combine(tree_means(log_w, self.m, levels)) + anchor
        # Every block of m has a non-zero coefficient, so one block of zero weights makes the estimate -inf.
        empty_block = empty.unflatten(-1, (-1, self.m)).all(-1).long().cumsum(-1)
        dead = empty_block[:, 2 ** torch.arange(levels + 1, device=log_w.device) - 1] > 0
        return torch.where(dead, -torch.inf, value)

    def slopes(self, log_w: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """In closed form, a weighted sum of blocks' log-means; on a CPU it takes half of the time."""
        levels = self._levels(log_w)
        if log_w.device.type != "cpu" or self.m << levels != log_w.shape[1]:
            return super().slopes(log_w, counts)
        own = torch.arange(log_w.shape[1]) < counts[:, None]
        log_w, anchor, empty = settle(torch.where(own, log_w.detach().double(), -torch.inf))
        depth = self.depth(counts)
        table, offset = _block_weights(self, levels)
        weights, inside = table[depth], torch.arange(1 << levels) < (1 << depth)[:, None]
        sums = log_w.unflatten(-1, (-1, self.m)).logsumexp(-1)
        value, slopes = offset[depth] + anchor[:, 0], torch.zeros_like(log_w)
        dead = (inside & (sums < FLOOR / 2)).any(-1)  # one block of zero weights makes the estimate -inf
        for level in range(levels + 1):
            if level:
                sums, inside = sums.unflatten(-1, (-1, 2)).logsumexp(-1), inside[:, ::2]
            weight = torch.where(inside, weights[:, level, None], 0.0)
            value = value + (weight * sums).sum(-1)
            share = (log_w.unflatten(-1, (*sums.shape[1:], -1)) - sums[..., None]).exp()
            slopes += (share * weight[..., None]).flatten(1)
        return torch.where(dead, -torch.inf, value), torch.where(dead[:, None] | empty, 0.0, slopes)

    def _levels(self, log_w: Tensor) -> int:
        levels = int(math.log2(log_w.shape[-1] / self.m))
        return levels if self.max_level is None else min(levels, self.max_level)

    def fold(self, count: int) -> Fold | None:
        level = int(self.depth(torch.tensor(count)))

        def combine(means: Tensor) -> Tensor:
            table = pad(means[None, :, None], (level, 0))  # of which the column of the last level is all that is needed
            return self.combine(table)[0, -1]

        return TreeFold(self.m, level, combine)

    def combine(self, means: Tensor) -> Tensor:
        """The estimate at every depth from `bounds.tree_means`."""
        weights, offset = self._weights(means.shape[-1] - 1, means.device)
        differences = means[:, 1:] - means[:, :-1]
        return means.diagonal(dim1=-2, dim2=-1) + (differences * weights).sum(-2) + offset

    @abstractmethod
    def _weights(self, levels: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The weights of A_l - A_{l-1} beyond the leading A_L, (levels, levels + 1), and the offset for each L."""

    @property
    def expected_cost(self) -> float:
        ratio = 2 * (1 - self.r)  # E[2^L] = r (1 + ratio + ...), where a last level takes all that remains
        if self.max_level is None:
            return self.m * self.r / (1 - ratio)
        below = math.fsum(self.r * ratio**level for level in range(self.max_level))
        return self.m * (below + ratio**self.max_level)

    @property
    def target_terms(self) -> float | None:
        return math.inf if self.max_level is None else float(self.m * 2**self.max_level)

    @classmethod
    def at_cost(cls, cost: float, max_terms: int | None = None) -> Self:
        """The m whose cost at r = 0.6 is nearest; r is changed to meet the cost unless that is within 5% with m > 1."""
        check_cost(cost, max_terms)
        if max_terms is None:
            near = cls(max(1, round(cost / 3)))  # E[2^L] = 3 at r = 0.6
        else:
            options = [cls(m, max_level=int(math.log2(max_terms / m))) for m in range(1, math.ceil(cost) + 1)]
            near = min(options, key=lambda option: abs(option.expected_cost - cost))
        if near.max_level == 0 or (near.m > 1 and abs(near.expected_cost - cost) < 0.05 * cost):
            return near
        least = near.m * (1.5 if max_terms is None else 1)
        if cost <= least:
            raise DohyoError(f"cost is {cost}; {cls.__name__} needs more than {least:g} log-weights for each datum")
        return cls(near.m, r_at_cost(cost / near.m, near.max_level), near.max_level)


def r_at_cost(cost: float, max_level: int | None) -> float:
    """The r with E[2^L] = cost, for 1 < cost < 2^max_level; the cost falls as r grows."""
    if max_level is None:
        return cost / (2 * cost - 1)
    from scipy.optimize import brentq  # type: ignore[import-untyped]  # here, because it is slow to import

    return float(brentq(lambda r: MultilevelRR(1, r, max_level).expected_cost - cost, 1e-12, 1 - 1e-12, xtol=1e-15))


@dataclass(frozen=True)
class MultilevelRR(Multilevel):
    r"""Multilevel Russian roulette: every level up to a random one.

    .. math:: A_0 + \sum_{l=1}^L \frac{A_l - A_{l-1}}{(1-r)^l}, \qquad P(L \ge l) = (1-r)^l

    It is computed with the log-mean of all weights as its leading term: A_L + sum_l (A_l - A_{l-1}) ((1-r)^-l - 1).

    Example:
        >>> MultilevelRR.at_cost(15)
        MultilevelRR(m=5, r=0.6, max_level=None, centre=())
    """

    def _weights(self, levels: int, device: torch.device) -> tuple[Tensor, Tensor]:
        excess, offset = roulette_weights(self.depth_law, self.centre, levels, device)
        return torch.triu(excess[:, None].expand(levels, levels + 1), 1), offset


@dataclass(frozen=True)
class MultilevelSS(Multilevel):
    r"""Multilevel single sample: the base and one random level.

    .. math:: A_0 + \frac{A_L - A_{L-1}}{P(L)} \mathbf{1}_{L \ge 1}, \qquad P(L \ge l) = (1-r)^l

    Example:
        >>> MultilevelSS.at_cost(15)
        MultilevelSS(m=5, r=0.6, max_level=None, centre=())
    """

    def _weights(self, levels: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return _single_weights(self.depth_law, self.centre, levels, device)


@lru_cache(maxsize=128)
def _single_weights(law: Law, centre: tuple[float, ...], levels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        survival = law.survival(torch.arange(1, levels + 2))
        inverse = 1 / (survival[:-1] - survival[1:])
        only_last = torch.diag_embed(inverse, offset=1)[:levels]
        weights = only_last - torch.triu(torch.ones(levels, levels + 1, dtype=torch.float64), 1)
        g = torch.tensor(centre + (0.0,) * levels, dtype=torch.float64)[:levels]
        offset = math.fsum(centre) - pad(g * inverse, (1, 0))
        return weights.to(device), offset.to(device)


@lru_cache(maxsize=128)
def _block_weights(estimator: Multilevel, levels: int) -> tuple[Tensor, Tensor]:
    """The coefficient of each block's log-sum, (levels + 1, levels + 1) by L and l, and what is added for each L."""
    with torch.inference_mode(False):
        weights, offset = estimator._weights(levels, torch.device("cpu"))
        means = (torch.eye(levels + 1, dtype=torch.float64) + pad(weights, (0, 0, 1, 0)) - pad(weights, (0, 0, 0, 1))).T
        level = torch.arange(levels + 1, dtype=torch.float64)
        return means * 2 ** (level - level[:, None]), offset - means @ (estimator.m * 2**level).log()
