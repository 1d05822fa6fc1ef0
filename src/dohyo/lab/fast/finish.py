"""The end of a step for replicas: record numbers, clip gradients, update parameters. Each tensor has a row for each replica."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from dohyo.contract import split
from dohyo.lab.fast.captured import compiled
from dohyo.lab.fast.stacked import Stacked, flat_row, flattened, row_length, unflattened
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


class CompiledFinish(Finish):
    """`Finish` as one compiled function, with torch's own Adam on the parameters of all replicas at once.

    The moments in the runs' optimisers are views of the tables that are updated here.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.config.optimiser == "amsgrad" else [])]
        device = self.models.flat.device
        self.learnt = [[s.optimiser.state[p] for p in own] for s, own in zip(self.states, self.each, strict=True)]
        for own, row in zip(self.each, self.learnt, strict=True):
            for parameter, kept in zip(own, row, strict=True):
                kept.setdefault("step", torch.zeros((), dtype=torch.float32, device=device))
                for key in keys:
                    kept.setdefault(key, torch.zeros_like(parameter))
        tables = [flattened([[kept[key] for kept in row] for row in self.learnt])[0] for key in keys]
        self.steps = torch.stack([row[0]["step"].to(self.models.flat) for row in self.learnt])
        self.rates = torch.zeros_like(self.steps)
        self.adam = [self.models.flat, *tables, self.steps, self.rates]
        self.programs: dict[Any, Callable[..., Any]] = {}

    def begin(self) -> None:
        super().begin()
        self.steps.copy_(torch.stack([row[0]["step"] for row in self.learnt]))  # a task may have started them anew
        self.rates.copy_(torch.tensor([state.rate for state in self.states]))

    def end(self) -> None:
        for row, step in zip(self.learnt, self.steps, strict=True):
            for kept in row:
                kept["step"].copy_(step)

    def follow(self, gradients: list[Tensor], numbers: Mapping[str, Tensor], level: Tensor) -> None:
        names, totals = list(numbers), self.totals
        sizes = [len(gradients), len(names), 1, len(names), 2, len(self.adam)]

        def whole(*tensors: Tensor) -> list[Tensor]:
            groups = iter(tensors)
            steps, values, (tall,), sums, state, own = ([next(groups) for _ in range(size)] for size in sizes)
            keeping = Totals(dict(zip(names, sums, strict=True)), *state)
            flat = self.settle(keeping, steps, dict(zip(names, values, strict=True)), tall)
            self._adam(flat, *own)
            return []

        sums = [totals.sums[name] for name in names]
        arguments = [*gradients, *numbers.values(), level, *sums, totals.clipped, totals.baseline, *self.adam]
        key = (next(iter(numbers.values())).shape, *(gradient.stride() for gradient in gradients))
        if key not in self.programs:
            self.programs[key] = compiled(whole, *arguments)
        self.programs[key](*arguments)

    def _adam(self, gradient: Tensor, parameter: Tensor, *tables: Tensor) -> None:
        """Runs are the last dimension here, so that each has its own learning rate and step count."""
        config = self.config
        average, square, *largest, steps, rates = tables
        adam(
            [parameter.T], [gradient.T], [average.T], [square.T], [table.T for table in largest], [steps],
            foreach=False, differentiable=True, amsgrad=bool(largest), beta1=config.beta1, beta2=config.beta2, lr=rates,
            weight_decay=0.0, eps=config.epsilon, maximize=False,
        )  # fmt: skip
