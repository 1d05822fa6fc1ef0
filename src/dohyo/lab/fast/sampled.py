"""Stacked models that are trained on their own samples: reverse KL, and policies.

Where theta's loss and phi's differ, the log-weights are computed twice, once for each, with the other's parameters constant. The
compiler finds that both have the same values; only the backward passes are two, as in the plain objective.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from dohyo.lab.fast.noise import Asked
from dohyo.lab.fast.stacked import LINE, Stacked, Tensors
from dohyo.objectives import ReverseKL


@dataclass(eq=False)
class StackedSamplers(Stacked):
    """`Stacked` for models that draw their data themselves."""

    objective: Any = None  # a `ReverseKL`, or a `Reinforce` with an estimator
    batch: int = 0  # samples of each model in a step

    def __post_init__(self) -> None:
        super().__post_init__()
        with torch.no_grad(), Asked() as asked:
            _, x = self.function.joint(self.batch)
        self.joint = asked.noise
        self.wanted = [*self.joint, *self.pieces(x)]

    def __call__(self, rows: Tensor, noise: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        """What `_reverse_kl` or `_reinforce` returns, for all models."""
        first = len(self.joint)
        rows, weights = self._in_lines(LINE, rows, noise[first:])
        return list(self._run(self.parameters, self.buffers, rows, noise[:first], weights))

    def _mapped(  # type: ignore[override]
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
        objective, run = self.objective, self.function
        z, x = functional_call(run, theta, ("joint", joint, self.batch))
        constant = ({name: value.detach() for name, value in both[0].items()}, both[1])
        direct = constant if objective.paths != "all" else both if objective.encoder == "same" else theta
        options = {"detach_x": True} if objective.paths == "decoder" else {}
        log_w = functional_call(run, direct, ("weights", weights, x, rows), options)
        return log_w, objective.target(x), *self._of_phi(phi, z.detach(), x.detach(), rows, weights)

    def _reinforce(self, both: Any, theta: Any, phi: Any, rows: Tensor, joint: list[Tensor], weights: list[Tensor]) -> Any:
        """The log-weights that theta follows, the samples, and what phi follows."""
        z, x = (drawn.detach() for drawn in functional_call(self.function, theta, ("joint", joint, self.batch)))
        direct = both if self.objective.encoder == "same" else theta
        log_w = functional_call(self.function, direct, ("weights", weights, x, rows))
        return log_w, x, *self._of_phi(phi, z, x, rows, weights)

    def _of_phi(self, phi: Any, z: Tensor, x: Tensor, rows: Tensor, weights: list[Tensor]) -> list[Tensor]:
        encoder = self.objective.encoder
        if encoder == "same":
            return []
        if encoder == "sleep":
            return [functional_call(self.function, phi, ("log_q", [], x, z))]
        return [functional_call(self.function, phi, ("weights", weights, x, rows), self.options)]
