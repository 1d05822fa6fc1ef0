"""One program for the steps of several runs, stacked, compiled and recorded; and the test of whether runs can use it."""

import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.contract import through_chains
from dohyo.errors import DohyoError
from dohyo.lab.fast.captured import EvenTables, network, traced
from dohyo.lab.fast.finish import CompiledFinish, Finish
from dohyo.lab.fast.graphs import Beside, Graphs
from dohyo.lab.fast.noise import FromGenerator
from dohyo.lab.fast.stacked import LINE, Unbatchable
from dohyo.lab.fast.trial import check_batchable, check_samplers, stack
from dohyo.lab.training.chains import phases
from dohyo.lab.training.config import StepConfig
from dohyo.lab.training.processes import matmul_precision, one_thread, quiet
from dohyo.lab.training.state import State
from dohyo.lab.training.tasks import Batches, Objective, OnData, OnDraws, Task
from dohyo.objectives import MaximumLikelihood
from dohyo.objectives.weighing import baselines
from dohyo.packing import Plan


@dataclass(frozen=True)
class Choice:
    """How to train the runs."""

    captured: bool = False  # whether steps are compiled, and on a CUDA GPU recorded
    reason: str = ""  # why not captured, if that was tried

    @property
    def name(self) -> str:
        """The name in a record."""
        return "captured" if self.captured else f"plain: {self.reason}" if self.reason else "plain"


def choose(models: Sequence[nn.Module], task: Task[Any], objective: Objective, config: Any, fabric: Fabric) -> Choice:
    """Choose how to train these models; raise `Unbatchable` if several, or one to be captured, cannot run as one program."""
    task.begin(fabric, config)
    captured, reason = config.captured_on(fabric.device), ""
    each = phases(models, objective, getattr(config, "anneal_from", 0.0))
    if captured:
        try:
            for parts, followed in each:
                _check(parts, task, followed, config, fabric, captured=True)
        except Unbatchable as error:
            if config.program == "captured":
                raise Unbatchable(f"{error}; use program 'plain'") from error
            captured, reason = False, str(error)
    if not captured and len(models) > 1:
        for parts, followed in each:
            _check(parts, task, followed, config, fabric, captured=False)
    return Choice(captured, reason)


def own_depths(objective: Any) -> bool:
    """Whether the data of one batch have different numbers of log-weights."""
    return not objective.shared and bool(objective.estimator.depth_law.cap > 0)


def _check(
    models: Sequence[nn.Module], task: Task[Any], objective: Objective, config: StepConfig, fabric: Fabric, captured: bool
) -> None:
    if fabric.world_size > 1:
        raise Unbatchable("under torchrun each process takes its part of every batch")
    device, compiler = fabric.device, traced if captured else None
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch._dynamo.config.patch(recompile_limit=1000),
        quiet("torch._guards", logging.CRITICAL),  # what cannot be compiled makes a long report; our one-line reason is enough
    ):
        torch.manual_seed(0)
        placed = [model.to(device) for model in models]
        if isinstance(task, OnDraws):
            check_samplers(placed, task, objective, config.batch_size, compiler)
        else:
            _check_on_data(placed, task, objective, device, compiler)


def _check_on_data(models: list[nn.Module], task: Task[Any], objective: Objective, device: torch.device, compiler: Any) -> None:
    if not isinstance(objective, MaximumLikelihood) or not isinstance(task, OnData):
        raise Unbatchable("on data only maximum likelihood can be captured or batched")
    if type(task).batches is not OnData.batches:
        raise Unbatchable(f"{type(task).__name__} makes batches of its own")
    index = torch.zeros(2, dtype=torch.long, device=device)
    x = task.batch(index)
    torch.manual_seed(0)
    with FromGenerator(torch.Generator(device).manual_seed(0)):
        again = task.batch(index)
    if not torch.equal(x, again):
        raise Unbatchable("the training data draw random numbers by other ways than torch's generator of their device")
    varying, padded = objective.estimator.depth_law.cap > 0, own_depths(objective)
    rows = (torch.arange(2 * LINE, device=device) >= 100).long() if padded else torch.tensor([0, 0, 1, 1], device=device)
    check_batchable(models, x, rows, str(objective.encoder), compiler, varying, padded)


class Program:
    """Takes the steps of several runs at once. Use it as a context for the steps of an epoch."""

    def __init__(self, states: list[State], tasks: list[Task[Any]], objective: Any, config: Any, captured: bool) -> None:
        self.states, self.tasks, self.config, self.captured = states, tasks, config, captured
        self.objective = objective  # `choose` has checked the type
        self.contexts = ExitStack()
        self.graphs: Any = None  # on a CUDA GPU, if captured
        self.batch, self.varying = config.batch_size, objective.estimator.depth_law.cap > 0
        self.followed, generators = [state.following for state in states], [one.noise for one in states if one.noise is not None]
        options = {"compiler": network if captured else None, "varying": captured and self.varying}
        self.models = self._stacked(self.followed, generators, encoder=str(objective.encoder), **options)
        self.device, self.chains = self.models.flat.device, through_chains(self.followed[0])
        if self.chains and captured and config.tf32:
            self.models.round_forces()
        self.beside = Beside(self.device)
        self._prepare(generators)
        finish = CompiledFinish if captured and config.optimiser in ("adam", "amsgrad") else Finish
        self.finish = finish(states, self.models, objective.running_baseline, config)

    def _stacked(self, models: Any, generators: list[torch.Generator], **options: Any) -> Any:
        """The models as one program."""
        return stack(models, generators, **options)

    def _prepare(self, generators: list[torch.Generator]) -> None:
        """Make what carries out the steps."""
        self.tables: Any = EvenTables(self.captured, self.varying)
        self.encoder_tables = EvenTables(self.captured, self.varying)
        if self.captured and self.device.type == "cuda":
            self.graphs = Graphs(self._draw, self._step, generators, self.device)

    def steps(self, orders: Sequence[Any]) -> tuple[int, int]:
        """Take an epoch's steps for all runs, each on its own indices; return the number of steps, and of data for one run."""
        # Do little before the first step, because the GPU is idle until then.
        batches = Batches(torch.stack([each.order for each in orders]).to(self.device), orders[0].size)
        sizes = [index.shape[1] for index in batches]
        with one_thread():
            plans = self._plans(sizes)
        if self.graphs is not None:
            self.graphs.ready()
        for index, plan in zip(batches, plans, strict=True):
            self._guarded(index, plan)
            for state in self.states:
                state.progress.step += 1
        return len(sizes), sum(sizes)

    def _plans(self, sizes: Sequence[int]) -> Sequence[Any]:
        """What each step of so many data needs to know of its numbers of log-weights."""
        return self.objective.estimator.shared_plans(len(sizes), self.states[0].depth)  # type: ignore[no-any-return]

    def _take(self, index: Tensor, n: Any) -> None:
        """Take one step; `n` is what `_plans` gave for it."""
        if self.graphs is not None:
            self.graphs(index, n)
        else:
            plan = Plan.even(index.shape[1], n, index.device)
            self._step(self._draw(index, plan), plan)

    def _guarded(self, index: Any, plan: Any) -> None:
        try:
            self._take(index, plan)
        except (RuntimeError, AssertionError) as error:  # from the compiler, compiled code or a recording
            if not self.captured or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise DohyoError(f"the captured step failed ({reason}); train with program 'plain'") from error

    def _draw(self, index: Tensor, plan: Plan) -> list[Tensor]:
        """All random numbers of a step, in the order in which a run on its own draws them: first its data, then its noise."""
        x = self._data(index)
        return [x, *self.models.noise(x, plan.rows)]

    def _data(self, index: Tensor) -> Tensor:
        """The data of all runs, one after another, each drawn from its own generator."""
        parts = []
        for generator, task, own in zip(self.models.generators, self.tasks, index, strict=True):
            with FromGenerator(generator):
                parts.append(task.batch(own))
            if len(parts[-1]) != len(own):
                raise DohyoError(
                    f"{type(task).__name__} gave {len(parts[-1])} data for {len(own)} indices; it must give one for each"
                )
        return torch.cat(parts).contiguous()  # as a recorded step reads it: other strides would be compiled again

    def _step(self, drawn: Sequence[Tensor], plan: Any) -> None:
        x, *noise = drawn
        objective, replicas = self.objective, len(self.states)
        batch = len(x) // replicas
        baseline = self.finish.totals.baseline.nan_to_num(0.0)[:, None].expand(-1, batch).reshape(-1)
        given = baselines(baseline if objective.running_baseline else 0.0, x, str(objective.encoder))
        follow = self._follow_chains if self.chains else self._follow_samples
        numbers, gradients = follow(x, noise, plan, given, {"batch": batch, "dtype": self.models.flat.dtype})
        level = -numbers[1].unflatten(0, (replicas, -1)).sum(1) / batch if objective.running_baseline else self._nothing
        recorded = objective.RECORDED_OF_CHAINS if self.chains else objective.RECORDED
        self.finish(gradients, dict(zip(recorded, numbers, strict=True)), level)

    def _follow_samples(self, x: Tensor, noise: list[Tensor], plan: Any, given: list[Tensor], options: Any) -> Any:
        """What is recorded, and the gradients of theta and phi."""
        log_w, others = self.models(x, plan.rows, noise)
        found = self.tables(partial(self.objective.coefficients, **options), log_w.detach(), plan, *given)
        *numbers, theta = found[:4]
        others = [factor for factor in others if factor.requires_grad]
        seeds = [theta, *(found[4].view_as(factor) for factor in others)]
        return numbers, _gradients([log_w, *others], [*self.models.theta, *self.models.phi], seeds)

    def _follow_chains(self, x: Tensor, noise: list[Tensor], plan: Any, given: list[Tensor], options: Any) -> Any:
        """The same through chains. They need little of a GPU, so that it computes phi's part beside them."""
        models, objective = self.models, self.objective
        with self.beside:
            fresh = models.fresh(x, plan.rows, noise)
            of_phi = self.encoder_tables(partial(objective.encoder_coefficients, **options), fresh.detach(), plan, *given)
            phi = _gradients([fresh], models.phi, of_phi)
        log_w = models.ends(x, plan.rows, noise)
        *numbers, of_theta = self.tables(partial(objective.chain_coefficients, **options), log_w.detach(), plan)
        theta = _gradients([log_w], models.theta, [of_theta])
        self.beside.join()
        return numbers, [*theta, *phi]

    @property
    def _nothing(self) -> Tensor:
        return self.finish.totals.baseline

    def __enter__(self) -> Self:
        self.contexts.enter_context(matmul_precision(self.config, self.device))
        if self.captured:
            # One process may train many runs, and each is compiled again.
            self.contexts.enter_context(torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000))
            # Recompute what is cheap; otherwise whole tables of x, one row for each log-weight, are kept for the backward pass.
            self.contexts.enter_context(torch._functorch.config.patch(ban_recompute_used_far_apart=False))
            self.contexts.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"torch\.")  # the compiler warns about its own code
        self.models.refresh()
        self.finish.begin()
        if self.graphs is not None:
            outer, own = torch.cuda.current_stream(), self.graphs.stream
            own.wait_stream(outer)
            self.contexts.callback(outer.wait_stream, own)
            self.contexts.callback(own.wait_stream, self.graphs.ahead)  # even if the last step failed
            self.contexts.enter_context(torch.cuda.stream(own))
            self.graphs.ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.contexts.close()
        self.finish.end()
        for state in self.states[1:]:  # all runs share the K of the first
            state.depth.set_state(self.states[0].depth.get_state())


def _gradients(outputs: list[Tensor], wanted: list[Tensor], seeds: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True, materialize_grads=True))
