"""One program for runs that are trained on samples of their own models: reverse KL, and latent policies.

A step's data are made inside it, from noise: all that it needs is a plan, noise, and for policies the weight of the entropy.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dohyo.lab.fast.captured import Layout, Shape, compiled
from dohyo.lab.fast.datum import DatumProgram
from dohyo.lab.fast.sampled import StackedSamplers
from dohyo.lab.training.processes import one_thread
from dohyo.objectives import ReverseKL
from dohyo.objectives.weighing import coefficients


class DrawnProgram(DatumProgram):
    """`Program` for reverse KL and policies."""

    def _prepare(self, generators: list[torch.Generator]) -> None:
        super()._prepare(generators)
        self.reverse_kl = isinstance(self.objective, ReverseKL)
        self.best = None if self.reverse_kl else Best(self.tasks, self.device, self.captured)

    def _stacked(self, models: Any, generators: list[torch.Generator], **options: Any) -> Any:
        return StackedSamplers(models, generators, objective=self.objective, batch=self.batch, **options)

    def steps(self, orders: Sequence[Iterable[Tensor]]) -> tuple[int, int]:
        numbers = []
        for _ in zip(*orders, strict=True):  # they read how far the runs have come
            numbers.append((self._entropy(), self.states[0].progress.step + 1))
            for state in self.states:
                state.progress.step += 1
        with one_thread():
            counts = self._counts(len(numbers), 2 if numbers[0][0] > 0 else 1)
            laid = self._laid(list(counts), torch.tensor(numbers, dtype=torch.float64))
        if self.graphs is not None:
            self.graphs.ready()
        for each in laid:
            self._guarded(None, each)
        return len(laid), len(laid) * self.batch

    def _entropy(self) -> float:
        """The weight of the entropy now; of the first run here, whose task need not be that of the objective."""
        entropy = getattr(self.tasks[0], "entropy", getattr(self.objective, "entropy", 0.0))
        return float(entropy() if callable(entropy) else entropy)

    def _counts(self, steps: int, sets: int) -> Tensor:
        """The plans of several steps (steps, sets * batch), each with the numbers that `Estimator.plan` would draw."""
        objective, depth = self.objective, self.states[0].depth
        batches = [1 if objective.shared else self.batch] * (steps * sets)
        counts = torch.cat(objective.estimator.plans(batches, depth, objective.k_draw == "stratified")).view(steps, -1)
        return counts.repeat_interleave(self.batch, 1) if objective.shared else counts

    def _like(self, shape: Shape) -> list[Tensor]:
        return self.models.like(self.models.wanted, shape.rows)  # type: ignore[no-any-return]

    def _fill(self, views: list[Tensor], totals: Sequence[int], index: Any) -> None:
        self.models.fill(views, self.models.wanted, totals)

    def _step(self, drawn: Sequence[Tensor], shape: Any) -> None:
        row, *noise = drawn
        layout, (entropy, now) = Layout.read(row, shape), row[shape.numbers :].view(torch.float64)
        log_w, of_theta, *of_phi = self.models(layout.rows, noise)
        weigh = self._weigh_kl if self.reverse_kl else self._weigh_policies
        numbers, level, coefficients = weigh(log_w.detach(), of_theta.detach(), layout, entropy, now)
        outputs, seeds = [log_w, *of_phi], [each.to(log_w.dtype) for each in coefficients]
        if self.reverse_kl:
            outputs.append(of_theta)
        # What has no coefficients, log p*(x) and the log q(z; x) of "sleep", is to grow in the mean.
        seeds += [torch.full_like(output, -1 / self.batch) for output in outputs[len(seeds) :]]
        wanted = [*self.models.theta, *self.models.phi]
        gradients = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True, materialize_grads=True)
        self.finish(list(gradients), numbers, level)

    def _weigh_kl(self, log_w: Tensor, log_target: Tensor, layout: Layout, *_: Tensor) -> Any:
        running = self.objective.running_baseline
        baseline = self.finish.totals.baseline.nan_to_num(0.0)[:, None].expand(-1, self.batch).reshape(-1)
        given = [log_target.reshape(-1), *([baseline] if running else [])]
        estimate, square, level, *coefficients = self.tables(self._kl, log_w, layout, *given)
        level = level.view(len(log_w), -1).mean(1) if running else self._nothing
        return {"estimate": estimate, "estimate_square": square}, level, coefficients

    def _kl(self, log_w: Tensor, counts: Tensor, log_target: Tensor, *baseline: Tensor) -> tuple[Tensor, ...]:
        """As in `ReverseKL`: the recorded numbers, what the running baseline follows, and the coefficients of theta and phi."""
        objective = self.objective
        about = log_target.double() + baseline[0] if baseline else None
        value, phi, log_px, iwae = coefficients(
            log_w, counts, about, estimator=objective.estimator, encoder=str(objective.encoder)
        )
        estimate = log_px - log_target
        means = estimate.view(-1, self.batch).mean(1, keepdim=True).expand(-1, self.batch).reshape(-1)
        whole = means if objective.shared else estimate
        of_phi = [] if objective.encoder in ("same", "sleep") else [phi / self.batch]
        return estimate, whole.square(), iwae - log_target, value / self.batch, *of_phi

    def _weigh_policies(self, log_w: Tensor, x: Tensor, layout: Layout, entropy: Tensor, now: Tensor) -> Any:
        assert self.best is not None
        given = [self.best(x, now).reshape(-1), entropy.reshape(1)]
        reward, spread, *coefficients = self.tables(self._policies, log_w, layout, *given)
        return {"reward": reward, "entropy": spread}, self._nothing, coefficients

    def _policies(self, log_w: Tensor, counts: Tensor, rewards: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        """As in `Reinforce`: the recorded numbers, and the coefficients of theta and phi."""
        objective = self.objective
        value, phi, log_px, _ = coefficients(log_w, counts, estimator=objective.estimator, encoder=str(objective.encoder))
        rewards = rewards.double()
        scale = objective.scale() if callable(objective.scale) else objective.scale
        log_px = log_px.view(len(rewards) // self.batch, -1, self.batch)  # (runs, sets, batch)
        gain = (rewards / scale).view(-1, 1, self.batch).expand_as(log_px)
        if log_px.shape[1] == 2:  # each estimate is the value for the score of the other
            gain = gain - entropy * log_px.flip(1)
        if objective.baseline == "leave-one-out" and self.batch > 1:
            gain = gain - (gain.sum(-1, keepdim=True) - gain) / (self.batch - 1)
        size = log_px.shape[1] * self.batch
        of_phi = [] if objective.encoder in ("same", "sleep") else [phi / size]
        return rewards, -log_px.mean(1).reshape(-1), -gain.reshape(-1, 1) * value / size, *of_phi

    def __enter__(self) -> Any:
        entered = super().__enter__()
        if self.best is not None:
            self.best.begin()
        return entered

    def __exit__(self, *reason: object) -> None:
        super().__exit__(*reason)
        if self.best is not None and reason[0] is None:
            self.best.end()


class Best:
    """Rewards of all runs' samples, and the best of each run, kept on the device until the epoch ends.

    The runs' tasks have `values(x)`, the rewards without a check that would wait for the device, `tolerance`, `best.value`, and
    `found`, which is told of a better one.
    """

    def __init__(self, tasks: Sequence[Any], device: torch.device, captured: bool) -> None:
        self.tasks, self.device, self.captured = tasks, device, captured
        self.kept: list[Tensor] = []
        self.program: Any = None

    def begin(self) -> None:
        if self.kept:
            self.kept[0].copy_(self._known(self.kept[0].dtype))
            self.kept[2].zero_()

    def __call__(self, x: Tensor, now: Tensor) -> Tensor:
        """The rewards of x (runs, batch, d), (runs, batch)."""
        rewards: Tensor = self.tasks[0].values(x.flatten(0, 1)).view(x.shape[:2])
        if not self.kept:
            known, steps = self._known(rewards.dtype).to(x.device), torch.zeros(len(x), dtype=torch.float64, device=x.device)
            self.kept = [known, torch.zeros_like(x[:, 0]), steps]
        arguments = (rewards, x, now.reshape(1), *self.kept)
        if self.captured and self.program is None:
            self.program = compiled(lambda *tensors: self._keep(*tensors), *arguments)
        (self.program or self._keep)(*arguments)
        return rewards

    def _known(self, dtype: torch.dtype) -> Tensor:
        least = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
        return torch.tensor([least if task.best.value == -math.inf else task.best.value for task in self.tasks], dtype=dtype)

    def _keep(self, rewards: Tensor, x: Tensor, now: Tensor, value: Tensor, best: Tensor, step: Tensor) -> list[Tensor]:
        top, place = rewards.max(1)
        better = top > (value + self.tasks[0].best.problem.tolerance if value.is_floating_point() else value)
        sample = x.gather(1, place[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
        value.copy_(torch.where(better, top, value))
        best.copy_(torch.where(better[:, None], sample, best))
        step.copy_(torch.where(better, now, step))
        return []

    def end(self) -> None:
        """Tell each task of the best sample of this epoch, if it is better than all before."""
        if self.kept:
            for task, x, step in zip(self.tasks, self.kept[1], self.kept[2].tolist(), strict=True):
                if step > 0:
                    task.found(x, int(step))
