"""The loop: epochs of steps, validation, schedule, checkpoints. Copy it and change it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.estimators import IWAE
from dohyo.evaluation import evaluate
from dohyo.objectives import Losses, MaximumLikelihood
from dohyo.objectives.maximum_likelihood import check_model
from dohyo.training.config import LoopConfig
from dohyo.training.log import RunLog
from dohyo.training.processes import launch, sum_over_processes
from dohyo.training.state import State

Record = dict[str, Any]


class Data(Protocol):
    """What the loop asks of data; `dohyo.data.Dataset` has it."""

    @property
    def train(self) -> Tensor: ...
    @property
    def valid(self) -> Tensor: ...
    def train_batch(self, index: Tensor) -> Tensor: ...
    def to(self, device: torch.device) -> "Data": ...


def fit(
    model: nn.Module,
    data: Data,
    objective: MaximumLikelihood,
    config: LoopConfig | None = None,
    folder: Path | None = None,
    fabric: Fabric | None = None,
) -> Iterator[Record]:
    """Train, and yield a record after each epoch; `model` holds the best parameters when the loop ends by itself.

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
    config = config or LoopConfig()
    check_model(model, objective)
    fabric = fabric or launch(config.device)
    if min(len(data.train), len(data.valid)) < fabric.world_size:
        raise ValueError(f"{len(data.train)} training and {len(data.valid)} validation data for {fabric.world_size} processes")
    state = State.start(model, config, fabric, objective.shared)
    log = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        state.restore(folder, config, fabric)
        log = RunLog(folder, state.epoch) if fabric.is_global_zero else None
    data = data.to(fabric.device)
    saved = time.monotonic()
    try:
        while state.epoch < config.epochs and state.stale < config.stop_patience:
            started = time.monotonic()
            record = train_epoch(state, data, objective, config, fabric)
            record["valid_nll"] = validation_nll(state.model, data.valid, config, fabric)
            state.after_epoch(record["valid_nll"], config)
            state.seconds += time.monotonic() - started
            record = {"epoch": state.epoch, **record, "seconds": state.seconds}
            if log is not None:
                log.append(record)
            over = state.epoch >= config.epochs or state.stale >= config.stop_patience
            due = over or time.monotonic() - saved > config.checkpoint_seconds
            if folder is not None and fabric.broadcast(due):  # the first process's clock decides for all
                state.save(folder, config, fabric)
                saved = time.monotonic()
            yield record
        model.load_state_dict(state.best)
    finally:
        if log is not None:
            log.close()


def train_epoch(state: State, data: Data, objective: MaximumLikelihood, config: LoopConfig, fabric: Fabric) -> Record:
    """One pass over the training data in random order."""
    state.model.train()
    order = torch.randperm(len(data.train), generator=state.order)
    totals = torch.zeros(5, dtype=torch.float64, device=fabric.device)
    for batch in order.split(config.batch_size):
        own = batch[fabric.global_rank :: fabric.world_size]
        totals += train_step(state, data.train_batch(own.to(fabric.device)), len(batch), objective, config, fabric)
    # The gradient norms, and so the clipped steps, are the same on all processes; the sums over data are not.
    sums, steps = totals[:3], totals[3:] / -(-len(order) // config.batch_size)
    nll, iwae, clipped_data = (sum_over_processes(fabric, [sums])[0] / len(order)).tolist()
    if iwae != iwae:
        raise ValueError(
            f"training diverged in epoch {state.epoch + 1}: log-weights are NaN; a checkpoint of an earlier epoch, if "
            "there is one, is kept (try a lower learning rate or clip norm)"
        )
    return {
        "train_nll": -nll,
        "train_iwae_nll": -iwae,
        "learning_rate": state.optimiser.param_groups[0]["lr"],
        "clipped_decoder": float(steps[0]),
        "clipped_encoder": float(steps[1]),
        "clipped_data": clipped_data,
    }


def train_step(state: State, x: Tensor, batch: int, objective: MaximumLikelihood, config: LoopConfig, fabric: Fabric) -> Tensor:
    """One step on this process's part `x` of a batch; returns sums for the record."""
    model: Any = state.model
    theta, phi = _parameters(state.model)
    sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)  # of log p(x), IWAE_n and clipped data
    scaled = [torch.zeros_like(parameter) for parameter in theta + phi]
    if len(x) > 0:
        losses = objective(model, x, state.depth, state.baseline or 0.0)
        gradients = _gradients(losses, theta, phi)
        share = len(x) / batch  # the losses are means over this part, the step's over the whole batch
        scaled = [zero if g is None else g * share for zero, g in zip(scaled, gradients, strict=True)]
        sums = torch.stack([losses.log_px.sum(), losses.iwae.sum(), losses.clipped * len(x)])
    elif objective.shared:  # the last batch had nothing for this process: only keep in step with the others' K
        objective.estimator.plan(1, state.depth, shared=True)
    *scaled, iwae_mean = sum_over_processes(fabric, [*scaled, (sums[1] / batch).to(scaled[0].dtype)])
    clipped_theta = _clip(scaled[: len(theta)], config.clip_decoder)
    clipped_phi = _clip(scaled[len(theta) :], config.clip_encoder)
    for parameter, gradient in zip(theta + phi, scaled, strict=True):
        parameter.grad = gradient
    state.optimiser.step()
    if objective.running_baseline:  # for the next step: it must not depend on that step's draws
        state.baseline = float(iwae_mean) if state.baseline is None else 0.99 * state.baseline + 0.01 * float(iwae_mean)
    return torch.cat([sums, torch.stack([clipped_theta, clipped_phi])])


def _gradients(losses: Losses, theta: list[nn.Parameter], phi: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    if losses.phi is losses.theta:
        return torch.autograd.grad(losses.theta, theta + phi, allow_unused=True)
    for_theta = torch.autograd.grad(losses.theta, theta, retain_graph=True, allow_unused=True) if theta else ()
    return for_theta + (torch.autograd.grad(losses.phi, phi, allow_unused=True) if phi else ())


def validation_nll(model: nn.Module, valid: Tensor, config: LoopConfig, fabric: Fabric) -> float:
    """The mean NLL by IWAE over the validation data, shared out among the processes, with a seed of its own."""
    own = valid[fabric.global_rank :: fabric.world_size]
    estimator = IWAE(config.valid_terms)
    seed = config.seed + fabric.global_rank
    result = evaluate(model, own, estimator, batch_size=1000, max_rows=config.max_rows, khat_samples=0, seed=seed)  # type: ignore[arg-type]
    total = torch.tensor(result.mean * len(own), dtype=torch.float64, device=fabric.device)
    return -float(sum_over_processes(fabric, [total])[0]) / len(valid)


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
