"""Steps in which every datum has its own number of log-weights, in shapes of which there are few.

The network runs on a few more rows than there are log-weights, the estimators' arithmetic on a table with more columns. Which row
belongs to which datum is data, not shape: one recorded step serves every plan that fits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dohyo.lab.fast.captured import WIDEST, bucket_of, compiled
from dohyo.lab.fast.stacked import LINE

_NARROWEST = 64  # columns of a table whose width varies: each width is compiled


class Shape(NamedTuple):
    """The shape of a step of one run: how many estimates, rows of the network, and columns of the table of log-weights."""

    data: int
    rows: int
    width: int

    @classmethod
    def of(cls, data: int, total: int, most: int, varying: bool) -> "Shape":
        """A shape with room for `total` log-weights, at most `most` for one estimate."""
        coarse = max(LINE, bucket_of(total + 1) // 8) if varying else LINE  # a quarter of the power of two below
        return cls(data, -(-total // coarse) * coarse, max(_NARROWEST, bucket_of(most)) if varying else most)

    @property
    def numbers(self) -> int:
        """The length of a row of `layouts`."""
        return self.data + 2 * self.rows


class Layout(NamedTuple):
    """A plan in its shape: the count of each estimate, and for each row its datum and its cell of the table."""

    counts: Tensor
    rows: Tensor
    cells: Tensor
    shape: Shape

    @classmethod
    def read(cls, numbers: Tensor, shape: Shape) -> "Layout":
        counts, rows, cells = numbers[: shape.numbers].split([shape.data, shape.rows, shape.rows])
        return cls(counts, rows, cells, shape)


def layouts(counts: Tensor, shape: Shape, batch: int) -> Tensor:
    """The layouts of plans (steps, data), one in each row; estimate i is of datum i modulo `batch`.

    Rows beyond a plan belong to the first datum, and to a spare cell.
    """
    ends = counts.cumsum(1)
    place = torch.arange(shape.rows, device=counts.device).expand(len(counts), -1).contiguous()
    estimate = torch.searchsorted(ends, place, right=True)
    own = estimate < shape.data
    start = (ends - counts).gather(1, estimate.clamp(max=shape.data - 1))
    cells = torch.where(own, estimate * shape.width + place - start, shape.data * shape.width)
    return torch.cat([counts, torch.where(own, estimate % batch, 0), cells], 1)


class PaddedTables:
    """`packing.through_tables` for a `Layout` that several runs share; compiled for each width."""

    def __init__(self, compiling: bool) -> None:
        self.compiling = compiling
        self.programs: dict[Any, Callable[..., Any]] = {}

    def __call__(
        self, function: Callable[..., tuple[Tensor, ...]], log_w: Tensor, layout: Layout, *of_each: Tensor
    ) -> list[Tensor]:
        """`function` of the table of all runs' log-weights, rows of one after those of another; tables come back as rows."""
        shape = layout.shape
        runs, cells = log_w.numel() // shape.rows, shape.data * shape.width
        table = log_w.new_full((runs, cells + 1), -torch.inf).index_copy_(1, layout.cells, log_w.view(runs, shape.rows))
        arguments = (table[:, :cells].reshape(-1, shape.width), layout.counts.repeat(runs), *of_each)
        run: Callable[..., Any] = function
        if self.compiling and shape.width <= WIDEST:
            key = (arguments[0].shape, *(each.dtype for each in of_each))
            if key not in self.programs:
                self.programs[key] = compiled(lambda *tensors: list(function(*tensors)), *arguments)
            run = self.programs[key]
        found = run(*arguments)
        return [_in_rows(part.view(runs, cells), layout.cells).view_as(log_w) if part.ndim == 2 else part for part in found]


def _in_rows(table: Tensor, cells: Tensor) -> Tensor:
    """The cell of each row; the spare one holds zero."""
    return torch.nn.functional.pad(table, (0, 1)).index_select(1, cells)
