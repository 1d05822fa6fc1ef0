"""Pack for the network, pad for the arithmetic.

Datum i gets `counts[i]` log-weights. A network runs on the packed form, exactly `sum(counts)` rows; the estimators'
arithmetic runs on padded rectangles of scalars. A single huge count would make one rectangle that wide for every datum, so
`reduce_packed` pads in power-of-two buckets of the count.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dohyo.errors import DohyoError

_FEW_CELLS = 2**12


def rows(counts: Tensor, device: torch.device | None = None) -> Tensor:
    """The datum of each packed row: i, `counts[i]` times. Equal counts never make a `device` wait.

    Example:
        >>> rows(torch.tensor([2, 1, 3]))
        tensor([0, 0, 1, 2, 2, 2])
    """
    n, device = even(counts), device or counts.device
    if n is None:
        return torch.repeat_interleave(counts).to(device)
    return torch.arange(len(counts), device=device)[:, None].expand(-1, n).reshape(-1)


class Plan(NamedTuple):
    """How many log-weights each datum gets, and the datum of each packed row."""

    counts: Tensor
    rows: Tensor

    @classmethod
    def of(cls, counts: Tensor, device: torch.device) -> Self:
        return cls(counts, rows(counts, device))

    @classmethod
    def even(cls, data: int, n: int, device: torch.device) -> Self:
        """n log-weights for each datum."""
        return cls.of(torch.full((data,), n), device)


def in_order(rows: Tensor) -> slice | None:
    """The data, if the rows are as many of each of consecutive data; None if not, or where their values cannot be read at once.

    Example:
        >>> in_order(torch.tensor([3, 3, 4, 4, 5, 5]))
        slice(3, 6, None)
    """
    if rows.device.type != "cpu" or torch.compiler.is_compiling() or len(rows) == 0:
        return None
    try:
        array = rows.numpy()  # for so few numbers several times as fast as torch
    except RuntimeError:  # under vmap
        return None
    first, end = int(array[0]), int(array[-1]) + 1
    n = len(array) // max(1, end - first)
    return slice(first, end) if np.array_equal(array, np.arange(first, end).repeat(n)) else None


def take(code: Any, rows: Tensor, data: slice | None = None) -> Any:
    """The rows of a tensor, or of each tensor in a tuple; `data`: what `in_order` says of the rows, which then stay here."""
    if isinstance(code, tuple):
        return tuple(take(part, rows, data) for part in code)
    return code[rows] if data is None else code[data].repeat_interleave(len(rows) // (data.stop - data.start), 0)


def even(counts: Tensor) -> int | None:
    """The count of every datum if all counts are equal, else None."""
    least, most = map(int, counts.aminmax()) if len(counts) else (0, 1)
    return least if least == most else None


def pad(packed: Tensor, counts: Tensor) -> Tensor:
    """The packed vector as a rectangle (batch, max(counts)), with -inf where a row is shorter.

    Example:
        >>> pad(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 1]))
        tensor([[1., 2.],
                [3., -inf]])
    """
    if packed.ndim != 1 or packed.numel() != int(counts.sum()):
        raise DohyoError(f"packed has shape {tuple(packed.shape)}, the counts need ({int(counts.sum())},)")
    if counts.numel() == 0:
        return packed.new_empty((0, 0))
    return _rectangle(packed, counts, counts.cumsum(0) - counts, int(counts.max()))


def reduce_packed(reduce: Callable[[Tensor, Tensor], Tensor], packed: Tensor, counts: Tensor) -> Tensor:
    """`reduce(log_w, counts)` on packed log-weights, one rectangle for each power-of-two bucket of the count.

    Bucket b holds the data with 2^(b-1) < count <= 2^b and is as wide as its largest count, so less than half of it is
    padding; small neighbouring buckets are merged. `counts` and `packed` may be on different devices: buckets are formed
    where the counts are, so that counts on the CPU never make a GPU wait.
    """
    if packed.numel() != int(counts.sum()):
        raise DohyoError(f"{packed.numel()} packed log-weights for counts that sum to {int(counts.sum())}")
    n = even(counts)
    if n is not None:  # already a rectangle
        return reduce(packed.view(len(counts), n), torch.full_like(counts, n, device=packed.device))
    buckets = _buckets(counts, packed.device)
    reduced = [reduce(_rectangle(packed, own_counts, starts, width), own_counts) for _, own_counts, starts, width in buckets]
    return torch.cat(reduced)[torch.cat([data for data, *_ in buckets]).argsort()]


def through_tables(
    function: Callable[..., tuple[Tensor, ...]], packed: Tensor, counts: Tensor, *of_each: Tensor
) -> tuple[Tensor, ...]:
    """`function(log_w, counts, *of_each)` on the rectangles of `reduce_packed`, for a function that returns several tensors.

    A result with the shape of `log_w` comes back packed, one with a number for each datum in the order of the data. `of_each`
    are further arguments with one number for each datum. Not differentiable.
    """
    n = even(counts)
    if n is not None:
        found = function(packed.view(len(counts), n), torch.full_like(counts, n, device=packed.device), *of_each)
        return tuple(part.flatten() for part in found)
    buckets, parts, places, packs = _buckets(counts, packed.device), [], [], []
    for data, own_counts, starts, width in buckets:
        columns = torch.arange(width, device=packed.device)
        own = columns < own_counts[:, None]
        found = function(_rectangle(packed, own_counts, starts, width), own_counts, *(x[data] for x in of_each))
        packs = [part.ndim == 2 for part in found]
        parts.append([part[own] if part.ndim == 2 else part for part in found])
        places.append((starts[:, None] + columns)[own])
    row_order, order = torch.cat(places).argsort(), torch.cat([data for data, *_ in buckets]).argsort()
    joined = [torch.cat(part) for part in zip(*parts, strict=True)]
    return tuple(part[row_order if pack else order] for part, pack in zip(joined, packs, strict=True))


def _buckets(counts: Tensor, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """The data of each bucket, their counts, where they start in the packed vector, all on the device, and the largest count.

    Small buckets are merged: a few more cells cost less than another round of calls.
    """
    bucket = counts.double().log2().ceil().long()
    joined: list[tuple[int, Tensor]] = []
    for b in bucket.unique().tolist():
        data = torch.nonzero(bucket == b).squeeze(1)
        size = len(data) + (joined[-1][0] if joined else 0)
        if joined and size << b <= _FEW_CELLS:
            joined[-1] = (size, torch.cat([joined[-1][1], data]))
        else:
            joined.append((len(data), data))
    starts = counts.cumsum(0) - counts
    return [(data.to(device), counts[data].to(device), starts[data].to(device), int(counts[data].max())) for _, data in joined]


def _rectangle(packed: Tensor, counts: Tensor, starts: Tensor, width: int) -> Tensor:
    columns = torch.arange(width, device=packed.device)
    position = (starts[:, None] + columns).clamp(max=packed.numel() - 1)
    return torch.where(columns < counts[:, None], packed[position], -torch.inf)
