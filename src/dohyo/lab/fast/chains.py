"""Stacked models that are trained through annealed chains.

One leapfrog is compiled, not the whole chain: a chain is the same program called T times, whatever T is; on a CUDA GPU the
paper's VAE has a kernel for whole chains instead. The ends' log p(x, z), through which theta's gradient passes, is one more
program, and the encoder's own log-weights are another.
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
from dohyo.models import VAE
from dohyo.models.networks import BernoulliPixels


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
    leapfrogs: Any = None  # the kernel for whole chains, in place of a program for each leapfrog

    def round_forces(self) -> None:
        """Let the chains' forces be computed from factors of 11 bits, where there is a kernel that does so."""
        inside = self.models[0].model
        plain = type(inside) is VAE and isinstance(inside.observed, BernoulliPixels) and self.flat.dtype == torch.float32
        if self.flat.device.type != "cuda" or not plain or "model.mixing" in self.buffers:
            return
        from dohyo.lab.fast.kernel import Leapfrogs, fits  # where there is no CUDA GPU there may be no Triton

        decoder = {name.removeprefix("model.model.decoder."): value.detach() for name, value in self.parameters.items()}
        constants = {name.removeprefix("model."): value for name, value in self.buffers.items()}
        if fits(decoder):
            self.leapfrogs = Leapfrogs(decoder, constants)

    def __call__(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Weights:
        return self.ends(x, rows, noise), [self.fresh(x, rows, noise)]

    def fresh(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Tensor:
        """The log-weights of the encoder's own samples, by which phi is trained."""
        x = x.unflatten(0, (len(self.models), -1))
        found: Tensor = self._run("weights", self.parameters, self.buffers, rows, noise[: self._order[0]], x)
        return found.flatten()

    def ends(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Tensor:
        """The log-weights of chains, by which theta is trained."""
        x = x.unflatten(0, (len(self.models), -1))
        first, last = self._order
        start, refresh = noise[first:last], noise[last:]
        with torch.no_grad():
            code, state = self._run("start", self.parameters, self.buffers, rows, start, x)
            leap = self._leaps if self.leapfrogs is None else self.leapfrogs
            state = leap(x, rows, code, state, refresh)
        log_w: Tensor = self._run("end", self.parameters, self.buffers, rows, [], x, code, state)
        return log_w.flatten()

    def _leaps(self, x: Tensor, rows: Tensor, code: Any, state: State, noise: list[Tensor]) -> State:
        for t in range(self.buffers["model.bridge"].shape[1]):
            step, bridge = self.buffers["model.step"][:, t], self.buffers["model.bridge"][:, t]
            name = "leap again" if t else "leap"
            state = self._run(name, self.parameters, self.buffers, rows, noise[t - 1 : t], x, code, state, step, bridge)
        return state

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
            if part == "weights":
                constant = {name: value.detach() if name in self.of_theta else value for name, value in values.items()}
                return functional_call(self.function, (constant, buffers), (part, noise, x, rows), self.options)
            refresh = (part == "leap again",) if part.startswith("leap") else ()
            return functional_call(self.function, (values, buffers), (part.split()[0], noise, *refresh, x, rows, *rest))

        return vmap(one)(parameters, buffers, noise, *of_each)
