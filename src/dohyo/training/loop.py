"""The loop of every task: epochs of steps, a check, schedule, checkpoints. Copy it and change it."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.objectives import Losses, MaximumLikelihood
from dohyo.objectives.maximum_likelihood import check_model
from dohyo.training.config import LoopConfig
from dohyo.training.log import RunLog
from dohyo.training.processes import launch, sum_over_processes
from dohyo.training.state import CHECKPOINT, State
from dohyo.training.tasks import Data, Objective, OnData, Record, Task


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
        >>> from dohyo.data import load
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
    fabric = fabric or launch(config.device)
    task.begin(fabric, config)
    state = State.start(model, config, fabric, objective.shared)
    progress, log = state.progress, None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        state.restore(folder, config, fabric, task)
        log = RunLog(folder, progress.epoch) if fabric.is_global_zero else None
    saved, over = time.monotonic(), config.over(progress)
    try:
        while not over:
            started = time.monotonic()
            task.prepare(state, config)
            record = train_epoch(state, task, objective, config, fabric)
            progress.step_seconds += time.monotonic() - started
            record |= task.check(state.model, record, config, fabric)
            state.after_epoch(record.pop("score", None), config)
            progress.stopped = record.pop("stop", False)
            progress.seconds += time.monotonic() - started
            record = {"epoch": progress.epoch, "step": progress.step, **record, "seconds": progress.seconds}
            if log is not None:
                log.append(record)
            first = folder is not None and not (folder / CHECKPOINT).exists()
            old = time.monotonic() - saved > config.checkpoint_seconds
            over, due = fabric.broadcast((config.over(progress), first or old))  # the first process's clock decides for all
            if folder is not None and (over or due):
                state.save(folder, config, fabric, task)
                saved = time.monotonic()
            yield record
        model.load_state_dict(state.best)
    finally:
        if log is not None:
            log.close()


def train_epoch(state: State, task: Task[Any], objective: Objective, config: Any, fabric: Fabric) -> Record:
    """The steps of an epoch; returns the means of what they told."""
    state.model.train()
    for group in state.optimiser.param_groups:
        group["lr"] = config.rate(state.progress)
    sums: dict[str, Tensor] = {}
    clipped = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    first, data = state.progress.step, 0
    for index in task.batches(config, state.progress, state.order):
        own = index[fabric.global_rank :: fabric.world_size]
        losses, clipped_now = train_step(state, task.batch(own.to(fabric.device)), len(index), objective, config, fabric)
        clipped += clipped_now
        data += len(index)
        for name, values in (losses.numbers if losses is not None else {}).items():
            sums[name] = sums.get(name, 0.0) + values.double().sum()
        state.progress.step += 1
    # The gradient norms, and so the clipped steps, are the same on all processes; the sums over data are not.
    shares = (clipped / (state.progress.step - first)).tolist()
    means = sum_over_processes(fabric, [torch.stack(list(sums.values())) / data])[0].tolist()
    record = dict(zip(sums, means, strict=True))
    for name, value in record.items():
        if math.isnan(value):
            raise ValueError(
                f"training diverged in epoch {state.progress.epoch + 1} (up to step {state.progress.step}): {name} is NaN; a "
                "checkpoint of an earlier epoch, if there is one, is kept (try a lower learning rate or clip norm)"
            )
    rate = state.optimiser.param_groups[0]["lr"]
    return record | {"learning_rate": rate, "clipped_decoder": shares[0], "clipped_encoder": shares[1]}


def train_step(
    state: State, x: Tensor, batch: int, objective: Objective, config: Any, fabric: Fabric
) -> tuple[Losses | None, Tensor]:
    """One step on this process's part `x` of a batch; returns its losses, and if theta's and phi's gradients were clipped."""
    theta, phi = _parameters(state.model)
    scaled = [torch.zeros_like(parameter) for parameter in theta + phi]
    level = scaled[0].new_zeros(())
    losses = None
    if len(x) > 0:
        losses = objective(state.model, x, state.depth, state.progress.baseline or 0.0)
        gradients = _gradients(losses, theta, phi)
        share = len(x) / batch  # the losses are means over this part, the step's over the whole batch
        scaled = [zero if g is None else g * share for zero, g in zip(scaled, gradients, strict=True)]
        level = (losses.level.sum() / batch).to(scaled[0].dtype)
    elif objective.shared:  # the last batch had nothing for this process: only keep in step with the others' K
        objective.skip(state.depth)
    *scaled, level = sum_over_processes(fabric, [*scaled, level])
    clipped_theta = _clip(scaled[: len(theta)], config.clip_decoder)
    clipped_phi = _clip(scaled[len(theta) :], config.clip_encoder)
    for parameter, gradient in zip(theta + phi, scaled, strict=True):
        parameter.grad = gradient
    state.optimiser.step()
    if objective.running_baseline:  # for the next step: it must not depend on that step's draws
        before = state.progress.baseline
        state.progress.baseline = float(level) if before is None else 0.99 * before + 0.01 * float(level)
    return losses, torch.stack([clipped_theta, clipped_phi]).to(fabric.device)


def _gradients(losses: Losses, theta: list[nn.Parameter], phi: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    if losses.phi is losses.theta:
        return torch.autograd.grad(losses.theta, theta + phi, allow_unused=True)
    for_theta = torch.autograd.grad(losses.theta, theta, retain_graph=True, allow_unused=True) if theta else ()
    return for_theta + (torch.autograd.grad(losses.phi, phi, allow_unused=True) if phi else ())


def _parameters(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """theta and phi, without what is frozen."""
    split = hasattr(model, "encoder_parameters") and hasattr(model, "decoder_parameters")
    theta = model.decoder_parameters() if split else model.parameters()
    phi = model.encoder_parameters() if split else ()
    return [p for p in theta if p.requires_grad], [p for p in phi if p.requires_grad]


def _clip(gradients: list[Tensor], most: float | None) -> Tensor:
    """Scale the gradients, in place, so that their joint norm is at most `most`; 1 if that was needed, else 0."""
    if most is None or not gradients:
        return torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
    return (norm > most).double()
