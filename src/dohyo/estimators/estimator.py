"""What an estimator is: a plan for how many log-weights each datum gets, and a reduction of them to log p(x)."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.estimators.folding import Fold
from dohyo.laws import Law, uniform


class Estimator(ABC):
    """Log-weights in, an estimate of log p(x) out.

    A final subclass defines how many terms are drawn (`depth_law`, `terms`) and what the estimate is for each number of
    terms (`paths`); planning and reducing follow from these.
    """

    # -- what a final class defines -------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def depth_law(self) -> Law:
        """The law of the depth K (or level L); a fixed estimator has the single depth 0."""

    @abstractmethod
    def terms(self, depth: Tensor) -> Tensor:
        """The number of log-weights that each depth needs."""

    @abstractmethod
    def depth(self, counts: Tensor) -> Tensor:
        """The inverse of `terms`."""

    @abstractmethod
    def paths(self, log_w: Tensor) -> Tensor:
        """The estimate at every depth that fits into the width, (batch, depths): entry [i, K] uses the first `terms(K)` weights
        of row i. Variances stratified over K are measured with this."""

    @property
    @abstractmethod
    def expected_cost(self) -> float:
        """The mean number of log-weights for each datum, exact."""

    @property
    @abstractmethod
    def target_terms(self) -> float | None:
        """n if the estimate is unbiased for IWAE_n, `math.inf` if it is unbiased for log p(x) itself, None if neither."""

    @property
    @abstractmethod
    def finite_variance(self) -> bool | None:
        """Whether the variance is finite provided that the weights' moments are; None if that is not known."""

    @classmethod
    @abstractmethod
    def at_cost(cls, cost: float, max_terms: int | None = None) -> Self:
        """The estimator of this class with about this expected cost, and with at most `max_terms` terms if given."""

    # -- what follows ---------------------------------------------------------------------------------------------------
    def plan(
        self, batch: int, generator: torch.Generator | None = None, shared: bool = False, stratified: bool = False
    ) -> Tensor:
        """How many log-weights each datum gets, (batch,) int64: all the randomness of K.

        Args:
            shared: One K for the whole batch. Each estimate keeps its mean, but the estimates are no longer independent.
            stratified: One K from each of `batch` equal strata of the law, in random order: each K keeps its law exactly and
                the batch's mean varies less, but the estimates are slightly dependent.
        """
        if batch < 0 or (shared and stratified):
            raise DohyoError(f"batch is {batch}, shared {shared}: batch must be at least 0; a shared K cannot be stratified")
        u = _in_strata(batch, generator) if stratified else uniform(1 if shared else batch, generator)
        return self.terms(self.depth_law.quantile(u)).expand(batch).clone()

    def plans(self, batches: Sequence[int], generator: torch.Generator | None = None, stratified: bool = False) -> list[Tensor]:
        """The counts of a call of `plan` for each batch, drawn at once; for a generator on the CPU."""
        strata = [_in_strata(batch, generator) for batch in batches] if stratified else []
        u = torch.cat(strata) if strata else uniform(sum(batches), generator)
        return list(self.terms(self.depth_law.quantile(u)).split(list(batches)))

    def shared_plans(self, steps: int, generator: torch.Generator | None = None) -> list[int]:
        """The counts of `steps` calls of `plan(batch, generator, shared=True)`, drawn at once; for a generator on the CPU."""
        return self.terms(self.depth_law.quantile(uniform(steps, generator))).tolist()

    def reduce(self, log_w: Tensor, counts: Tensor) -> Tensor:
        """The estimates, (batch,) float64, from log_w (batch, width); row i holds `counts[i]` log-weights, then padding.

        Pure, differentiable to any order, unchecked, and free of synchronisation with the host. The padding may be anything,
        NaN included. If all weights of a block with a non-zero coefficient are zero, the estimate is -inf with gradient zero.
        """
        own = torch.arange(log_w.shape[-1], device=log_w.device) < counts[:, None]
        paths = self.paths(torch.where(own, log_w.double(), -torch.inf))
        return pick(paths, self.depth(counts)[:, None], by_sum=paths.is_cuda)

    def slopes(self, log_w: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """What `reduce` returns, without a graph, and the derivatives of the estimates by their log-weights, (batch, width)."""
        leaf = log_w.detach().double().requires_grad_()
        with torch.enable_grad():
            estimates = self.reduce(leaf, counts)
            (found,) = torch.autograd.grad(estimates.sum(), leaf)
        return estimates.detach(), found

    def fold(self, count: int) -> Fold | None:
        """`reduce` for one datum whose `count` log-weights come in pieces, at a memory that does not grow with their number;
        None where the arithmetic needs all of them at once."""
        return None

    def depths(self, width: int) -> Tensor:
        """The depths 0, 1, ... that `width` log-weights are enough for."""
        most = int(self.depth(torch.tensor([width])).clamp(min=-1, max=min(self.depth_law.cap, 2**62)))
        return torch.arange(most + 1)

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return name_of(type(self))

    @property
    def max_terms(self) -> float:
        """The most log-weights that one datum may need, or `math.inf`."""
        cap = self.depth_law.cap
        return math.inf if cap == math.inf else float(self.terms(torch.tensor(int(cap))))

    def unseen_share(self, draws: int) -> float:
        """Roughly the share of the variance, 0 to 1, that comes from depths which `draws` draws of K hardly reach.

        If it is large, the sample variance and every error bar computed from it are far too small.
        """
        return 0.0

    @property
    def kind(self) -> str:
        """What the estimates' mean is, in words."""
        if self.target_terms is None:
            return "neither a bound nor unbiased"
        return "unbiased" if self.target_terms == math.inf else f"unbiased for IWAE_{self.target_terms:.0f}"


def _in_strata(batch: int, generator: torch.Generator | None) -> Tensor:
    """One uniform number from each of `batch` equal parts of (0, 1], in random order."""
    u = uniform(batch, generator)
    return (torch.randperm(batch, generator=generator, device=u.device) + u) / batch


def name_of(cls: type) -> str:
    """SymmetricSUMO -> symmetric-sumo."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()


def pick(table: Tensor, column: Tensor, by_sum: bool) -> Tensor:
    """One cell from each row of a table (batch, columns), at the columns given (batch, 1).

    On a GPU gathering is a kernel launch of its own, while a compiler can fuse a sum with its neighbours.
    """
    if by_sum:
        return torch.where(torch.arange(table.shape[1], device=table.device) == column, table, 0.0).sum(-1)
    return table.gather(-1, column).squeeze(-1)


def check_cost(cost: float, max_terms: int | None, least: float = 1.0) -> None:
    if not math.isfinite(cost) or cost < least:
        raise DohyoError(f"cost is {cost}; it must be at least {least:g} log-weights for each datum")
    if cost > 2**48:
        raise DohyoError(f"cost is {cost}; it must be at most {2**48} log-weights for each datum")
    if max_terms is not None and cost > max_terms:
        raise DohyoError(f"cost is {cost}, more than the {max_terms} log-weights available; lower the cost")
