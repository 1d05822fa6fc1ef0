"""Tensors of several runs side by side in one table, a row for each run, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def flattened(tensors: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Each run's tensors in one row of a table: the table, and for each tensor its view of all runs, (runs, ...).

    The tensors themselves become views of the table: changing one changes the other.
    """
    flat = torch.cat([flat_row([own.detach()[None] for own in row]) for row in tensors])
    for row, own in zip(flat, tensors, strict=True):
        for tensor, view in zip(own, unflattened(row, own), strict=True):
            tensor.data = view
    return flat, unflattened(flat, [torch.empty(len(tensors), *tensor.shape, device="meta") for tensor in tensors[0]])


def flat_row(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors (runs, ...) side by side in a table (runs, numbers)."""
    flat = [tensor.reshape(len(tensor), -1) for tensor in tensors]
    spare = [_room(part.shape[1]) - part.shape[1] for part in flat]
    return torch.cat([pad(part, (0, more)) if more else part for part, more in zip(flat, spare, strict=True)], 1)


def row_length(tensors: Sequence[Tensor]) -> int:
    """The number of columns in `flat_row` of these tensors."""
    return sum(_room(tensor[0].numel()) for tensor in tensors)


def unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `flat_row` put side by side, as views; those of one run if `flat` is one row."""
    views, start = [], 0
    for tensor in like:
        size = tensor.numel() // (len(flat) if flat.ndim == 2 else 1)
        views.append(flat[..., start : start + size].view(tensor.shape))
        start += _room(size)
    return views


def _room(size: int) -> int:
    """Round up, so that each tensor begins where a matrix product can load 16 bytes at once."""
    return -(-size // 4) * 4
