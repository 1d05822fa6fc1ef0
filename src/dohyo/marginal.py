"""The waist: plan -> rows -> log-weights -> pad -> reduce. Models never see K; estimators never see x or z."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dohyo.contract import Model, bound, one_for_each
from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.packing import reduce_packed, rows

AT_ONCE = 2**22  # the most log-weights kept at a time where no gradient is asked


def estimate(
    log_weights: Callable[[Tensor], Tensor],
    batch: int,
    estimator: Estimator,
    generator: torch.Generator | None = None,
    *,
    shared: bool = False,
    max_rows: int | None = None,
) -> Tensor:
    """Estimates of log p(x) for a batch, from any source of log-weights.

    Args:
        log_weights: rows -> (len(rows),); rows[i] is the datum whose fresh log-weight is wanted i-th.
        batch: How many data there are.
        generator: Draws K. The source's own noise comes from wherever it takes it, usually torch's global generator.
        shared: One K for the whole batch instead of one for each datum.
        max_rows: The most rows asked for in one call. Where no gradient is asked, at most `AT_ONCE` log-weights are kept besides,
            however large K is: the rest is reduced as it comes. With gradients autograd keeps everything.

    Returns:
        (batch,) float64.

    Example:
        >>> import dohyo
        >>> sd = 0.5  # log-normal weights with mean one, so that log p(x) = 0
        >>> source = lambda rows: sd * torch.randn(len(rows)) - sd**2 / 2
        >>> _ = torch.manual_seed(0)
        >>> estimates = dohyo.estimate(source, 10_000, dohyo.MultilevelRR(4), torch.Generator().manual_seed(0))
        >>> abs(float(estimates.mean())) < 0.02
        True
    """
    if batch < 1:
        raise DohyoError(f"the batch is empty (batch={batch}); give at least one datum")
    if max_rows is not None and max_rows < 1:
        raise DohyoError(f"max_rows is {max_rows}; it must be at least 1, or None for no limit")
    return of_counts(log_weights, estimator.plan(batch, generator, shared=shared), estimator, max_rows)


def of_counts(
    log_weights: Callable[[Tensor], Tensor], counts: Tensor, estimator: Estimator, max_rows: int | None, checked: bool = True
) -> Tensor:
    """`estimate` for these counts; where they are few and the log-weights not checked, a GPU is never waited for."""
    if not torch.is_grad_enabled() and int(counts.sum()) > AT_ONCE:
        return _streamed(log_weights, counts, estimator, min(max_rows or AT_ONCE, AT_ONCE))
    wanted = rows(counts)
    packed = torch.cat([one_for_each(part, log_weights(part)) for part in wanted.split(max_rows or max(1, len(wanted)))])
    if checked:
        check_log_weights(packed)
    return reduce_packed(estimator.reduce, packed, counts)


def _streamed(log_weights: Callable[[Tensor], Tensor], counts: Tensor, estimator: Estimator, max_rows: int) -> Tensor:
    """The same numbers, up to rounding, at bounded memory: data are reduced in groups, and a large one piece by piece."""
    largest, values = int(counts.max()), []
    if largest > AT_ONCE and estimator.fold(largest) is None:
        raise DohyoError(f"{type(estimator).__name__} needs all {largest} log-weights of a datum at once, and {AT_ONCE} is the "
                         "most; lower the cost, cap its law, or use IWAE or MultilevelRR, which have no such limit")  # fmt: skip
    stream = _Stream(log_weights, counts, max_rows)
    for own in _groups(counts.tolist()):
        if sum(own) > AT_ONCE and (fold := estimator.fold(own[0])) is not None:
            for piece in stream.take(own[0]):
                fold.add(piece)
            values.append(fold.value()[None].to(piece.device))
        else:
            values.append(reduce_packed(estimator.reduce, torch.cat(list(stream.take(sum(own)))), torch.tensor(own)))
    return torch.cat(values)


def _groups(counts: list[int]) -> Iterator[list[int]]:
    """The counts of consecutive data, together at most `AT_ONCE` unless a single one is more."""
    group: list[int] = []
    for count in counts:
        if group and sum(group) + count > AT_ONCE:
            yield group
            group = []
        group.append(count)
    yield group


class _Stream:
    """The packed log-weights in order, asked for `max_rows` at a time."""

    def __init__(self, log_weights: Callable[[Tensor], Tensor], counts: Tensor, max_rows: int) -> None:
        self.log_weights, self.ends, self.max_rows = log_weights, counts.cumsum(0), max_rows
        self.asked, self.left = 0, torch.empty(0)

    def take(self, wanted: int) -> Iterator[Tensor]:
        """The next `wanted` log-weights, in pieces."""
        while wanted:
            if not len(self.left):
                places = torch.arange(self.asked, min(self.asked + self.max_rows, int(self.ends[-1])), device=self.ends.device)
                chunk = torch.searchsorted(self.ends, places, right=True)
                self.left = one_for_each(chunk, self.log_weights(chunk))
                check_log_weights(self.left)
                self.asked += len(places)
            piece, self.left = self.left[:wanted], self.left[wanted:]
            wanted -= len(piece)
            yield piece


def log_marginal(
    model: Model,
    x: Tensor,
    estimator: Estimator,
    generator: torch.Generator | None = None,
    *,
    shared: bool = False,
    max_rows: int | None = None,
) -> Tensor:
    """Estimates of log p(x) under a model, (batch,) float64, one for each datum x[i]; see `estimate`."""
    return estimate(bound(model, x), len(x), estimator, generator, shared=shared, max_rows=max_rows)


def reduce(log_w: Tensor, counts: Tensor, estimator: Estimator) -> Tensor:
    """`estimator.reduce` with its input checked: log_w (batch, width), row i holding counts[i] log-weights.

    Example:
        >>> import dohyo
        >>> dohyo.reduce(torch.tensor([[0.0, 2.0]]), torch.tensor([3]), dohyo.IWAE(2))
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: counts go up to 3, but log_w has only 2 columns
    """
    wrong_type = not log_w.is_floating_point() or counts.is_floating_point()
    if log_w.ndim != 2 or wrong_type or counts.shape != log_w.shape[:1]:
        raise DohyoError(
            f"log_w is {log_w.dtype} {tuple(log_w.shape)} and counts {counts.dtype} {tuple(counts.shape)}; "
            "they must be floats (batch, width) and integers (batch,)"
        )
    if len(counts) == 0:
        raise DohyoError("the batch is empty; give at least one datum")
    if int(counts.max()) > log_w.shape[1]:
        raise DohyoError(f"counts go up to {int(counts.max())}, but log_w has only {log_w.shape[1]} columns")
    depth = estimator.depth(counts)
    wrong = (depth < 0) | (depth > estimator.depth_law.cap) | (estimator.terms(depth) != counts)
    if bool(wrong.any()):
        raise DohyoError(f"{estimator} never uses {int(counts[wrong][0])} log-weights; take the counts from its plan")
    check_log_weights(log_w[torch.arange(log_w.shape[1], device=log_w.device) < counts[:, None]])
    return estimator.reduce(log_w, counts)


def check_log_weights(log_w: Tensor) -> None:
    """A ValueError if a log-weight is NaN or +inf; -inf, a weight of zero, is fine."""
    bad = log_w.isnan() | (log_w == torch.inf)
    if bool(bad.any()):
        raise DohyoError(
            f"{int(bad.sum())} of {log_w.numel()} log-weights are NaN or +inf; "
            "check the model for overflow (log p(x, z) - log q(z; x) must be finite, or -inf)"
        )
