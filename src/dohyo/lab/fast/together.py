"""The loop for several runs in one program, or for one captured run: `training.loop`, epoch by epoch, for all at once."""

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import nn

from dohyo.errors import DohyoError
from dohyo.lab.fast.datum import DatumProgram
from dohyo.lab.fast.drawn import DrawnProgram
from dohyo.lab.fast.programs import Choice, Program, choose, own_depths
from dohyo.lab.training.config import StepConfig
from dohyo.lab.training.loop import Diverged, Training, epoch_record
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import identity
from dohyo.lab.training.tasks import Objective, Record, Task
from dohyo.objectives import MaximumLikelihood


class Replica(NamedTuple):
    """One of the runs that are trained together: its model, task and config, and its folder if it has one."""

    model: nn.Module
    task: Task[Any]
    config: Any
    folder: Path | None = None


def program_of(objective: Objective) -> type[Program]:
    """What takes the steps of this objective."""
    if not isinstance(objective, MaximumLikelihood):
        return DrawnProgram
    return DatumProgram if own_depths(objective) else Program


def choose_for(replicas: Sequence[Replica], objective: Objective, fabric: Fabric) -> Choice:
    """How `train_together` will train these; raises the same DohyoError if it cannot."""
    _check_alike([replica.config for replica in replicas])
    for replica in replicas[1:]:
        replica.task.begin(fabric, replica.config)
    return choose([replica.model for replica in replicas], replicas[0].task, objective, replicas[0].config, fabric)


def train_together(
    replicas: Sequence[Replica], objective: Objective, fabric: Fabric | None = None, choice: Choice | None = None
) -> Iterator[tuple[int, Record]]:
    """`train` for several runs in one program; yields a replica's index and its record after each of its epochs.

    The configs may differ only in the seed and the epochs. Each run gives the same result as on its own with the same
    `k_seed`, up to rounding, and has the same folder and checkpoint. Runs that are behind, because a kill came between two
    checkpoints, catch up first. If a run diverges it stops there, and `Diverged` is raised when the others are done. An
    `Unbatchable` says why models cannot be trained together.
    """
    fabric = fabric or launch(replicas[0].config.device)
    choice = choice or choose_for(replicas, objective, fabric)
    runs: list[Training] = []
    lost: dict[int, str] = {}
    program: Program | None = None
    try:
        for model, task, config, folder in replicas:  # one at a time, so that open runs are closed if one fails
            runs.append(Training(model, task, objective, config, folder, fabric, own_noise=True))
        while going := [run for place, run in enumerate(runs) if not run.over and place not in lost]:
            behind = min(run.state.progress.epoch for run in going)
            team = [run for run in going if run.state.progress.epoch == behind]
            team = [run for run in team if run.waiting == team[0].waiting]  # by the clock some may turn to chains before others
            if program is None or program.followed != [run.state.following for run in team]:
                program = None
                gc.collect()  # frees the graphs of the last program before new ones are recorded
                states, tasks, followed = [run.state for run in team], [run.task for run in team], team[0].objective
                program = program_of(followed)(states, tasks, followed, team[0].config, choice.captured)
            yield from _epoch(program, team, runs, choice.name, lost)
        for run in runs:
            run.state.model.load_state_dict(run.state.best)
        if lost:
            raise Diverged("; ".join(lost.values()), list(lost))
    finally:
        for run in runs:
            run.close()


def _epoch(
    program: Program, team: list[Training], runs: list[Training], name: str, lost: dict[int, str]
) -> list[tuple[int, Record]]:
    """One epoch of a team: the index and record of each run; runs that diverged are added to `lost`."""
    started = time.monotonic()
    for run in team:
        run.task.prepare(run.state, run.config)
    records = train_epoch(program, team)
    trained, sound = time.monotonic(), {}
    for run, record in zip(team, records, strict=True):
        try:
            run.check_sound(record)
            sound[runs.index(run)] = {**record, "program": name}
        except Diverged as error:
            lost[runs.index(run)] = str(error)
    begun = {place: runs[place].begin_check(record) for place, record in sound.items()}  # a GPU works on all at once
    checked = {place: results() for place, results in begun.items()}
    seconds = time.monotonic() - started  # all runs share the time
    done = {place: runs[place].count_epoch(record, trained - started, seconds) for place, record in checked.items()}
    if any(runs[place].due() for place in done):
        for place in done:
            runs[place].save()
    return list(done.items())


def train_epoch(program: Program, team: list[Training]) -> list[Record]:
    """The steps of one epoch, and the means of what each run recorded."""
    for run in team:
        run.state.model.train()
        run.state.set_rate(run.config.rate(run.state.progress))
    orders: Any = [run.task.batches(run.config, run.state.progress, run.state.order) for run in team]
    with program:
        steps, data = program.steps(orders)
    totals = program.finish.totals
    sums = torch.stack(list(totals.sums.values()), 1) / data
    found = torch.cat([sums, totals.clipped / steps, totals.baseline[:, None]], 1).tolist()  # one wait for the GPU
    records = []
    for run, (*means, theta, phi, baseline) in zip(team, found, strict=True):
        run.state.progress.baseline = baseline if program.objective.running_baseline else None
        records.append(epoch_record(dict(zip(totals.sums, means, strict=True)), run.state, (theta, phi)))
    return records


def _check_alike(configs: Sequence[StepConfig]) -> None:
    """Raise a DohyoError if configs differ in something that one program must share."""
    first = identity(configs[0])
    for config in configs[1:]:
        if getattr(config, "anneal_from", 0) and config.length != configs[0].length:
            wanted = "runs that turn to chains together need as many"
            raise DohyoError(f"epochs are {config.length} and {configs[0].length}; {wanted}")
        for key, value in identity(config).items():
            if key != "seed" and value != first[key]:
                raise DohyoError(f"{key} is {value} and {first[key]}; runs that are trained together differ in seed alone")
        if config.k_seed is None:
            raise DohyoError("runs that are trained together have one k_seed; set it, to the seed of the first, say")
