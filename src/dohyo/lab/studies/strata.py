r"""The mean of a roulette estimator, with deep K examined as closely as shallow ones.

.. math:: E[\hat Y] = \sum_b \sum_{K \in b} P(K)\, E[\hat Y_K]

Plain draws hardly ever have a deep K, and so miss what those add to the mean. Here the depths are cut into strata b, each gets
log-weights of its own, and in each every K counts with its probability.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dohyo.contract import bound
from dohyo.estimators.roulette import PrefixRoulette
from dohyo.packing import rows

_MOST_DRAWS = 32  # of one stratum for each datum
_CHUNK = 10  # data at a time


def strata(depth: int) -> list[tuple[int, int]]:
    """First and last K of each stratum, doubling in length.

    Example:
        >>> strata(8)
        [(0, 0), (1, 1), (2, 3), (4, 7), (8, 8)]
    """
    firsts = [0, *(2**i for i in range(depth.bit_length()))]
    return [(first, min(depth, after - 1)) for first, after in zip(firsts, [*firsts[1:], depth + 1], strict=True)]


@torch.no_grad()
def mean_over_every_k(
    model: Any,
    x: Tensor,
    estimators: Mapping[str, PrefixRoulette],
    depth: int,
    max_rows: int | None = None,
    advance: Callable[[float], None] = lambda share: None,
) -> dict[str, tuple[float, float]]:
    """The mean over x of each estimator, and the standard error of its noise; all use the same log-weights.

    Args:
        depth: A deeper K counts as this one, so that the mean is that of IWAE with m + depth terms.
    """
    most = max(estimator.m for estimator in estimators.values())
    found = {name: torch.zeros(2, dtype=torch.float64) for name in estimators}
    parts, done = strata(depth), 0
    for data in x.split(_CHUNK):
        source = bound(model, data)
        for first, last in parts:
            draws = min(_MOST_DRAWS, max(2, depth // (last + 1)))
            wanted = rows(torch.full((len(data),), draws * (most + last)))
            packed = torch.cat([source(part) for part in wanted.split(max_rows or len(wanted))])
            log_w = packed.view(len(data) * draws, most + last).double()
            for name, estimator in estimators.items():
                own = contribution(estimator, log_w, first, last, last == depth).view(len(data), draws)
                found[name] += torch.stack([own.mean(-1).sum(), own.var(-1).sum() / draws]).cpu()
        done += len(data)
        advance(done / len(x))
    return {name: (float(total[0]) / len(x), math.sqrt(total[1]) / len(x)) for name, total in found.items()}


def contribution(estimator: PrefixRoulette, log_w: Tensor, first: int, last: int, deepest: bool) -> Tensor:
    """The sum over K from first to last of P(K) times the estimate at K, for each row; the deepest takes what is beyond it."""
    survival = estimator.law.survival(torch.arange(first, last + 2))
    survival[0] = 1.0 if first == 0 else survival[0]
    if deepest:
        survival[-1] = 0.0
    probability = (survival[:-1] - survival[1:]).to(log_w.device)
    paths = estimator.paths(log_w[:, : estimator.m + last])[:, first : last + 1]
    return (paths * probability).sum(-1)
