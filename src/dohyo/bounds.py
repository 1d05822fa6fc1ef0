"""Log-mean-exps over blocks of log-weights: the arithmetic of every estimator, in float64 and stable.

All functions take finite log_w (batch, width), see `settle`, are pure, and can be differentiated any number of times, also
at ties. `torch.logcumsumexp` is not used: its second derivative is NaN wherever the incoming gradient is zero.
"""

from functools import lru_cache, partial
from itertools import combinations
from math import comb, log

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Replaces log 0 in rows shifted to maximum 0: low enough that exp() gives exactly 0 beside any real weight, high enough that
# adding log 2 is not lost to rounding.
FLOOR = -1e12
_KEPT_CELLS = 2**24  # larger tables of pairs are not kept for the backward pass but computed again
_CELLS = 2**22  # the most cells of a temporary in `_by_pairs`
_SUMS = 2**20  # the most power sums at a time in `_by_powers`; with more, they are computed again in the backward pass
# Prefixes, on a CPU and on a GPU; with more, power sums are taken (results/throughput.json; no GPU was timed).
_MOST_PAIRED = (192, 4096)
_ONE_BY_ONE = 8  # the largest weights of a prefix; no other is more than 1/9 of its sum
_POWERS = 17  # of the others: 9^-17 is 6e-17


def settle(log_w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log_w - anchor, anchor, empty): rows shifted to maximum 0, a finite floor in place of -inf, and where the weights are 0.

    The shift keeps float64's digits for differences; the floor keeps NaN (inf - inf) out of values and gradients.
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

    On a GPU, where every step is a kernel launch, a small input goes through a table of all pairs instead.
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

    Each term is at most log 2 except for the largest weight of the prefix, for which the sum of the other weights is tracked
    separately. The others come from a table of log1p(-w_i / S_k) over all pairs, made in slices of bounded size, or, for many k,
    from power sums (`_by_powers`), with which time and memory grow as n log n, times the data. Both are exact to rounding. What
    is large is computed again in the backward pass.
    """
    width = log_w.shape[-1]
    top, others = _without_largest(log_w)
    rest = prefix_log_sum(others)
    total = log_add(top, rest)
    if width - first + 1 > _MOST_PAIRED[log_w.is_cuda]:
        without_each = _by_powers(others, total)[:, first - 1 :]
    else:
        without_each = _by_pairs(log_w, total, first)
    k = _integers(first, width + 1, log_w)
    return (-1 / k).log1p() - (without_each + (rest - total)[:, first - 1 :]) / k


def _without_largest(log_w: Tensor) -> tuple[Tensor, Tensor]:
    """The largest weight of each prefix, and a row whose prefixes hold the others: a new maximum sends the old one there."""
    top = log_w.cummax(-1).values
    others = torch.where(log_w[:, 1:] >= top[:, :-1], top[:, :-1], log_w[:, 1:])
    return top, torch.cat([torch.full_like(log_w[:, :1], FLOOR), others], -1)


def _by_powers(log_w: Tensor, total: Tensor) -> Tensor:
    r"""The sum of log1p(-w_i / S_k) over these weights, of which each is at most half of the prefix's sum S_k, for every k.

    The few largest are taken one by one, the others through :math:`\log(1 - r) = -\sum_p r^p / p`, cut off where it is
    exact in float64: only the power sums :math:`\sum_{i \le k} w_i^p` are needed, not all pairs of i and k.
    """
    found = torch.zeros_like(total)
    for _ in range(_ONE_BY_ONE - 1):  # the largest of all was taken before
        top, log_w = _without_largest(log_w)
        found = found + (-(top - total).exp()).log1p()

    def part(log_w: Tensor, total: Tensor, powers: Tensor) -> Tensor:
        sums = prefix_log_sum((powers * log_w).flatten(0, 1)).view(len(powers), *log_w.shape)
        return ((sums - powers * total).exp() / powers).sum(0)

    powers = _integers(1, _POWERS + 1, log_w)[:, None, None]
    if log_w.requires_grad and log_w.numel() * _POWERS > _SUMS:
        part = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    at_a_time = max(1, _SUMS // max(1, log_w.numel()))
    return found - torch.stack([part(log_w, total, own) for own in powers.split(at_a_time)]).sum(0)


def _by_pairs(log_w: Tensor, total: Tensor, first: int) -> Tensor:
    """The sum of log1p(-w_i / S_k) over all but the largest weight of each prefix, for k = first, ..., width, pair by pair."""
    width, where_top = log_w.shape[-1], log_w.cummax(-1).indices
    without_each = _without_each
    if log_w.requires_grad and log_w.numel() * width > _KEPT_CELLS:
        without_each = partial(checkpoint, _without_each, use_reentrant=False, preserve_rng_state=False)
    step = max(1, _CELLS // max(1, log_w.numel()))
    slices = [
        without_each(log_w, total, where_top, begin, min(begin + step, width))
        for begin in reversed(range(first - 1, width, step))  # the largest first: the others reuse its memory
    ]
    return torch.cat(slices[::-1], -1) if slices else total[:, :0]


def _without_each(log_w: Tensor, total: Tensor, where_top: Tensor, begin: int, end: int) -> Tensor:
    """`_by_pairs` for k = begin + 1, ..., end."""
    own, index = slice(begin, end), torch.arange(end, device=log_w.device)
    counted = (index <= index[own, None]) & (index != where_top[:, own, None])
    ratio = torch.where(counted, log_w[:, None, :end] - total[:, own, None], -torch.inf).exp()
    return (-ratio).log1p().sum(-1)


def leave_out_mean(log_w: Tensor, left_out: int) -> Tensor:
    """The average log-mean over all blocks that leave out `left_out` of the weights, (batch,).

    Only the subsets that are one larger are listed: leaving one out of each reaches every subset of the size wanted.
    """
    batch, k = log_w.shape
    if left_out == 0:
        return log_w.logsumexp(-1) - log(k)
    blocks = log_w[:, _subsets(k, k - left_out + 1, log_w.device)].flatten(0, 1)
    whole = prefix_log_mean(blocks)[:, -1]
    average = whole - leave_one_out_differences(blocks, blocks.shape[-1])[:, 0]
    return average.view(batch, comb(k, left_out - 1)).mean(-1)


def tree_means(log_w: Tensor, m: int, levels: int) -> Tensor:
    """A[:, l, L]: over the first m 2^L weights, the average log-mean of their blocks of m 2^l; 0 where l > L."""
    block = log_w[:, : m << levels].unflatten(-1, (-1, m)).logsumexp(-1)
    powers = 2 ** torch.arange(levels + 1, device=log_w.device)
    table = []
    for level in range(levels + 1):
        if level:
            block = log_add(block[:, ::2], block[:, 1::2])
        blocks = powers[: levels - level + 1]
        average = block.cumsum(-1)[:, blocks - 1] / blocks - log(m << level)
        table.append(torch.cat([torch.zeros_like(average[:, :1]).expand(-1, level), average], -1))
    return torch.stack(table, 1)


@lru_cache(maxsize=32)
def _subsets(k: int, size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(list(combinations(range(k), size)), device=device)


def _integers(start: int, stop: int, like: Tensor) -> Tensor:
    return torch.arange(start, stop, dtype=like.dtype, device=like.device)
