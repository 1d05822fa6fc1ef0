"""Estimators that always use k log-weights: two lower bounds and the jackknife."""

from abc import abstractmethod
from dataclasses import dataclass
from math import comb, factorial, log
from typing import ClassVar, Self

import torch
from torch import Tensor

from dohyo.bounds import leave_out_mean, settle
from dohyo.errors import DohyoError, whole
from dohyo.estimators.estimator import Estimator, check_cost
from dohyo.estimators.folding import Fold, TreeFold
from dohyo.laws import Finite, Law

_MOST_CELLS = 10**8


@dataclass(frozen=True)
class FixedEstimator(Estimator):
    """An estimator with a single depth; a final class defines `_value`, and when a row is -inf."""

    k: int = 1
    finite_variance = True
    _least: ClassVar[float] = 1.0  # the smallest cost

    def __post_init__(self) -> None:
        whole("k", self.k)

    @property
    def depth_law(self) -> Law:
        return Finite((1.0,), start=0)

    def plan(
        self, batch: int, generator: torch.Generator | None = None, shared: bool = False, stratified: bool = False
    ) -> Tensor:
        """k for each datum; nothing is drawn."""
        device = generator.device if generator is not None else None
        return torch.full((batch,), self.k, device=device)

    def shared_plans(self, steps: int, generator: torch.Generator | None = None) -> list[int]:
        return [self.k] * steps

    def terms(self, depth: Tensor) -> Tensor:
        return torch.full_like(depth, self.k)

    def depth(self, counts: Tensor) -> Tensor:
        return (counts >= self.k).long() - 1

    def paths(self, log_w: Tensor) -> Tensor:
        settled, anchor, empty = settle(log_w[:, : self.k])
        return torch.where(self._dead(empty.sum(-1)), -torch.inf, self._value(settled) + anchor[:, 0])[:, None]

    def reduce(self, log_w: Tensor, counts: Tensor) -> Tensor:
        return self.paths(log_w.double())[:, 0]  # there is no other depth

    @abstractmethod
    def _value(self, log_w: Tensor) -> Tensor:
        """The estimate from finite log-weights (batch, k)."""

    @abstractmethod
    def _dead(self, empty: Tensor) -> Tensor:
        """Whether all weights of some block with a non-zero coefficient are zero, given how many weights are."""

    @property
    def expected_cost(self) -> float:
        return float(self.k)

    @classmethod
    def at_cost(cls, cost: float, max_terms: int | None = None) -> Self:
        check_cost(cost, max_terms, cls._least)
        return cls(round(cost))

    @property
    def kind(self) -> str:
        return super().kind if self.target_terms is None else "lower bound"


@dataclass(frozen=True)
class ELBO(FixedEstimator):
    r"""The evidence lower bound, averaged over k log-weights.

    .. math:: \mathrm{ELBO} = \frac1k \sum_{i=1}^k \log w_i

    References:
        Kingma and Welling, Auto-encoding variational Bayes (2014); https://arxiv.org/abs/1312.6114

    Example:
        >>> ELBO(2).reduce(torch.tensor([[0.0, 2.0]]), torch.tensor([2]))
        tensor([1.], dtype=torch.float64)
    """

    target_terms = 1.0

    def _value(self, log_w: Tensor) -> Tensor:
        return log_w.mean(-1)

    def _dead(self, empty: Tensor) -> Tensor:
        return empty > 0

    def fold(self, count: int) -> Fold | None:
        return TreeFold(1, 0, lambda means: means[0])


@dataclass(frozen=True)
class IWAE(FixedEstimator):
    r"""The importance-weighted lower bound of k log-weights.

    .. math:: \mathrm{IWAE}_k = \log \frac1k \sum_{i=1}^k w_i

    References:
        Burda et al., Importance weighted autoencoders (ICLR 2016); https://arxiv.org/abs/1509.00519

    Example:
        >>> IWAE(2).reduce(torch.tensor([[0.0, 2.0]]), torch.tensor([2]))
        tensor([1.4338], dtype=torch.float64)
    """

    k: int = 5

    def _value(self, log_w: Tensor) -> Tensor:
        return log_w.logsumexp(-1) - log(self.k)

    def slopes(self, log_w: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """In closed form, the normalised weights: the same to the last bit, in a third of the time."""
        if log_w.shape[1] != self.k:
            return super().slopes(log_w, counts)
        settled, anchor, empty = settle(log_w.detach().double())
        total = settled.logsumexp(-1, keepdim=True)
        value = torch.where(empty.all(-1), -torch.inf, total[:, 0] - log(self.k) + anchor[:, 0])
        return value, torch.where(empty, 0.0, (settled - total).exp())

    def _dead(self, empty: Tensor) -> Tensor:
        return empty == self.k

    def fold(self, count: int) -> Fold | None:
        return TreeFold(self.k, 0, lambda means: means[0])

    @property
    def target_terms(self) -> float | None:
        return float(self.k)


@dataclass(frozen=True)
class JVI(FixedEstimator):
    r"""Jackknife variational inference: IWAE_k with the first `order` terms of its bias in 1/k removed.

    .. math:: \mathrm{JVI}_{k,J} = \sum_{j=0}^J \frac{(-1)^j (k-j)^J}{(J-j)!\, j!} \, \overline{\mathrm{IWAE}}_{k-j}

    with the average over all blocks of k - j of the k log-weights. Neither a bound nor unbiased. Time and memory grow
    as k^order.

    References:
        Nowozin, Debiasing evidence approximations (ICLR 2018); https://openreview.net/forum?id=HyZoi-WRb

    Example:
        >>> JVI(3).reduce(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([3]))
        tensor([1.4776], dtype=torch.float64)
    """

    k: int = 5
    order: int = 1
    target_terms = None
    _least = 2.0

    def __post_init__(self) -> None:
        whole("order", self.order)
        whole("k", self.k, self.order + 1)
        cells = self.k * comb(self.k, min(self.order, 50) - 1)
        if self.order > 50 or (self.order > 1 and cells > _MOST_CELLS):
            raise DohyoError(
                f"k is {self.k} and order {self.order}; the blocks left out would take {cells:.2g} numbers: lower the order"
            )

    def _value(self, log_w: Tensor) -> Tensor:
        k, order = self.k, self.order
        value = whole = leave_out_mean(log_w, 0)
        for j in range(1, order + 1):  # the coefficients sum to one, which determines that of the whole block
            coefficient = (-1) ** j * (k - j) ** order / (factorial(order - j) * factorial(j))
            value = value + coefficient * (leave_out_mean(log_w, j) - whole)
        return value

    def _dead(self, empty: Tensor) -> Tensor:
        return empty >= self.k - self.order
