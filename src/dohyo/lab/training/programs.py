"""Which program takes the steps: the plain one, replicas in one, compiled, recorded."""

import dataclasses
import logging
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Self

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.errors import DohyoError
from dohyo.lab.training.captured import CompiledFinish, CompiledTables, network, traced
from dohyo.lab.training.config import LoopConfig
from dohyo.lab.training.graphs import Graphs
from dohyo.lab.training.noise import DrawnBy
from dohyo.lab.training.processes import one_thread, quiet
from dohyo.lab.training.replicas import Replicas, Unbatchable, check_batchable
from dohyo.lab.training.state import State
from dohyo.lab.training.step import Finish, Team, train_step
from dohyo.lab.training.tasks import Batches, Objective, OnData, Task
from dohyo.objectives import MaximumLikelihood
from dohyo.objectives.losses import bind_options
from dohyo.packing import Plan


@dataclass
class Choice:
    """How runs are to be trained.

    Attributes:
        together: As one program, each with its own noise; else there is one run, with torch's global noise.
        captured: Compiled, and recorded on a CUDA GPU.
        reason: Why not captured, where that was to be tried.
    """

    objective: Any
    config: Any
    fabric: Fabric
    together: bool = False
    captured: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        """What to call it in a record."""
        return "captured" if self.captured else f"plain: {self.reason}" if self.reason else "plain"

    def program(self, states: list[State], tasks: list[Task[Any]]) -> "Program":
        return Program(states, tasks, self)


def choose(models: Sequence[nn.Module], task: Task[Any], objective: Objective, config: Any, fabric: Fabric) -> Choice:
    """How to train these models: an `Unbatchable` if they must be trained together, or captured, and cannot."""
    choice = Choice(objective, config, fabric)
    wanted = getattr(config, "program", "plain")
    captured = wanted == "captured" or (wanted == "auto" and fabric.device.type == "cuda")
    if len(models) == 1 and not captured:
        return choice
    try:
        _check(models, task, objective, config, fabric, captured)
    except Unbatchable as error:
        if not captured:
            raise
        if wanted == "captured":
            raise Unbatchable(f"{error}; use --program plain") from error
        choice = dataclasses.replace(choice, reason=str(error))
        if len(models) == 1:
            return choice
        captured = False
        _check(models, task, objective, config, fabric, captured)  # together they may still go
    return dataclasses.replace(choice, together=True, captured=captured)


def _check(
    models: Sequence[nn.Module], task: Task[Any], objective: Objective, config: Any, fabric: Fabric, captured: bool
) -> None:
    if not isinstance(objective, MaximumLikelihood) or not isinstance(config, LoopConfig) or not isinstance(task, OnData):
        raise Unbatchable("only maximum likelihood on data can be captured or batched")
    if type(task).batches is not OnData.batches:
        raise Unbatchable(f"{type(task).__name__} makes batches of its own")
    if fabric.world_size > 1:
        raise Unbatchable("under torchrun each process takes its part of every batch")
    if not objective.shared and objective.estimator.depth_law.cap > 0:
        raise Unbatchable("with a K for each datum (k_draw datum) no two steps have the same shape")
    device, index = fabric.device, torch.zeros(2, dtype=torch.long, device=fabric.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        x = task.batch(index)
        with DrawnBy(torch.Generator(device).manual_seed(0)):
            again = task.batch(index)
        if not torch.equal(x, again):
            raise Unbatchable("the training data draw random numbers by other ways than torch's generator of their device")
        rows = torch.tensor([0, 0, 1, 1], device=device)
        # Of what does not compile the compiler would tell at length, where one line says why.
        with torch._dynamo.config.patch(recompile_limit=1000), quiet("torch._guards", logging.CRITICAL):
            compiler, varying = traced if captured else None, objective.estimator.depth_law.cap > 0
            check_batchable([model.to(device) for model in models], x, rows, objective.encoder, compiler, varying)


class Program:
    """Takes the steps of a team of runs; used as a context for the steps of an epoch."""

    def __init__(self, states: list[State], tasks: list[Task[Any]], choice: Choice) -> None:
        self.states, self.choice, self.contexts = states, choice, ExitStack()
        self.graphs: Graphs | None = None
        objective, config, device = choice.objective, choice.config, choice.fabric.device
        model: Any = states[0].model
        varying = choice.captured and objective.estimator.depth_law.cap > 0
        if choice.together:
            noises = [state.noise for state in states if state.noise is not None]
            model = Replicas([state.model for state in states], noises, network if choice.captured else None, varying)
        self.team = Team(states, tasks, model, device)
        if choice.together:
            objective = dataclasses.replace(objective, runs=len(states))
        if choice.captured:
            objective = dataclasses.replace(objective, tables=CompiledTables(varying))
            if device.type == "cuda":
                self.graphs = Graphs(self._draw, self._step, self.team)
        self.finish = Finish(objective, config, choice.fabric)
        if choice.captured and config.optimiser in ("adam", "amsgrad"):
            self.finish = CompiledFinish(self.team, objective, config, choice.fabric)

    def steps(self, orders: Sequence[Iterable[Tensor]]) -> tuple[int, int]:
        """Steps of all runs, on the batches of indices that each run has for itself, of which this process takes its part.

        Returns:
            How many steps, and how many data of a run.
        """
        device = self.choice.fabric.device
        rank, world = self.choice.fabric.global_rank, self.choice.fabric.world_size
        steps = data = 0
        batches: Iterable[Tensor]
        plans: Iterable[int | None]
        if self.choice.together:  # little is made before the first step: a GPU waits for it
            own: Any = orders  # which `_check` knows to be `Batches`
            batches = Batches(torch.stack([each.order for each in own]).to(device), own[0].size)
            with one_thread():
                plans = self.choice.objective.estimator.shared_plans(len(batches), self.states[0].depth)
            if self.graphs is not None:
                self.graphs.ready()
        else:
            batches, plans = (torch.stack(indices).to(device) for indices in zip(*orders, strict=True)), repeat(None)
        for index, n in zip(batches, plans, strict=False):  # a task on draws may look at the progress before it gives the next
            if n is None:
                x = self.team.batch(index[:, rank::world])
                train_step(self.team, x, index.shape[1], self.states[0].depth, self.finish)
            else:
                self._take(index, n)
            steps, data = steps + 1, data + index.shape[1]
            for state in self.states:
                state.progress.step += 1
        return steps, data

    def _take(self, index: Tensor, n: int) -> None:
        try:
            if self.graphs is not None:
                self.graphs(index, n)
            else:
                plan = Plan.even(index.numel(), n, index.device)
                self._step(self._draw(index, plan), plan)
        except (RuntimeError, AssertionError) as error:  # of the compiler, of what it made, of a recording
            if not self.choice.captured or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise DohyoError(f"the captured step failed ({reason}); train with --program plain") from error

    def _draw(self, index: Tensor, plan: Plan) -> list[Tensor]:
        """All that a step draws, in the order in which each run draws it alone: its data, and then its noise."""
        x = self.team.batch(index).contiguous()  # as a recorded step reads it: other strides would be compiled anew
        return [x, *self.team.model.draw(x, plan.rows, bind_options(self.choice.objective.encoder))]

    def _step(self, drawn: Sequence[Tensor], plan: Plan) -> None:
        x, *self.team.model.drawn = drawn
        train_step(self.team, x, len(x) // len(self.states), plan, self.finish)

    def __enter__(self) -> Self:
        if self.choice.fabric.device.type == "cuda" and self.choice.config.tf32:
            self.contexts.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        if self.choice.captured:
            # One process may train many runs, and each is compiled anew.
            self.contexts.enter_context(torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10_000))
            # What is cheap to compute again is: else whole tables of x, one row for each log-weight, are kept for the way back.
            self.contexts.enter_context(torch._functorch.config.patch(ban_recompute_used_far_apart=False))
            self.contexts.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"torch\.")  # the compiler's, of its own code
        if self.choice.together:
            self.team.model.refresh()
        self.finish.begin(self.team)
        if self.graphs is not None:
            outer, own = torch.cuda.current_stream(), self.graphs.stream
            own.wait_stream(outer)
            self.contexts.callback(outer.wait_stream, own)
            self.contexts.callback(own.wait_stream, self.graphs.ahead)  # also if the last step was not taken
            self.contexts.enter_context(torch.cuda.stream(own))
            self.graphs.ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.contexts.close()
        self.finish.end(self.team)
        for state in self.states[1:]:  # the K of the first is the K of all
            state.depth.set_state(self.states[0].depth.get_state())
