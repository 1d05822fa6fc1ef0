"""Stacked models that are trained through annealed chains.

One leapfrog is compiled, not the whole chain: a chain is the same program called T times, whatever T is. The ends' log p(x, z),
through which theta's gradient passes, and the encoder's own log-weights are one more program, the only one with a gradient.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from dohyo.annealing.chain import Source, State
from dohyo.contract import bound
from dohyo.lab.fast.noise import Asked, Piece
from dohyo.lab.fast.stacked import Functions, Stacked, Tensors, Weights


class _Parts(Functions):
    """The parts of a chain as functions of tensors."""

    def start(self, x: Tensor, rows: Tensor) -> tuple[Any, State]:
        source = Source(self.model.model, x, self.model.constants, functional=True)
        return source.code, source(rows).start()

    def leap(self, refresh: bool, x: Tensor, rows: Tensor, code: Any, state: State, step: Tensor, bridge: Tensor) -> State:
        constants = replace(self.model.constants, step=step[None], bridge=bridge[None])
        return Source(self.model.model, x, constants, functional=True, code=code)(rows).leap(0, state, refresh)

    def end(self, x: Tensor, rows: Tensor, code: Any, state: State) -> Tensor:
        with torch.no_grad():
            ends = Source(self.model.model, x, self.model.constants, functional=True, code=code)(rows).end(state)
        return self.model.weighed(ends, x[rows])  # type: ignore[no-any-return]

    def weights(self, x: Tensor, rows: Tensor, **options: bool) -> Tensor:
        """The encoder's own log-weights; as `Annealed.bind_encoder` if theta is given as a constant."""
        return bound(self.model.model, x, **options)(rows)


class StackedChains(Stacked):
    """`Stacked` for `Annealed` models: it returns the log-weights of chains, and those of the encoder in place of factors."""

    _functions = _Parts

    def __call__(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Weights:
        x = x.unflatten(0, (len(self.models), -1))
        first, last = self._order
        fresh, start, refresh = noise[:first], noise[first:last], noise[last:]
        with torch.no_grad():
            code, state = self._run("start", self.parameters, self.buffers, rows, start, x)
            for t in range(self.buffers["model.bridge"].shape[1]):
                step, bridge = self.buffers["model.step"][:, t], self.buffers["model.bridge"][:, t]
                name = "leap again" if t else "leap"
                state = self._run(name, self.parameters, self.buffers, rows, refresh[t - 1 : t], x, code, state, step, bridge)
        log_w, encoder = self._run("end", self.parameters, self.buffers, rows, fresh, x, code, state)
        return log_w.flatten(), [encoder.flatten()]

    def _asked(self, x: Tensor, rows: Tensor) -> list[Piece]:
        own = super()._asked(x, rows)
        with Asked() as asked:
            _, state = self.function.start(x, rows)
        self._order = len(own), len(own) + len(asked.noise)
        again = Piece("normal", state.v.shape)
        return [*own, *asked.noise, *[again] * (self.buffers["model.bridge"].shape[1] - 1)]

    def _mapped(  # type: ignore[override]
        self, part: str, parameters: Tensors, buffers: Tensors, rows: Tensor, noise: list[Tensor], *of_each: Any
    ) -> Any:
        def one(values: Tensors, buffers: Tensors, noise: list[Tensor], x: Tensor, *rest: Any) -> Any:
            if part == "end":
                constant = {name: value.detach() if name in self.of_theta else value for name, value in values.items()}
                fresh = functional_call(self.function, (constant, buffers), ("weights", noise, x, rows), self.options)
                return functional_call(self.function, (values, buffers), ("end", [], x, rows, *rest)), fresh
            refresh = (part == "leap again",) if part.startswith("leap") else ()
            return functional_call(self.function, (values, buffers), (part.split()[0], noise, *refresh, x, rows, *rest))

        return vmap(one)(parameters, buffers, noise, *of_each)
