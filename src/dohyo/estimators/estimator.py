"""What every estimator is: a plan of how many log-weights each datum gets, and a reduction of those to log p(x)."""

import math
import re
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.laws import Law, uniform


class Estimator(ABC):
    """Log-weights in, an estimate of log p(x) out.

    A final subclass says which numbers of terms it can be asked for (`depth_law`, `terms`) and what the estimate is at
    each of them (`paths`); planning and reducing follow.
    """

    # -- what a final class gives ---------------------------------------------------------------------------------------
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
        """The estimate at every depth that the width allows, (batch, depths), all from the same log-weights.

        Entry [i, K] uses the first `terms(K)` weights of row i only. This is what measures a variance stratified over K.
        """

    @property
    @abstractmethod
    def expected_cost(self) -> float:
        """The mean number of log-weights for each datum, exact."""

    @property
    @abstractmethod
    def target_terms(self) -> float | None:
        """n where the estimate is unbiased for IWAE_n, `math.inf` where it is for log p(x) itself, None for neither."""

    @property
    @abstractmethod
    def finite_variance(self) -> bool | None:
        """Whether the variance is finite if the weights' moments are; None where it is not known."""

    @classmethod
    @abstractmethod
    def at_cost(cls, cost: float, max_terms: int | None = None) -> Self:
        """The member of this class whose expected cost is nearest to `cost`, with at most `max_terms` terms if given."""

    # -- what follows ---------------------------------------------------------------------------------------------------
    def plan(
        self,
        batch: int,
        generator: torch.Generator | None = None,
        shared: bool = False,
        stratified: bool = False,
    ) -> Tensor:
        """How many log-weights each datum gets, (batch,) int64: all the randomness of K.

        Args:
            shared: One K for the whole batch. Each estimate keeps its mean, but they are no longer independent.
            stratified: Spread the batch's depths evenly over the law, one for each of `batch` equal strata, in random
                order: each K keeps exactly its law, the batch's mean varies less, and the data are slightly dependent.
        """
        if batch < 0 or (shared and stratified):
            raise DohyoError(f"batch is {batch}, shared {shared}: batch must be at least 0; a shared K cannot be stratified")
        u = uniform(1 if shared else batch, generator)
        if stratified:
            u = (torch.randperm(batch, generator=generator, device=u.device) + u) / batch
        return self.terms(self.depth_law.quantile(u)).expand(batch).clone()

    def shared_plans(self, steps: int, generator: torch.Generator | None = None) -> list[int]:
        """The counts of `steps` calls of `plan(batch, generator, shared=True)`, made at once, for a generator on the CPU."""
        counts: list[int] = self.terms(self.depth_law.quantile(uniform(steps, generator))).tolist()
        return counts

    def reduce(self, log_w: Tensor, counts: Tensor) -> Tensor:
        """The estimates, (batch,) float64, from log_w (batch, width); row i holds `counts[i]` log-weights, then anything.

        Pure, differentiable to any order, unchecked, and without a synchronisation with the host. What lies in the
        padding, NaN included, touches neither value nor gradient. If a block with a non-zero coefficient has only
        zero weights the estimate is -inf with gradient zero.
        """
        own = torch.arange(log_w.shape[-1], device=log_w.device) < counts[:, None]
        paths = self.paths(torch.where(own, log_w.double(), -torch.inf))
        return pick(paths, self.depth(counts)[:, None], by_sum=paths.is_cuda)

    def depths(self, width: int) -> Tensor:
        """The depths 0, 1, ... that `width` log-weights allow."""
        most = int(self.depth(torch.tensor([width])).clamp(min=-1, max=min(self.depth_law.cap, 2**62)))
        return torch.arange(most + 1)

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return name_of(type(self))

    @property
    def max_terms(self) -> float:
        """The most log-weights that one datum may need, or `math.inf`."""
        cap = self.depth_law.cap
        return math.inf if cap == math.inf else float(self.terms(torch.tensor(int(cap))))

    def unseen_share(self, draws: int) -> float:
        """About which share of the variance comes from depths that `draws` draws of K hardly reach, 0 to 1.

        Where it is large the sample variance, and every error bar made of it, is far too small.
        """
        return 0.0

    @property
    def kind(self) -> str:
        """What the mean of the estimates is, in words."""
        if self.target_terms is None:
            return "neither a bound nor unbiased"
        return "unbiased" if self.target_terms == math.inf else f"unbiased for IWAE_{self.target_terms:.0f}"


def name_of(cls: type) -> str:
    """SymmetricSUMO -> symmetric-sumo."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()


def pick(table: Tensor, column: Tensor, by_sum: bool) -> Tensor:
    """The cell of each row (batch, columns) in a column (batch, 1).

    A sum is what a compiler can join to what is computed before and after, where picking is a launch of its own on a GPU.
    """
    if by_sum:
        return torch.where(torch.arange(table.shape[1], device=table.device) == column, table, 0.0).sum(-1)
    return table.gather(-1, column).squeeze(-1)


def check_integer(name: str, value: float, least: int) -> None:
    if not math.isfinite(value) or value != int(value) or value < least:
        raise DohyoError(f"{name} is {value}; it must be an integer of at least {least}")


def check_cost(cost: float, max_terms: int | None, least: float = 1.0) -> None:
    if not math.isfinite(cost) or cost < least:
        raise DohyoError(f"cost is {cost}; it must be at least {least:g} log-weights for each datum")
    if max_terms is not None and cost > max_terms:
        raise DohyoError(f"cost is {cost}, more than the {max_terms} log-weights that there are; lower the cost")
