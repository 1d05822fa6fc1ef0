r"""The differences that the estimators' series are made of, one k at a time, and their gradients for each datum.

All three have the mean of a step from one bound to a later one: SUMO's and the leave-one-out difference step from k to k + 1
weights, the multilevel one from k to 2k.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dohyo.bounds import leave_one_out_differences, prefix_log_mean, settle, tree_means
from dohyo.contract import bound
from dohyo.packing import rows

SERIES = {"sumo": "SUMO", "leave-one-out": "leave-one-out", "multilevel": "multilevel"}
_CHUNK = 50  # data whose graphs are held at a time


def weights_needed(series: str, k: int) -> int:
    return 2 * k if series == "multilevel" else k + 1


def difference(series: str, log_w: Tensor, k: int) -> Tensor:
    """The difference of index k for each row of log_w (batch, width), from its first `weights_needed`; (batch,).

    Example:
        >>> log_w = torch.tensor([[0.0, 1.0, 2.0]])
        >>> difference("sumo", log_w, 2), difference("leave-one-out", log_w, 2)  # IWAE_3 - IWAE_2, and its average
        (tensor([0.6889]), tensor([0.0843]))
    """
    settled = settle(log_w[:, : weights_needed(series, k)])[0]
    if series == "leave-one-out":
        return leave_one_out_differences(settled, k + 1)[:, 0]
    if series == "multilevel":
        means = tree_means(settled, k, 1)
        return means[:, 1, 1] - means[:, 0, 1]
    bounds = prefix_log_mean(settled)
    return bounds[:, -1] - bounds[:, -2]


def coefficients(series: str, log_w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The differences (batch,) and what each log-weight's gradient is multiplied by in theirs, (batch, width).

    As in the objectives: the arithmetic is differentiated on its own, the network afterwards.
    """
    log_w = log_w.detach().requires_grad_()
    value = difference(series, log_w, k)
    (coefficient,) = torch.autograd.grad(value.sum(), log_w)
    return value.detach(), coefficient


def second_moments(model: Any, x: Tensor, ks: Sequence[int], advance: Any = lambda share: None) -> dict[str, Tensor]:
    """For each series E[d_k^2] and E||grad d_k||^2 over theta, (2, ks), from one sequence of weights for each row of x."""
    theta = list(model.decoder_parameters())
    names = [(series, k) for series in SERIES for k in ks]
    width = max(weights_needed(series, k) for series, k in names)
    total = torch.zeros(2, len(names), dtype=torch.float64)
    for start in range(0, len(x), _CHUNK):
        part = [bound(model, datum)(rows(torch.tensor([width]))) for datum in x[start : start + _CHUNK].split(1)]
        log_w = torch.stack(part).double()
        values, weights = zip(*(coefficients(series, log_w, k) for series, k in names), strict=True)
        total[0] += torch.stack(values).square().sum(-1).cpu()
        for i, graph in enumerate(part):  # one datum at a time: the square comes before the mean
            each = torch.stack([weight[i] for weight in weights]).to(graph.dtype)
            gradients = torch.autograd.grad(graph, theta, each, is_grads_batched=True)
            total[1] += sum(gradient.flatten(1).double().square().sum(-1) for gradient in gradients).cpu()  # type: ignore[union-attr]
        advance((start + len(part)) / len(x))
    moments = (total / len(x)).view(2, len(SERIES), len(ks))
    return {series: moments[:, i] for i, series in enumerate(SERIES)}


def cross_moments(log_w: Tensor, log_px: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    r"""For each series E[d_i d_j] over the rows of log_w, where i < j, and zero elsewhere; (ks, ks), or as many as fit log_w.

    The products of SUMO's differences are all noise, so two things are used that leave their means as they are. Where
    i < j, :math:`\Delta_j` does not change when the first i + 1 weights change places: :math:`\Delta_i` may be averaged over
    which of them comes last, and that is the leave-one-out difference. And :math:`(w_{j+1} / p(x) - 1) / (j + 1)`, the first
    order of what the new weight adds to :math:`\Delta_j`, has mean zero whatever the weights before it are; log_px is exact.
    """
    width = log_w.shape[1]
    found = {series: [difference(series, log_w, k) for k in ks if weights_needed(series, k) <= width] for series in SERIES}
    table = {}
    for series, later in found.items():
        first = found[series]
        if series == "sumo":
            first = found["leave-one-out"]
            later = [d - (log_w[:, k] - log_px).expm1() / (k + 1) for d, k in zip(later, ks, strict=False)]
        table[series] = torch.triu(torch.stack(first) @ torch.stack(later).T / len(log_w), 1)
    return table
