"""Stacked models that are trained through annealed chains.

One leapfrog is compiled, not the whole chain: a chain is the same program called T times, whatever T is; on a CUDA GPU the
paper's VAE has a kernel for whole chains instead. The ends' log p(x, z), through which theta's gradient passes, is one more
program, and the encoder's own log-weights are another.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dohyo.annealing.chain import Source, State
from dohyo.contract import bound
from dohyo.lab.fast.noise import Asked, Piece
from dohyo.lab.fast.stacked import Functions, Stacked, Tensors, Weights
from dohyo.models import VAE
from dohyo.models.networks import BernoulliPixels

_DECODER = [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]  # for which there is a kernel
_log = logging.getLogger(__name__)


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
        inside: Any = self.models[0].model
        plain = type(inside) is VAE and type(inside.observed) is BernoulliPixels and self.flat.dtype == torch.float32
        if not plain or [type(layer) for layer in inside.decoder] != _DECODER:
            return
        try:
            from dohyo.lab.fast.kernel import Leapfrogs, fits
        except ImportError:  # PyTorch brings Triton for most CUDA GPUs
            return
        decoder = {name.removeprefix("model.model.decoder."): value.detach() for name, value in self.parameters.items()}
        constants = {name.removeprefix("model."): value for name, value in self.buffers.items()}
        if fits(decoder, constants):
            self.leapfrogs = Leapfrogs(decoder, constants)

    def __call__(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Weights:
        return self.ends(x, rows, noise), [self.fresh(x, rows, noise)]

    def fresh(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Tensor:
        """The log-weights of the encoder's own samples, by which phi is trained."""
        x = x.unflatten(0, (len(self.models), -1))
        found: Tensor = self._part("weights", rows, noise[: self._order[0]], x)
        return found.flatten()

    def ends(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Tensor:
        """The log-weights of chains, by which theta is trained."""
        x = x.unflatten(0, (len(self.models), -1))
        first, last = self._order
        start, refresh = noise[first:last], noise[last:]
        with torch.no_grad():
            code, state = self._part("start", rows, start, x)
            state = self._moved(x, rows, code, state, refresh)
        log_w: Tensor = self._part("end", rows, [], x, code, state)
        return log_w.flatten()

    def _moved(self, *chains: Any) -> State:
        if self.leapfrogs is not None:
            try:
                return self.leapfrogs(*chains)  # type: ignore[no-any-return]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the first launch compiles it, for a GPU and with a Triton that it may not have met
                reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                _log.warning("chains are slower than they could be: their kernel failed (%s)", reason)
                self.leapfrogs = None
        return self._leaps(*chains)

    def _leaps(self, x: Tensor, rows: Tensor, code: Any, state: State, noise: list[Tensor]) -> State:
        for t in range(self.buffers["model.bridge"].shape[1]):
            step, bridge = self.buffers["model.step"][:, t], self.buffers["model.bridge"][:, t]
            state = self._part("leap again" if t else "leap", rows, noise[t - 1 : t], x, code, state, step, bridge)
        return state

    def _part(self, name: str, rows: Tensor, noise: list[Tensor], x: Tensor, *rest: Any) -> Any:
        """Run this part, in one program for any number of chains."""
        if self.compiler is not None and self.varying and len(rows) > 1:
            torch._dynamo.mark_dynamic(rows, 0)
            for part in [*noise, *(part for state in rest if isinstance(state, State) for part in state)]:
                if part.shape[1:2] == rows.shape:  # perhaps by coincidence: this number then gets a separate program
                    torch._dynamo.maybe_mark_dynamic(part, 1)
        return self._run(name, self.parameters, self.buffers, rows, noise, x, *rest)

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
