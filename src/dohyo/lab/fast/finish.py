"""The end of a step for replicas: record numbers, clip gradients, update parameters. Each tensor has a row for each replica."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dohyo.contract import split
from dohyo.lab.fast.stacked import Stacked, flat_row, row_length, unflattened
from dohyo.lab.training.state import State


class Totals(NamedTuple):
    """Like `training.step.Totals`, in tensors that a recorded step changes in place, with a row for each replica."""

    sums: dict[str, Tensor]  # over the data, of each number recorded in this epoch
    clipped: Tensor  # (replicas, 2) the number of steps in which theta's and phi's gradients were clipped
    baseline: Tensor  # (replicas,) the running baselines; NaN if there is none yet


class Finish:
    """Applies the gradients of a step. In this plain version each replica's own optimiser does so."""

    def __init__(self, states: Sequence[State], models: Stacked, running_baseline: bool, config: Any) -> None:
        self.states, self.models, self.running_baseline, self.config = states, models, running_baseline, config
        self.each = [[*theta, *phi] for theta, phi in (split(state.model) for state in states)]
        known = [state.progress.baseline for state in states]
        device = models.flat.device
        baseline = torch.tensor([torch.nan if b is None else b for b in known], dtype=torch.float64, device=device)
        self.totals = Totals({}, torch.zeros(len(states), 2, dtype=torch.float64, device=device), baseline)

    def begin(self) -> None:
        """Called before an epoch."""
        for total in (*self.totals.sums.values(), self.totals.clipped):
            total.zero_()

    def end(self) -> None:
        """Called after an epoch."""

    def __call__(self, gradients: list[Tensor], numbers: Mapping[str, Tensor], level: Tensor) -> None:
        for name in numbers:
            if name not in self.totals.sums:
                self.totals.sums[name] = torch.zeros_like(self.totals.baseline)
        self.follow(gradients, numbers, level)

    def follow(self, gradients: list[Tensor], numbers: Mapping[str, Tensor], level: Tensor) -> None:
        flat = self.settle(self.totals, gradients, numbers, level)
        for state, own, row in zip(self.states, self.each, flat, strict=True):
            for parameter, gradient in zip(own, unflattened(row, own), strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            state.optimiser.step()

    def settle(self, totals: Totals, gradients: list[Tensor], numbers: Mapping[str, Tensor], level: Tensor) -> Tensor:
        """The clipped gradients (replicas, numbers) of theta and phi; a function of tensors alone."""
        for name, values in numbers.items():
            totals.sums[name] += values.double().unflatten(0, (len(totals.baseline), -1)).sum(1)
        flat, level = flat_row(gradients), level.to(gradients[0].dtype)
        if self.running_baseline:  # used by the next step, so it does not depend on that step's noise
            totals.baseline.copy_(torch.where(totals.baseline.isnan(), level, 0.99 * totals.baseline + 0.01 * level))
        edge = row_length(gradients[: len(self.models.theta)])
        theta, clipped_theta = _clip(flat[:, :edge], self.config.clip_decoder)
        phi, clipped_phi = _clip(flat[:, edge:], self.config.clip_encoder)
        totals.clipped.add_(torch.stack([clipped_theta, clipped_phi], 1))
        return torch.cat([theta, phi], 1)


def _clip(flat: Tensor, most: float | None) -> tuple[Tensor, Tensor]:
    """The rows, scaled so that their norm is at most `most`; and 1 for each row that was scaled, else 0."""
    norm = torch.linalg.vector_norm(flat, dim=1)
    if most is None:
        return flat, torch.zeros_like(norm, dtype=torch.float64)
    return flat * (most / (norm + 1e-6)).clamp(max=1.0)[:, None], (norm > most).double()
