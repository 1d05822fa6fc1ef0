"""The compiled step: networks, and the estimators' arithmetic on tables of scalars.

If all data have as many log-weights, the network runs on exactly as many rows as in the plain program, and the table is padded
to a power of two. If each has its own number (`Layout`), the network runs on a few more rows, and the table has more columns.
Which row belongs to which datum is then data, not shape: one recorded step serves every plan that fits. Tensors that are made
once and read by every step are kept alive, because `graphs` needs them.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dohyo.lab.fast.stacked import LINE
from dohyo.packing import Plan, even, through_tables

_OPTIONS = {"combo_kernels": True}  # independent kernels become one launch on a GPU
WIDEST = 256  # steps with more log-weights are rare and run uncompiled: each doubling takes longer to compile
_NARROWEST = 64  # columns of a table whose width varies: each width is compiled


def _show_noise() -> None:
    """Let `noise.Given` handle these functions also while a network is compiled: by default the compiler bypasses it."""
    with contextlib.suppress(ImportError, AttributeError):  # in other versions of torch: models that use it are then not captured
        from torch._dynamo.variables.torch import get_overridable_functions

        get_overridable_functions().update((torch.randn_like, torch.rand_like, torch.normal))


def network(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a network together with its gradients."""
    from torch._inductor.decomposition import decompositions  # loading the compiler takes a second

    from dohyo.lab.fast.products import Products

    decompositions[torch.ops.dohyo.proposed.default] = lambda t, n: (t.clone(), t.new_zeros(t.shape[:n]))  # transparent
    _show_noise()
    return torch.compile(function, fullgraph=True, dynamic=False, options={"post_grad_custom_post_pass": Products()})


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run only the compiler's front end on a network: a quick test of whether it can be compiled."""
    _show_noise()
    return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")


def compiled(function: Callable[..., Any], *example: Tensor) -> Callable[..., Any]:
    """Compile a function of tensors, traced below autograd, for the shapes of the example."""
    with torch.no_grad():
        function(*(tensor.clone() for tensor in example))  # constants cached in the first call stay out of the trace
        graph = make_fx(function)(*(tensor.clone() for tensor in example))
        return torch._inductor.compile(graph, list(example), options=_OPTIONS)  # type: ignore[no-any-return]


def bucket_of(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


class EvenTables:
    """`packing.through_tables` for a plan of equal counts that several runs share; compiled for each power of two, or for the
    one number if it never varies."""

    def __init__(self, compiling: bool, varying: bool) -> None:
        self.compiling, self.varying = compiling, varying
        self.programs: dict[Any, Callable[..., list[Tensor]]] = {}
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, function: Callable[..., tuple[Tensor, ...]], packed: Tensor, plan: Plan, *of_each: Tensor) -> Any:
        n, counts = even(plan.counts), plan.counts.repeat(len(packed) // len(plan.rows))
        if n is None or n > WIDEST or not self.compiling:
            return through_tables(function, packed, counts, *of_each)
        if (key := (counts.shape, n)) not in self.kept:
            width = bucket_of(n) if self.varying else n
            self.kept[key] = packed.new_full((len(counts), width), -torch.inf), torch.full_like(counts, n, device=packed.device)
        table, own_counts = self.kept[key]
        if table.shape[1] == n:
            table = packed.view(len(counts), n)
        else:
            table[:, :n] = packed.view(len(counts), n)
        arguments = (table, own_counts, *of_each)
        if table.shape not in self.programs:
            self.programs[table.shape] = compiled(lambda *tensors: list(function(*tensors)), *arguments)
        return [part[:, :n].flatten() if part.ndim == 2 else part for part in self.programs[table.shape](*arguments)]


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
