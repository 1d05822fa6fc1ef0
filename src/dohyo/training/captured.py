"""The captured step: compiled, and on a CUDA GPU recorded as a graph that one call replays.

A graph has fixed shapes. So there is one for each number of log-weights: the first step with a new number runs as it is, which
compiles and loads what must be, and if the number comes again that step is recorded. A graph knows addresses: whatever a recorded
step reads must live as long as the graph does, in the team, in the programs, counts and plans kept here, or in the graph's own
memory. The network runs on exactly as many rows as the plain program's; the arithmetic of the estimator, on scalars, is padded to
a power of two and compiled once for each.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad
from torch.optim.adam import adam

from dohyo.packing import Plan, even, moved, through_tables
from dohyo.training.flat import flattened
from dohyo.training.products import WeightGradients
from dohyo.training.step import Finish, Kept, Team

_OPTIONS = {"max_pointwise_cat_inputs": 64}  # a gradient's many parts are joined by whoever reads them
_WIDEST = 256  # steps with more log-weights are rare and run as they are: each doubling takes longer to compile


def network(function: Callable[..., Any]) -> Callable[..., Any]:
    """A network compiled, gradients and all."""
    return torch.compile(function, fullgraph=True, dynamic=False, options={"post_grad_custom_post_pass": WeightGradients()})


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A network gone through the compiler's front only: whether that can be is soon known."""
    return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")


def compiled(function: Callable[..., Any], *example: Tensor) -> Callable[..., Any]:
    """A function of tensors, traced below autograd and compiled for the shapes of the example."""
    with torch.no_grad():
        function(*(tensor.clone() for tensor in example))  # constants that are kept from the first call on stay out of the trace
        graph = make_fx(function)(*(tensor.clone() for tensor in example))
        return torch._inductor.compile(graph, list(example), options=_OPTIONS)  # type: ignore[no-any-return]


def bucket_of(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


class CompiledTables:
    """`packing.through_tables` for equal counts, compiled for each power of two."""

    def __init__(self) -> None:
        self.programs: dict[Any, Callable[..., list[Tensor]]] = {}
        self.counts: dict[Any, Tensor] = {}

    def __call__(self, function: Callable[..., tuple[Tensor, ...]], packed: Tensor, counts: Tensor, *of_each: Tensor) -> Any:
        n = even(counts)
        if n is None or n > _WIDEST:
            return through_tables(function, packed, counts, *of_each)
        width = bucket_of(n)
        table = pad(packed.view(len(counts), n), (0, width - n), value=-torch.inf)
        if (key := (counts.shape, n)) not in self.counts:
            self.counts[key] = moved(counts, packed.device)
        arguments = (table, self.counts[key], *of_each)
        if table.shape not in self.programs:
            self.programs[table.shape] = compiled(lambda *tensors: list(function(*tensors)), *arguments)
        return [part[:, :n].flatten() if part.ndim == 2 else part for part in self.programs[table.shape](*arguments)]


class CompiledFinish(Finish):
    """`Finish` as one compiled function, with torch's own Adam on the parameters of all runs at once.

    The runs' optimisers keep what they have learnt, as views of the tables that are changed here.
    """

    def __init__(self, team: Team, *rest: Any) -> None:
        super().__init__(*rest)
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.config.optimiser == "amsgrad" else [])]
        self.learnt = [[s.optimiser.state[p] for p in own] for s, own in zip(team.states, team.each, strict=True)]
        for own, row in zip(team.each, self.learnt, strict=True):
            for parameter, kept in zip(own, row, strict=True):
                kept.setdefault("step", torch.zeros((), device=team.device))
                for key in keys:
                    kept.setdefault(key, torch.zeros_like(parameter))
        tables = [flattened([[kept[key] for kept in row] for row in self.learnt])[0] for key in keys]
        self.steps = torch.stack([row[0]["step"].to(team.device, torch.float32) for row in self.learnt])
        self.rates = torch.zeros(len(self.learnt), device=team.device)
        self.adam = [team.model.flat, *tables, self.steps, self.rates]
        self.programs: dict[Any, Callable[..., Any]] = {}

    def begin(self, team: Team) -> None:
        self.rates.copy_(torch.tensor([state.rate for state in team.states]))

    def end(self, team: Team) -> None:
        for row, step in zip(self.learnt, self.steps, strict=True):
            for kept in row:
                kept["step"].copy_(step)

    def follow(self, team: Team, gradients: list[Tensor], numbers: Mapping[str, Tensor], level: Tensor) -> None:
        names, kept = list(numbers), team.kept
        sizes = [len(gradients), len(names), 1, len(names), 2, len(self.adam)]

        def whole(*tensors: Tensor) -> list[Tensor]:
            groups = iter(tensors)
            steps, values, (tall,), sums, state, own = ([next(groups) for _ in range(size)] for size in sizes)
            keeping = Kept(dict(zip(names, sums, strict=True)), *state)
            flat = self.settle(keeping, steps, len(team.theta), dict(zip(names, values, strict=True)), tall)
            self._adam(flat, *own)
            return []

        sums = [kept.sums[name] for name in names]
        arguments = [*gradients, *numbers.values(), level, *sums, kept.clipped, kept.baseline, *self.adam]
        key = (next(iter(numbers.values())).shape, *(gradient.stride() for gradient in gradients))
        if key not in self.programs:
            self.programs[key] = compiled(whole, *arguments)
        self.programs[key](*arguments)

    def _adam(self, gradient: Tensor, parameter: Tensor, *tables: Tensor) -> None:
        """Runs are the last dimension here, so that each has its own rate and count of steps."""
        config = self.config
        average, square, *largest, steps, rates = tables
        adam(
            [parameter.T], [gradient.T], [average.T], [square.T], [table.T for table in largest], [steps],
            foreach=False, differentiable=True, amsgrad=bool(largest), beta1=config.beta1, beta2=config.beta2, lr=rates,
            weight_decay=0.0, eps=config.epsilon, maximize=False,
        )  # fmt: skip


class Graphs:
    """Steps recorded as CUDA graphs, by their shapes. Call it with indices, and the number of log-weights of each datum."""

    def __init__(self, step: Callable[[Tensor, Plan], None], team: Team) -> None:
        self.step, self.noises = step, [state.noise for state in team.states]
        self.stream = torch.cuda.Stream(team.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.plans: dict[tuple[int, int], Plan] = {}
        self.recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, index: Tensor, n: int) -> None:
        key = index.shape[1], n
        if key not in self.recorded:
            if key not in self.plans:
                plan = Plan.even(index.numel(), n, index.device)
                if n <= _WIDEST:
                    self.plans[key] = plan
                return self.step(index, plan)
            self.recorded[key] = self._record(index, self.plans[key])
        graph, own = self.recorded[key]
        own.copy_(index)
        graph.replay()
        return None

    def _record(self, index: Tensor, plan: Plan) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        own, graph = index.clone(), torch.cuda.CUDAGraph()
        for noise in self.noises:
            if noise is not None:
                graph.register_generator_state(noise)
        graph.capture_begin(pool=self.pool)
        try:
            self.step(own, plan)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what went wrong first is what counts
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, own
