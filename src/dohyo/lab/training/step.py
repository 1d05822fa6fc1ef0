"""One step: loss, gradients, clipping, optimiser. Copy it and change it; what makes it fast on a GPU is in `dohyo.lab.fast`."""

from dataclasses import dataclass, field

import torch
from lightning_fabric import Fabric
from torch import Tensor

from dohyo.lab.training.config import StepConfig
from dohyo.lab.training.processes import sum_over_processes
from dohyo.lab.training.state import State
from dohyo.lab.training.tasks import Objective


@dataclass
class Totals:
    """Running totals over the steps of an epoch, on the device."""

    baseline: Tensor  # the running baseline; NaN if there is none yet
    clipped: Tensor  # (2,) the number of steps in which theta's and phi's gradients were clipped
    sums: dict[str, Tensor] = field(default_factory=dict)  # of each recorded number over the data of this process

    @classmethod
    def start(cls, baseline: float | None, device: torch.device) -> "Totals":
        known = torch.nan if baseline is None else baseline
        return cls(torch.full((), known, dtype=torch.float64, device=device), torch.zeros(2, dtype=torch.float64, device=device))


def train_step(
    state: State, x: Tensor, batch: int, objective: Objective, config: StepConfig, fabric: Fabric, totals: Totals
) -> None:
    """One step on `x`, this process's part of a batch with `batch` data; the part may be empty."""
    level = torch.zeros_like(totals.baseline)
    state.optimiser.zero_grad()
    if len(x) > 0:
        baseline = totals.baseline.nan_to_num(0.0).expand(len(x)) if objective.running_baseline else 0.0
        outcome = objective(state.following, x, state.depth, baseline)
        loss = outcome.loss if len(x) == batch else outcome.loss * (len(x) / batch)  # it is a mean over this process's part
        loss.backward()
        if objective.running_baseline:
            level = outcome.level.double().sum() / batch
        for name, values in outcome.numbers.items():
            totals.sums[name] = totals.sums.get(name, 0.0) + values.double().sum()
    elif objective.shared:
        objective.skip(state.depth)  # to stay in step with the other processes' K
    _join(fabric, [*state.theta, *state.phi], level, totals, objective.running_baseline)
    for place, (own, most) in enumerate(((state.theta, config.clip_decoder), (state.phi, config.clip_encoder))):
        if most is not None and own:
            totals.clipped[place] += _clip(own, most)
    state.optimiser.step()


def _join(fabric: Fabric, parameters: list[torch.nn.Parameter], level: Tensor, totals: Totals, running: bool) -> None:
    """Sum gradients and level over the processes; the level updates the baseline of the *next* step, which has new noise."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    level = level.to(parameters[0].dtype)
    if fabric.world_size > 1:
        *gradients, level = sum_over_processes(fabric, [*gradients, level])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not gradient:
            parameter.grad = gradient
    if running:
        totals.baseline = torch.where(totals.baseline.isnan(), level, 0.99 * totals.baseline + 0.01 * level)


def _clip(parameters: list[torch.nn.Parameter], most: float) -> Tensor:
    """Scale the gradient so that its norm is at most `most`; return whether that was needed."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return torch.as_tensor(norm > most)
