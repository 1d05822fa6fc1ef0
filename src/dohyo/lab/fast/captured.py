"""The compiled step.

The network runs on exactly as many rows as in the plain program. The estimator's arithmetic, on scalars, is padded to a power
of two and compiled once for each. Tensors that are made once and read by every step are kept alive, because `graphs` needs them.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.adam import adam

from dohyo.lab.fast.finish import Finish, Totals
from dohyo.lab.fast.stacked import flattened
from dohyo.packing import Plan, even, through_tables

_OPTIONS = {"combo_kernels": True}  # independent kernels become one launch on a GPU
WIDEST = 256  # steps with more log-weights are rare and run uncompiled: each doubling takes longer to compile


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


class CompiledFinish(Finish):
    """`Finish` as one compiled function, with torch's own Adam on the parameters of all replicas at once.

    The moments in the runs' optimisers are views of the tables that are updated here.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.config.optimiser == "amsgrad" else [])]
        device = self.models.flat.device
        self.learnt = [[s.optimiser.state[p] for p in own] for s, own in zip(self.states, self.each, strict=True)]
        for own, row in zip(self.each, self.learnt, strict=True):
            for parameter, kept in zip(own, row, strict=True):
                kept.setdefault("step", torch.zeros((), dtype=torch.float32, device=device))
                for key in keys:
                    kept.setdefault(key, torch.zeros_like(parameter))
        tables = [flattened([[kept[key] for kept in row] for row in self.learnt])[0] for key in keys]
        self.steps = torch.stack([row[0]["step"].to(self.models.flat) for row in self.learnt])
        self.rates = torch.zeros_like(self.steps)
        self.adam = [self.models.flat, *tables, self.steps, self.rates]
        self.programs: dict[Any, Callable[..., Any]] = {}

    def begin(self) -> None:
        super().begin()
        self.steps.copy_(torch.stack([row[0]["step"] for row in self.learnt]))  # a task may have started them anew
        self.rates.copy_(torch.tensor([state.rate for state in self.states]))

    def end(self) -> None:
        for row, step in zip(self.learnt, self.steps, strict=True):
            for kept in row:
                kept["step"].copy_(step)

    def follow(self, gradients: list[Tensor], numbers: Mapping[str, Tensor], level: Tensor) -> None:
        names, totals = list(numbers), self.totals
        sizes = [len(gradients), len(names), 1, len(names), 2, len(self.adam)]

        def whole(*tensors: Tensor) -> list[Tensor]:
            groups = iter(tensors)
            steps, values, (tall,), sums, state, own = ([next(groups) for _ in range(size)] for size in sizes)
            keeping = Totals(dict(zip(names, sums, strict=True)), *state)
            flat = self.settle(keeping, steps, dict(zip(names, values, strict=True)), tall)
            self._adam(flat, *own)
            return []

        sums = [totals.sums[name] for name in names]
        arguments = [*gradients, *numbers.values(), level, *sums, totals.clipped, totals.baseline, *self.adam]
        key = (next(iter(numbers.values())).shape, *(gradient.stride() for gradient in gradients))
        if key not in self.programs:
            self.programs[key] = compiled(whole, *arguments)
        self.programs[key](*arguments)

    def _adam(self, gradient: Tensor, parameter: Tensor, *tables: Tensor) -> None:
        """Runs are the last dimension here, so that each has its own learning rate and step count."""
        config = self.config
        average, square, *largest, steps, rates = tables
        adam(
            [parameter.T], [gradient.T], [average.T], [square.T], [table.T for table in largest], [steps],
            foreach=False, differentiable=True, amsgrad=bool(largest), beta1=config.beta1, beta2=config.beta2, lr=rates,
            weight_decay=0.0, eps=config.epsilon, maximize=False,
        )  # fmt: skip
