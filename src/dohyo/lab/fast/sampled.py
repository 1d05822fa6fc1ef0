"""Stacked models that are trained on their own samples: reverse KL, and policies.

Where theta's loss and phi's differ, the log-weights are computed twice, once for each, with the other's parameters constant. The
compiler finds that both have the same values; only the backward passes are two, as in the plain objective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dohyo.contract import bound
from dohyo.lab.fast.noise import Asked, Given, Kind, fill
from dohyo.lab.fast.padded import LINE, Shape
from dohyo.lab.fast.stacked import Stacked, Unbatchable
from dohyo.objectives import ReverseKL

Tensors = dict[str, Tensor]


class _Functions(nn.Module):
    """A model's functions; `forward` calls the one that is named, with noise that was made in advance."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, name: str, noise: list[Tensor], *arguments: Any, **options: bool) -> Any:
        with Given(noise):
            return getattr(self, name)(*arguments, **options)

    def joint(self, n: int) -> tuple[Tensor, Tensor]:
        z, x = self.model.sample_joint(n)
        return z, x

    def weights(self, x: Tensor, rows: Tensor, **options: bool) -> Tensor:
        return bound(self.model, x, **options)(rows)

    def log_q(self, x: Tensor, z: Tensor) -> Tensor:
        return self.model.posterior(self.model.encode(x)).log_prob(z)  # type: ignore[no-any-return]


@dataclass(eq=False)
class StackedSamplers(Stacked):
    """`Stacked` for models that draw their data themselves.

    Attributes:
        objective: A `ReverseKL`, or a `Reinforce` with an estimator.
        batch: Samples of each model in a step.
    """

    objective: Any = None
    batch: int = 0

    def _compile(self, empty: nn.Module) -> None:
        self.functions = _Functions(empty).train()
        theta = {id(leaf) for leaf in self.theta}
        self.of_theta = {name for name, leaf in self.parameters.items() if id(leaf) in theta}
        self.kinds_joint, self.kinds_weights = self._asked_here(empty)
        self._run = self._mapped_objective if self.compiler is None else self.compiler(self._mapped_objective)

    def like(self, shape: Shape) -> list[Tensor]:
        """Tensors on meta with the shapes of a step's noise."""
        runs, like = len(self.models), next(iter(self.parameters.values())).to("meta")
        joint = [like.new_empty((runs, *size)) for _, size in self.kinds_joint]
        return joint + [like.new_empty((runs, shape.rows, *size)) for _, size in self.kinds_weights]

    def fill(self, noise: Sequence[Tensor], totals: Sequence[int]) -> None:
        """Draw a step's noise, as each model would on its own: that of its samples, then that of each set of log-weights."""
        joint, weights = noise[: len(self.kinds_joint)], noise[len(self.kinds_joint) :]
        for replica, generator in enumerate(self.generators):
            for part, (kind, _) in zip(joint, self.kinds_joint, strict=True):
                fill(part[replica], kind, generator)
            start = 0
            for total in totals:
                for part, (kind, _) in zip(weights, self.kinds_weights, strict=True):
                    fill(part[replica, start : start + total], kind, generator)
                start += total

    def __call__(self, rows: Tensor, noise: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        """What `_mapped_objective` returns, for all models."""
        first = len(self.kinds_joint)
        table = LINE, len(rows) // LINE  # as in `Stacked`: one size is fixed, which the compiler makes use of
        rows, weights = rows.view(table), [part.unflatten(1, table) for part in noise[first:]]
        if self.compiler is not None and self.varying and table[1] > 1:
            torch._dynamo.mark_dynamic(rows, 1)
            for part in weights:
                torch._dynamo.mark_dynamic(part, 2)
        return list(self._run(self.parameters, self.buffers, rows, noise[:first], weights))

    def _mapped_objective(
        self, parameters: Tensors, buffers: Tensors, rows: Tensor, joint: list[Tensor], weights: list[Tensor]
    ) -> Any:
        of_objective = self._reverse_kl if isinstance(self.objective, ReverseKL) else self._reinforce

        def one(values: Tensors, buffers: Tensors, joint: list[Tensor], weights: list[Tensor]) -> Any:
            theta = {name: value if name in self.of_theta else value.detach() for name, value in values.items()}
            phi = {name: value.detach() if name in self.of_theta else value for name, value in values.items()}
            given = [part.flatten(0, 1) for part in weights]
            return of_objective((values, buffers), (theta, buffers), (phi, buffers), rows.flatten(), joint, given)

        return vmap(one)(parameters, buffers, joint, weights)

    def _reverse_kl(self, both: Any, theta: Any, phi: Any, rows: Tensor, joint: list[Tensor], weights: list[Tensor]) -> Any:
        """The log-weights that theta follows, log p*(x), and what phi follows: log-weights of its own, or log q(z; x)."""
        objective, run = self.objective, self.functions
        z, x = functional_call(run, theta, ("joint", joint, self.batch))
        constant = ({name: value.detach() for name, value in both[0].items()}, both[1])
        direct = constant if objective.paths != "all" else both if objective.encoder == "same" else theta
        options = {"detach_x": True} if objective.paths == "decoder" else {}
        log_w = functional_call(run, direct, ("weights", weights, x, rows), options)
        return log_w, objective.target(x), *self._of_phi(phi, z.detach(), x.detach(), rows, weights)

    def _reinforce(self, both: Any, theta: Any, phi: Any, rows: Tensor, joint: list[Tensor], weights: list[Tensor]) -> Any:
        """The log-weights that theta follows, the samples, and what phi follows."""
        z, x = (drawn.detach() for drawn in functional_call(self.functions, theta, ("joint", joint, self.batch)))
        direct = both if self.objective.encoder == "same" else theta
        log_w = functional_call(self.functions, direct, ("weights", weights, x, rows))
        return log_w, x, *self._of_phi(phi, z, x, rows, weights)

    def _of_phi(self, phi: Any, z: Tensor, x: Tensor, rows: Tensor, weights: list[Tensor]) -> list[Tensor]:
        encoder = self.objective.encoder
        if encoder == "same":
            return []
        if encoder == "sleep":
            return [functional_call(self.functions, phi, ("log_q", [], x, z))]
        options = {"detach_posterior": True} if encoder == "dreg" else {}
        return [functional_call(self.functions, phi, ("weights", weights, x, rows), options)]

    def _asked_here(self, empty: nn.Module) -> tuple[list[tuple[Kind, torch.Size]], list[tuple[Kind, torch.Size]]]:
        """The noise that a model's samples need, and that of each of its log-weights."""
        with torch.no_grad():
            with Asked() as joint:
                _, x = self.functions.joint(self.batch)
            asked = []
            for rows in (3, 5):
                with Asked() as weights:
                    self.functions.weights(x, torch.zeros(rows, dtype=torch.long, device="meta"))
                asked.append(weights.noise)
        if any(a[1] != (3, *a[1][1:]) or b[1] != (5, *a[1][1:]) for a, b in zip(*asked, strict=True)):
            raise Unbatchable(f"{type(self.models[0]).__name__} draws noise for its log-weights that is not one row for each")
        return joint.noise, [(kind, size[1:]) for kind, size in asked[0]]
