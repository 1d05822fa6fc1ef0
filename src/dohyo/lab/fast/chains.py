"""Stacked models that are trained through annealed chains.

One leapfrog is compiled, not the whole chain: a chain is the same program called T times, whatever T is. The ends' log p(x, z),
through which theta's gradient passes, and the encoder's own log-weights are one more program, the only one with a gradient.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dohyo.annealing import Annealed
from dohyo.annealing.chain import Source, State
from dohyo.contract import bound
from dohyo.lab.fast.noise import Asked, Given, Kind
from dohyo.lab.fast.stacked import Stacked, Weights
from dohyo.objectives.weighing import bind_options

Tensors = dict[str, Tensor]


class _Parts(nn.Module):
    """The parts of a chain as functions of tensors; `forward` runs the part that is named."""

    model: Annealed

    def __init__(self, model: nn.Module, options: dict[str, bool]) -> None:
        super().__init__()
        self.model, self.options = model, options  # type: ignore[assignment]

    def forward(self, part: str, noise: list[Tensor], *arguments: Any) -> Any:
        with Given(noise):
            return getattr(self, part)(*arguments)

    def start(self, x: Tensor, rows: Tensor) -> tuple[Any, State]:
        source = Source(self.model.model, x, self._constants(), functional=True)
        return source.code, source(rows).start()

    def leap(self, refresh: bool, x: Tensor, rows: Tensor, code: Any, state: State, step: Tensor, bridge: Tensor) -> State:
        constants = replace(self._constants(), step=step[None], bridge=bridge[None])
        return Source(self.model.model, x, constants, functional=True, code=code)(rows).leap(0, state, refresh)

    def end(self, x: Tensor, rows: Tensor, code: Any, state: State) -> Tensor:
        with torch.no_grad():
            ends = Source(self.model.model, x, self._constants(), functional=True, code=code)(rows).end(state)
        return self.model.weighed(ends, x[rows])

    def fresh(self, x: Tensor, rows: Tensor) -> Tensor:
        """The encoder's own log-weights; as `Annealed.bind_encoder` if theta is given as a constant."""
        return bound(self.model.model, x, **self.options)(rows)

    def _constants(self) -> Any:
        return self.model.constants


class StackedChains(Stacked):
    """`Stacked` for `Annealed` models: it returns the log-weights of chains, and those of the encoder in place of factors."""

    def _compile(self, empty: nn.Module) -> None:
        self.parts = _Parts(empty, bind_options(self.encoder)).train()
        self.steps = int(self.models[0].steps)  # type: ignore[arg-type]
        theta = {id(leaf) for leaf in self.theta}
        self.names = {name for name, leaf in self.parameters.items() if id(leaf) in theta}
        self._run = self._mapped_part if self.compiler is None else self.compiler(self._mapped_part)

    def __call__(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Weights:
        x = x.unflatten(0, (len(self.models), -1))
        first, last = self._order
        fresh, start, refresh = noise[:first], noise[first:last], noise[last:]
        with torch.no_grad():
            code, state = self._run("start", self.parameters, self.buffers, rows, start, x)
            for t in range(self.steps):
                step, bridge = self.buffers["model.step"][:, t], self.buffers["model.bridge"][:, t]
                name = "leap again" if t else "leap"
                state = self._run(name, self.parameters, self.buffers, rows, refresh[t - 1 : t], x, code, state, step, bridge)
        log_w, encoder = self._run("end", self.parameters, self.buffers, rows, fresh, x, code, state)
        return log_w.flatten(), [encoder.flatten()]

    def _asked(self, x: Tensor, rows: Tensor) -> list[tuple[Kind, torch.Size]]:
        with Asked() as asked:
            self.parts.fresh(x, rows)
            first = len(asked.noise)
            _, state = self.parts.start(x, rows)
            self._order = first, len(asked.noise)
        again: tuple[Kind, torch.Size] = ("normal", state.v.shape)
        return [*asked.noise, *[again] * (self.steps - 1)]

    def _mapped_part(
        self, part: str, parameters: Tensors, buffers: Tensors, rows: Tensor, noise: list[Tensor], *of_each: Any
    ) -> Any:
        def one(values: Tensors, buffers: Tensors, noise: list[Tensor], x: Tensor, *rest: Any) -> Any:
            if part == "end":
                constant = {name: value.detach() if name in self.names else value for name, value in values.items()}
                fresh = functional_call(self.parts, (constant, buffers), ("fresh", noise, x, rows))
                return functional_call(self.parts, (values, buffers), ("end", [], x, rows, *rest)), fresh
            refresh = (part == "leap again",) if part.startswith("leap") else ()
            return functional_call(self.parts, (values, buffers), (part.split()[0], noise, *refresh, x, rows, *rest))

        return vmap(one)(parameters, buffers, noise, *of_each)
