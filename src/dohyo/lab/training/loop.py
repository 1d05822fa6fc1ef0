"""The loop of every task: epochs of steps, a check, schedule, checkpoints. Copy it and change it."""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

from dohyo.errors import DohyoError
from dohyo.lab.training.config import LoopConfig
from dohyo.lab.training.log import RunLog
from dohyo.lab.training.processes import launch, sum_over_processes
from dohyo.lab.training.programs import Choice, Program, choose
from dohyo.lab.training.state import CHECKPOINT, State, identity
from dohyo.lab.training.tasks import Data, Objective, OnData, Record, Task
from dohyo.objectives import MaximumLikelihood
from dohyo.objectives.maximum_likelihood import check_model


def fit(
    model: nn.Module,
    data: Data,
    objective: MaximumLikelihood,
    config: LoopConfig | None = None,
    folder: Path | None = None,
    fabric: Fabric | None = None,
) -> Iterator[Record]:
    """Train on data, and yield a record after each epoch; `model` holds the best parameters when the loop ends by itself.

    With a folder the run goes on from the checkpoint that is there, if any, and leaves checkpoint.pt, metrics.jsonl and
    TensorBoard's files in it. Under torchrun each process sees its own part of every batch.

    Example:
        >>> import dohyo
        >>> from dohyo.lab.data import load
        >>> objective = dohyo.objectives.maximum_likelihood(dohyo.IWAE(5))
        >>> model = dohyo.models.VAE(data=64, hidden=32, latent=8)
        >>> records = list(dohyo.fit(model, load("digits"), objective, dohyo.LoopConfig(epochs=2, batch_size=500)))
        >>> records[1]["valid_nll"] < records[0]["valid_nll"]
        True
    """
    check_model(model, objective)
    yield from train(model, OnData(data), objective, config or LoopConfig(), folder, fabric)


def train(
    model: nn.Module,
    task: Task[Any],
    objective: Objective,
    config: Any,
    folder: Path | None = None,
    fabric: Fabric | None = None,
) -> Iterator[Record]:
    """`fit` for any task; the config is a `LoopConfig` on data and a `DrawsConfig` on draws of the model."""
    for _, record in train_together([Member(model, task, config, folder)], objective, fabric):
        yield record


@dataclass
class Member:
    """One run among those that are trained together: its model, task and config, and the folder that it is kept in."""

    model: nn.Module
    task: Task[Any]
    config: Any
    folder: Path | None = None


class Diverged(DohyoError):  # noqa: N818
    """Runs whose numbers are no longer numbers; `places` are theirs among the members."""

    def __init__(self, message: str, places: Sequence[int]) -> None:
        super().__init__(message)
        self.places = places


def choose_for(members: Sequence[Member], objective: Objective, fabric: Fabric) -> Choice:
    """How `train_together` will train these, or its ValueError."""
    _check_alike([member.config for member in members])
    for member in members:
        member.task.begin(fabric, member.config)
    return choose([member.model for member in members], members[0].task, objective, members[0].config, fabric)


def train_together(members: Sequence[Member], objective: Objective, fabric: Fabric | None = None) -> Iterator[tuple[int, Record]]:
    """`train` for several runs in one program; yields a member's place and its record after each of its epochs.

    The members' configs differ in nothing but the seed and the epochs. Each run is the one that it would be alone with the same
    `k_seed`, to rounding, and its folder and checkpoint are those of a run alone. Members that are behind, because a kill came
    between two checkpoints, catch up first. One that diverges is left where it was, and said when the others are done: a
    `Diverged`. Another ValueError (`Unbatchable`) says why these models cannot be trained together.
    """
    fabric = fabric or launch(members[0].config.device)
    choice = choose_for(members, objective, fabric)
    runs: list[_Run] = []
    saved, program = time.monotonic(), None
    try:
        for member in members:  # one at a time, so that those that are open are closed if the next cannot be
            runs.append(_Run(member, fabric, objective, own_noise=choice.together))  # noqa: PERF401
        while going := [run for run in runs if not run.over]:
            behind = min(run.state.progress.epoch for run in going)
            team = [run for run in going if run.state.progress.epoch == behind]
            if program is None or program.states != [run.state for run in team]:
                program = None
                gc.collect()  # the graphs of the last program, before others are recorded
                program = choice.program([run.state for run in team], [run.member.task for run in team])
            started = time.monotonic()
            for run in team:
                run.member.task.prepare(run.state, run.member.config)
            records = train_epoch(program, [run.member for run in team], objective, fabric)
            trained = time.monotonic()
            for run, record in zip(team, records, strict=True):
                run.check({**record, "program": choice.name}, fabric)
            checked = time.monotonic()
            healthy = [run for run in team if run.failure is None]
            for run in healthy:  # time passes for all of them alike
                run.after_epoch(fabric, trained - started, checked - started)
            due = fabric.broadcast(any(run.due(saved) for run in healthy))  # the first process's clock decides for all
            if due:
                for run in healthy:
                    run.save(fabric)
                saved = time.monotonic()
            for run in healthy:
                yield runs.index(run), run.record
        for run in runs:
            run.member.model.load_state_dict(run.state.best)
        if failed := {place: run.failure for place, run in enumerate(runs) if run.failure is not None}:
            raise Diverged("; ".join(failed.values()), list(failed))
    finally:
        for run in runs:
            run.close()


class _Run:
    """A member under way."""

    def __init__(self, member: Member, fabric: Fabric, objective: Objective, own_noise: bool) -> None:
        self.member, config, folder = member, member.config, member.folder
        self.state = State.start(member.model, config, fabric, objective.shared, own_noise)
        self.record: Record = {}
        self.failure: str | None = None
        self.log: RunLog | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.state.restore(folder, config, fabric, member.task)
            self.log = RunLog(folder, self.state.progress.epoch) if fabric.is_global_zero else None
        self.over: bool = config.over(self.state.progress)

    def check(self, record: Record, fabric: Fabric) -> None:
        """Look at the epoch, of which the steps told this."""
        self.failure = _failure(record, self.state, self.member.folder)
        if self.failure is not None:
            self.over = True
        else:
            self.record = record | self.member.task.check(self.state.model, record, self.member.config, fabric)

    def after_epoch(self, fabric: Fabric, step_seconds: float, seconds: float) -> None:
        config, progress, record = self.member.config, self.state.progress, self.record
        progress.step_seconds += step_seconds
        self.state.after_epoch(record.pop("score", None), config)
        progress.stopped = record.pop("stop", False)
        progress.seconds += seconds
        self.record = {"epoch": progress.epoch, "step": progress.step, **record, "seconds": progress.seconds}
        if self.log is not None:
            self.log.append(self.record)
        self.over = fabric.broadcast(config.over(progress))

    def due(self, saved: float) -> bool:
        """Whether the checkpoint is to be written now."""
        first = self.member.folder is not None and not (self.member.folder / CHECKPOINT).exists()
        return self.over or first or time.monotonic() - saved > self.member.config.checkpoint_seconds

    def save(self, fabric: Fabric) -> None:
        if self.member.folder is not None:
            self.state.save(self.member.folder, self.member.config, fabric, self.member.task)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def train_epoch(program: Program, members: Sequence[Member], objective: Objective, fabric: Fabric) -> list[Record]:
    """The steps of an epoch; returns the means of what they told, for each member."""
    kept, states = program.team.kept, program.states
    for state, member in zip(states, members, strict=True):
        state.model.train()
        state.set_rate(member.config.rate(state.progress))
    for total in (*kept.sums.values(), kept.clipped):
        total.zero_()
    orders = [m.task.batches(m.config, s.progress, s.order) for m, s in zip(members, states, strict=True)]
    with program:
        steps, data = program.steps(orders)
    # The gradient norms, and so the clipped steps, are the same on all processes; the sums over data are not.
    shares = (kept.clipped / steps).tolist()
    means = sum_over_processes(fabric, [torch.stack(list(kept.sums.values()), 1) / data])[0].tolist()
    records = []
    for state, mean, share, baseline in zip(states, means, shares, kept.baseline.tolist(), strict=True):
        state.progress.baseline = baseline if objective.running_baseline else None
        records.append(dict(zip(kept.sums, mean, strict=True)))
        records[-1] |= {"learning_rate": state.rate, "clipped_decoder": share[0], "clipped_encoder": share[1]}
    return records


def _failure(record: Record, state: State, folder: Path | None) -> str | None:
    """What to say of a run whose numbers are no longer numbers."""
    wrong = [name for name, value in record.items() if isinstance(value, float) and math.isnan(value)]
    if not wrong:
        return None
    return (
        f"training diverged in epoch {state.progress.epoch + 1} (up to step {state.progress.step}): {wrong[0]} is NaN; a "
        f"checkpoint of an earlier epoch, if there is one, is kept{'' if folder is None else f' in {folder}'} "
        "(try a lower learning rate or clip norm)"
    )


def _check_alike(configs: Sequence[Any]) -> None:
    """A ValueError if configs differ in what one program cannot have twice."""
    first = identity(configs[0])
    for config in configs[1:]:
        for key, value in identity(config).items():
            if key != "seed" and value != first[key]:
                raise DohyoError(f"{key} is {value} and {first[key]}; runs that are trained together differ in seed alone")
        if getattr(config, "k_seed", 0) is None:
            raise DohyoError("runs that are trained together have one k_seed; set it, to the seed of the first, say")
