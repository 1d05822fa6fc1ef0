"""One step: losses, gradients, clipping, optimiser. The same code for one run and for replicas, plain and captured."""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.training.flat import flat_row, row_length, unflattened
from dohyo.lab.training.noise import DrawnBy
from dohyo.lab.training.processes import sum_over_processes
from dohyo.lab.training.replicas import parameters_of
from dohyo.lab.training.state import State
from dohyo.lab.training.tasks import Objective, Task
from dohyo.objectives import Losses
from dohyo.objectives.losses import Term
from dohyo.packing import Plan


class Kept(NamedTuple):
    """What a step leaves behind, on the device, in tensors that the next step changes in place; a row for each run.

    Attributes:
        sums: Of each number that was recorded in this epoch, over the data.
        clipped: (runs, 2) the steps in which theta's and phi's gradients were clipped.
        baseline: (runs,) the running baselines; NaN where there is none yet.
    """

    sums: dict[str, Tensor]
    clipped: Tensor
    baseline: Tensor


class Team:
    """Runs that take their steps together: one, or replicas in one program.

    Attributes:
        states: The runs.
        tasks: What each is trained on.
        model: The model of the one run, or the `Replicas` of all.
    """

    def __init__(self, states: list[State], tasks: list[Task[Any]], model: Any, device: torch.device) -> None:
        self.states, self.tasks, self.model, self.device = states, tasks, model, device
        self.theta, self.phi = parameters_of(model)
        self.each = [[*theta, *phi] for theta, phi in (parameters_of(state.model) for state in states)]
        self.stacked = model is not states[0].model
        known = [state.progress.baseline for state in states]
        baseline = torch.tensor([torch.nan if b is None else b for b in known], dtype=torch.float64, device=device)
        self.nothing = torch.zeros_like(baseline)
        self.kept = Kept({}, torch.zeros(len(states), 2, dtype=torch.float64, device=device), baseline)

    def batch(self, index: Tensor) -> Tensor:
        """The data of each run's indices (runs, data), one run after the other, with its own noise; an empty tensor of none."""
        if index.shape[1] == 0:
            return index.flatten()
        parts = []
        for state, task, own in zip(self.states, self.tasks, index, strict=True):
            with DrawnBy(state.noise) if state.noise is not None else contextlib.nullcontext():
                parts.append(task.batch(own))
            if len(parts[-1]) != len(own):
                raise DohyoError(
                    f"{type(task).__name__} gave {len(parts[-1])} data for {len(own)} indices; it must give one for each"
                )
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def update(self, flat: Tensor) -> None:
        """Each run's optimiser takes a step along its row of gradients."""
        for state, own, row in zip(self.states, self.each, flat, strict=True):
            for parameter, gradient in zip(own, unflattened(row, own), strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            state.optimiser.step()


class Finish:
    """What is done with the gradients of a step: recorded, joined, clipped, followed."""

    def __init__(self, objective: Objective, config: Any, fabric: Fabric) -> None:
        self.objective, self.config, self.fabric = objective, config, fabric

    def begin(self, team: Team) -> None:
        """Before an epoch."""

    def end(self, team: Team) -> None:
        """After it."""

    def __call__(self, team: Team, gradients: list[Tensor], numbers: Mapping[str, Tensor], level: Tensor) -> None:
        for name in numbers:
            if name not in team.kept.sums:
                team.kept.sums[name] = torch.zeros_like(team.kept.baseline)
        self.follow(team, gradients, numbers, level)

    def follow(self, team: Team, gradients: list[Tensor], numbers: Mapping[str, Tensor], level: Tensor) -> None:
        team.update(self.settle(team.kept, gradients, len(team.theta), numbers, level))

    def settle(self, kept: Kept, gradients: list[Tensor], split: int, numbers: Mapping[str, Tensor], level: Tensor) -> Tensor:
        """The clipped gradients (runs, numbers) of theta, the first `split`, and phi; a function of tensors alone."""
        for name, values in numbers.items():
            kept.sums[name] += values.double().unflatten(0, (len(kept.baseline), -1)).sum(1)
        flat, level = sum_over_processes(self.fabric, [flat_row(gradients), level.to(gradients[0].dtype)])
        if self.objective.running_baseline:  # for the next step: it must not depend on that step's draws
            kept.baseline.copy_(torch.where(kept.baseline.isnan(), level, 0.99 * kept.baseline + 0.01 * level))
        edge = row_length(gradients[:split])
        theta, clipped_theta = _clip(flat[:, :edge], self.config.clip_decoder)
        phi, clipped_phi = _clip(flat[:, edge:], self.config.clip_encoder)
        kept.clipped.add_(torch.stack([clipped_theta, clipped_phi], 1))
        return torch.cat([theta, phi], 1)


def train_step(team: Team, x: Tensor, batch: int, depth: torch.Generator | Plan, finish: Finish) -> None:
    """One step of every run on `x`, this process's part of the batches, run after run. `depth` draws K, or is the plan itself."""
    objective, parameters, runs = finish.objective, [*team.theta, *team.phi], len(team.states)
    gradients: list[Tensor | None] = [None] * len(parameters)
    numbers: Mapping[str, Tensor] = {}
    level = team.nothing
    if len(x) > 0:
        baseline: float | Tensor = 0.0
        if objective.running_baseline:
            baseline = team.kept.baseline.nan_to_num(0.0)[:, None].expand(-1, len(x) // runs).reshape(-1)
        losses = objective(team.model, x, depth, baseline)
        gradients = _gradients(losses, team, len(x) / runs / batch)  # the losses are means over what is here of each batch
        numbers = losses.numbers
        if objective.running_baseline:
            if losses.level is None:
                raise DohyoError(f"{type(objective).__name__} has a running baseline and gives no level for it")
            level = losses.level.double().unflatten(0, (runs, -1)).sum(1) / batch
    elif objective.shared and isinstance(depth, torch.Generator):
        objective.skip(depth)  # the last batch had nothing for this process: only keep in step with the others' K
    known = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    finish(team, known if team.stacked else [gradient[None] for gradient in known], numbers, level)


def _gradients(losses: Losses, team: Team, share: float) -> list[Tensor | None]:
    if losses.for_phi is losses.for_theta:
        return _gradient([losses.for_theta], [*team.theta, *team.phi], share)
    if losses.apart:
        return _gradient([losses.for_theta, losses.for_phi], [*team.theta, *team.phi], share)
    return _gradient([losses.for_theta], team.theta, share, again=True) + _gradient([losses.for_phi], team.phi, share)


def _gradient(terms: list[Term], parameters: list[Tensor], share: float, again: bool = False) -> list[Tensor | None]:
    """The gradient of `share` times the terms' sum."""
    seeds = [torch.ones_like(t.output) if t.coefficients is None else t.coefficients for t in terms]
    seeds = seeds if share == 1 else [seed * share for seed in seeds]
    if not parameters:
        return []
    outputs = [term.output for term in terms]
    return list(torch.autograd.grad(outputs, parameters, seeds, retain_graph=again, allow_unused=True))


def _clip(flat: Tensor, most: float | None) -> tuple[Tensor, Tensor]:
    """Rows scaled so that their norm is at most `most`; 1 for those where that was needed, else 0."""
    norm = torch.linalg.vector_norm(flat, dim=1)
    if most is None:
        return flat, torch.zeros_like(norm, dtype=torch.float64)
    return flat * (most / (norm + 1e-6)).clamp(max=1.0)[:, None], (norm > most).double()
