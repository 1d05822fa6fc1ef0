"""Folds: an estimate from log-weights that come in pieces of any size, at a memory that does not grow with their number.

Log-sum-exp is associative, so sums over prefixes and over the blocks of a tree are found piece by piece. `Estimator.reduce` is
the same arithmetic on all log-weights at once; a fold is for one datum, without gradients.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from dohyo.bounds import FLOOR, log_add


class Fold(ABC):
    """One datum's log-weights, added in pieces (n,), and the estimate in the end."""

    def __init__(self) -> None:
        self.count = 0
        self.anchor: float | None = None  # is subtracted, to keep float64's digits for differences

    def add(self, log_w: Tensor) -> None:
        log_w, empty = log_w.double(), log_w == -math.inf
        if self.anchor is None and not bool(empty.all()):
            self.anchor = float(log_w.max())
        self._add(torch.where(empty, FLOOR, log_w - (self.anchor or 0.0)), empty)  # as `bounds.settle`

    @abstractmethod
    def _add(self, log_w: Tensor, empty: Tensor) -> None:
        """Take finite log-weights in, and where the weights are zero; counts them."""

    @abstractmethod
    def _value(self) -> Tensor:
        """The estimate for finite log-weights, or -inf."""

    def value(self) -> Tensor:
        """The estimate from all that was added, a float64 scalar."""
        return self._value() + (self.anchor or 0.0)


class TreeFold(Fold):
    """Averages over blocks of m, 2m, 4m, ... log-weights, up to `levels` doublings; `combine` makes the estimate of them.

    A block is closed when its last log-weight has come; at each level at most one closed block waits for its sibling.
    """

    def __init__(self, m: int, levels: int, combine: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.m, self.levels, self.combine = m, levels, combine
        self.open = torch.empty(0, dtype=torch.float64)  # the log-sum of the block that is not closed yet, if there is one
        self.open_empty = True
        self.dead = False  # all weights of some block are zero
        self.waiting = [self.open] * (levels + 1)
        self.sums: list[Tensor | float] = [0.0] * (levels + 1)

    def _add(self, log_w: Tensor, empty: Tensor) -> None:
        head = min(len(log_w), -self.count % self.m)  # what is missing in the open block
        whole = (len(log_w) - head) // self.m * self.m
        if head:
            self._extend(log_w[:head], empty[:head])
            if (self.count + head) % self.m == 0:
                self.dead |= self.open_empty
                self._push(self.open)
                self.open, self.open_empty = self.open[:0], True
        self.count += len(log_w)
        blocks = slice(head, head + whole)
        if whole:
            self.dead |= bool(empty[blocks].view(-1, self.m).all(-1).any())
            self._push(log_w[blocks].view(-1, self.m).logsumexp(-1))
        if head + whole < len(log_w):
            self._extend(log_w[head + whole :], empty[head + whole :])

    def _extend(self, log_w: Tensor, empty: Tensor) -> None:
        self.open = torch.cat([self.open.to(log_w.device), log_w]).logsumexp(-1, keepdim=True)
        self.open_empty &= bool(empty.all())

    def _push(self, block: Tensor) -> None:
        """Enter the log-sums of closed blocks of m, and of the larger blocks that they close."""
        for level in range(self.levels + 1):
            self.sums[level] = self.sums[level] + block.sum()
            block = torch.cat([self.waiting[level].to(block.device), block])
            pairs = block[: len(block) // 2 * 2].view(-1, 2)
            self.waiting[level] = block[len(pairs) * 2 :]
            if not len(pairs):
                return
            block = log_add(pairs[:, 0], pairs[:, 1])

    def _value(self) -> Tensor:
        sums = torch.stack([torch.as_tensor(total, dtype=torch.float64).cpu() for total in self.sums])
        sizes = self.m * 2 ** torch.arange(self.levels + 1, dtype=torch.float64)
        means = sums / (self.count / sizes) - sizes.log()
        return torch.tensor(-math.inf, dtype=torch.float64) if self.dead else self.combine(means)


class PrefixFold(Fold):
    """The sum of weighted differences of the log-means of prefixes m, m + 1, ..., and the log-mean of all.

    Args:
        excess: The weights of the differences first, ..., last - 1, counted from 1.
        offset: What is added in the end, from the number of differences.
    """

    def __init__(self, m: int, excess: Callable[[int, int], Tensor], offset: Callable[[int], float]) -> None:
        super().__init__()
        self.m, self.excess, self.offset = m, excess, offset
        self.total = torch.empty(0, dtype=torch.float64)  # the log-sum of the prefix, if there is one
        self.alive = 0  # weights that are not zero
        self.dead = False
        self.sum: Tensor | float = 0.0

    def _add(self, log_w: Tensor, empty: Tensor) -> None:
        # The prefix so far stands before the piece as one weight; the first piece begins with nothing before it.
        sums = torch.cat([self.total.to(log_w.device), log_w]).logcumsumexp(0)  # no gradient is needed here
        alive = torch.cat([empty.new_full((1,), self.alive, dtype=torch.long), (~empty).cumsum(0) + self.alive])[-len(sums) :]
        shortest = self.count + len(log_w) + 1 - len(sums)  # the length of the prefix sums[0]
        first = max(self.m, shortest)
        self.count += len(log_w)
        if self.count > first:
            k = torch.arange(first, self.count + 1, dtype=torch.float64, device=log_w.device)
            bound = sums[first - shortest :] - k.log()
            weights = self.excess(first - self.m + 1, self.count - self.m + 1).to(log_w.device)
            self.sum = self.sum + ((bound[1:] - bound[:-1]) * weights).sum()
            self.dead |= bool(((alive[first - shortest : -1] == 0) & (weights != 0)).any())
        self.total, self.alive = sums[-1:], int(alive[-1])

    def _value(self) -> Tensor:
        if self.dead or self.alive == 0:
            return torch.tensor(-math.inf, dtype=torch.float64)
        value = self.total[0] - math.log(self.count) + self.sum + self.offset(self.count - self.m)
        return torch.as_tensor(value, dtype=torch.float64).cpu()
