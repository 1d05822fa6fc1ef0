"""Log-mean-exps over blocks of log-weights: the arithmetic of every estimator, in float64 and stable.

All functions take log_w (batch, width), finite (see `settle`), are pure, and can be differentiated as often as wanted,
at ties too. `torch.logcumsumexp` is not used: its second derivative is NaN wherever the incoming gradient is zero.
"""

from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Any

import torch
from torch import Tensor

# What stands for log 0 after a row has been shifted to have maximum 0: low enough that exp() of it is exactly 0 beside any
# real weight, high enough that log 2 added to it is not lost.
FLOOR = -1e12
_KEPT_CELLS = 2**24  # tables of pairs up to so many cells are kept whole; beyond, the backward pass makes them again
_CELLS = 2**22  # most cells of one temporary in the pairwise part of `leave_one_out_differences`


def settle(log_w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log_w - anchor, anchor, empty): rows shifted to maximum 0, with a finite floor in place of -inf.

    The shift keeps float64's digits for differences; the floor keeps NaN (inf - inf) out of values and gradients.
    `empty` marks the weights that are zero.
    """
    anchor = log_w.detach().amax(-1, keepdim=True)
    anchor = torch.where(anchor == -torch.inf, 0.0, anchor)
    empty = log_w == -torch.inf
    return torch.where(empty, FLOOR, log_w - anchor), anchor, empty


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """log(exp a + exp b)."""
    top = torch.maximum(a, b).detach()
    return top + ((a - top).exp() + (b - top).exp()).log()


def prefix_log_sum(log_w: Tensor) -> Tensor:
    """log(w_1 + ... + w_k) for every k, by a scan of log2(width) doubling steps.

    On a GPU, where each step would be a launch of its own, by all pairs at once, while they are few.
    """
    if log_w.is_cuda and log_w.numel() * log_w.shape[-1] <= _KEPT_CELLS:
        return _prefix_log_sum_by_pairs(log_w)
    step = 1
    while step < log_w.shape[-1]:
        log_w = torch.cat([log_w[:, :step], log_add(log_w[:, :-step], log_w[:, step:])], -1)
        step *= 2
    return log_w


def _prefix_log_sum_by_pairs(log_w: Tensor) -> Tensor:
    index = torch.arange(log_w.shape[-1], device=log_w.device)
    pairs = torch.where(index <= index[:, None], log_w[:, None, :], -torch.inf)
    top = pairs.detach().amax(-1)
    return top + (pairs - top[..., None]).exp().sum(-1).log()


def prefix_log_mean(log_w: Tensor) -> Tensor:
    r"""IWAE_k of the first k weights for every k, :math:`\log \frac1k \sum_{i \le k} w_i`."""
    return prefix_log_sum(log_w) - _integers(1, log_w.shape[-1] + 1, log_w).log()


def leave_one_out_differences(log_w: Tensor, first: int) -> Tensor:
    r"""Log-mean of the first k weights minus the average of its k leave-one-out log-means, for k = first, ..., width.

    .. math:: d_k = \log\tfrac{k-1}{k} - \frac1k \sum_{i \le k} \log(1 - w_i / S_k), \qquad S_k = w_1 + \dots + w_k

    Each term is at most log 2 for every weight but the largest of the prefix, whose rest is carried as a sum of its own:
    whenever a new maximum arrives the old one joins the rest, else the newcomer does. So only a table of
    log1p(-w_i / S_k) over pairs is needed: up to width^2 cells for each datum, made in slices of bounded size; autograd, if
    asked, keeps 16 bytes of each, or from a few million cells on makes them again in the backward pass, so that memory stays
    bounded where a rare K is huge. At width 2,000 one datum takes about 0.1 s of a core; times and peak memory, with and
    without the backward pass, are in `results/throughput.json`.
    """
    width = log_w.shape[-1]
    top, where_top = log_w.cummax(-1)
    loser = torch.where(log_w[:, 1:] >= top[:, :-1], top[:, :-1], log_w[:, 1:])
    rest = prefix_log_sum(torch.cat([torch.full_like(log_w[:, :1], FLOOR), loser], -1))
    total = log_add(top, rest)
    again = log_w.requires_grad and log_w.numel() * width > _KEPT_CELLS
    slices = []
    step = max(1, _CELLS // max(1, log_w.numel()))
    for begin in reversed(range(first - 1, width, step)):  # the largest first: the others then fit into the memory it leaves
        arguments = (log_w, total, where_top, begin, min(begin + step, width))
        slices.append(_MadeAgain.apply(*arguments) if again else _without_each(*arguments))  # type: ignore[no-untyped-call]
    others = torch.cat(slices[::-1], -1) if slices else total[:, :0]
    k = _integers(first, width + 1, log_w)
    return (-1 / k).log1p() - (others + (rest - total)[:, first - 1 :]) / k


def _without_each(log_w: Tensor, total: Tensor, where_top: Tensor, begin: int, end: int) -> Tensor:
    """The sum of log1p(-w_i / S_k) over i <= k but for the largest, for k = begin + 1, ..., end."""
    own, index = slice(begin, end), torch.arange(end, device=log_w.device)
    counted = (index <= index[own, None]) & (index != where_top[:, own, None])
    ratio = torch.where(counted, log_w[:, None, :end] - total[:, own, None], -torch.inf).exp()
    return (-ratio).log1p().sum(-1)


class _MadeAgain(torch.autograd.Function):
    """`_without_each`, of which nothing is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, log_w: Tensor, total: Tensor, where_top: Tensor, begin: int, end: int) -> Tensor:
        ctx.save_for_backward(log_w, total, where_top)
        ctx.ends = begin, end
        return _without_each(log_w, total, where_top, begin, end)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        log_w, total, where_top = ctx.saved_tensors
        twice = torch.is_grad_enabled()  # a second derivative is wanted: then the graph must reach the arguments themselves
        with torch.enable_grad():
            views = (log_w.view_as(log_w), total.view_as(total))  # total comes from log_w, which would count twice
            log_w, total = views if twice else (view.detach().requires_grad_() for view in views)
            found = _without_each(log_w, total, where_top, *ctx.ends)
        return *torch.autograd.grad(found, (log_w, total), gradients[0], create_graph=twice), None, None, None


def leave_out_mean(log_w: Tensor, left_out: int) -> Tensor:
    """The average log-mean over all blocks that leave out `left_out` of the weights, (batch,).

    All subsets of one size are reached by leaving one out of the subsets that are one larger, so only those are listed.
    """
    batch, k = log_w.shape
    if left_out == 0:
        return log_w.logsumexp(-1) - _integers(k, k + 1, log_w).log().squeeze()
    blocks = log_w[:, _subsets(k, k - left_out + 1, log_w.device)].flatten(0, 1)
    whole = prefix_log_mean(blocks)[:, -1]
    average = whole - leave_one_out_differences(blocks, blocks.shape[-1])[:, 0]
    return average.view(batch, comb(k, left_out - 1)).mean(-1)


def tree_means(log_w: Tensor, m: int, levels: int) -> Tensor:
    """A[:, l, L]: over the first m 2^L weights, the average log-mean of their blocks of m 2^l; 0 where l > L."""
    block = log_w[:, : m << levels].unflatten(-1, (-1, m)).logsumexp(-1)
    table = []
    for level in range(levels + 1):
        if level:
            block = log_add(block[:, ::2], block[:, 1::2])
        blocks = 2 ** torch.arange(levels - level + 1, device=log_w.device)
        average = block.cumsum(-1)[:, blocks - 1] / blocks - _integers(m << level, (m << level) + 1, log_w).log()
        table.append(torch.cat([torch.zeros_like(average[:, :1]).expand(-1, level), average], -1))
    return torch.stack(table, 1)


@lru_cache(maxsize=32)
def _subsets(k: int, size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(list(combinations(range(k), size)), device=device)


def _integers(start: int, stop: int, like: Tensor) -> Tensor:
    return torch.arange(start, stop, dtype=like.dtype, device=like.device)
