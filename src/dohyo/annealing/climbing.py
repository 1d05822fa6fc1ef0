"""Adam on the mean log-weight of chains, by their constants. On a CUDA GPU an iteration is recorded once and replayed.

A leapfrog that is differentiated takes about a hundred small kernels, which a GPU does faster than Python can ask for them.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dohyo.annealing.chain import Constants, Ends, Source
from dohyo.packing import rows

CHAINS = 64  # in an iteration, each of a datum of its own where there are so many
STARTS, ASTRAY = 8, 30.0  # a chain has gone astray if its log-weight is so far below the log-mean of as many starts of chains
RATE, BETAS, EPSILON = 0.03, (0.9, 0.99), 1e-8
WIDEST, SLOWLY = 256, 0.1  # the largest z whose momentum is mixed; entries of the matrix are many and each learns more slowly
WARM, WORTH = 3, 50  # iterations before one is recorded, and how many there must be in all


def climb(
    model: Any, data: Tensor, start: Constants, iterations: int, mixing: bool, progress: Callable[[int], None] | None = None
) -> tuple[Constants, int]:
    """Constants learnt on minibatches of the data, and how many chains were lost meanwhile."""
    one, record = Iteration(model, data, start, mixing), data.is_cuda and iterations >= WORTH
    step: Callable[[], None] = one
    numbers = torch.tensor([_rates(i, iterations) for i in range(iterations)], dtype=torch.float64, device=data.device)
    with _stream(data.device) if record else contextlib.nullcontext():
        for i in range(iterations):
            one.x.copy_(data[torch.arange(i * one.size, (i + 1) * one.size, device=data.device) % len(data)])
            one.rates.copy_(numbers[i])
            if record and i == WARM and _never_waits(one.gradients):
                step = _recorded(one)
            step()
            if progress is not None:
                progress(i + 1)
    return one.learnt.constants().frozen(), round(float(one.lost))


class Iteration:
    """A step of Adam; what changes from one to the next is in tensors that stay where they are."""

    def __init__(self, model: Any, data: Tensor, start: Constants, mixing: bool) -> None:
        size = Source(model, data[:1], start).size
        self.model, self.learnt = model, _Learnt(start, size, mixing and 1 < size <= WIDEST, data.device)
        self.moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in self.learnt.parameters]
        self.size = min(CHAINS, len(data))
        each = min(STARTS, CHAINS // self.size)
        self.own, self.starts = (rows(torch.full((self.size,), n), data.device) for n in (each, STARTS))
        self.x, self.lost = data[: self.size].clone(), torch.zeros((), device=data.device)
        self.rates = torch.zeros(3, dtype=torch.float64, device=data.device)

    def __call__(self) -> None:
        gradients, gone = self.gradients()
        rate, *corrections = self.rates
        for parameter, gradient, moments in zip(self.learnt.parameters, gradients, self.moments, strict=True):
            for moment, power, beta in zip(moments, (gradient, gradient.square()), BETAS, strict=True):
                moment.lerp_(power, 1 - beta)
            mean, square = (moment / correction for moment, correction in zip(moments, corrections, strict=True))
            parameter.data.sub_(rate * mean / (square.sqrt() + EPSILON))
        self.learnt.parameters[0].data.sub_(gone)  # shorter steps lose fewer
        self.lost += gone * len(self.own)

    def gradients(self) -> tuple[list[Tensor], Tensor]:
        """Those of the loss on x, no longer than one, and the share of chains that were lost or went astray.

        The mean log-weight falls with every low weight, where IWAE overlooks all but the highest. A chain whose steps are too
        long for its datum has a gradient that is huge and means nothing, so it is left out, and all steps are shortened.
        """
        parameters = self.learnt.parameters
        with torch.no_grad():
            start = Source(self.model, self.x, self.learnt.constants())(self.starts)
            lowest = self._log_weights(start.end(start.start()), self.starts).view(self.size, STARTS).logsumexp(-1)
            lowest = lowest - math.log(STARTS) - ASTRAY
        with torch.enable_grad():
            ends = Source(self.model, self.x, self.learnt.constants(), learning=True)(self.own).forwards()
            log_w = self._log_weights(ends, self.own)
            kept = ends.alive & (log_w > lowest[self.own])
            loss = -torch.where(kept, log_w, 0.0).mean()
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        # A few minibatches have gradients a thousand times as long as the rest, and one with a lost chain may have none.
        norm = torch.cat([gradient.flatten() for gradient in found]).norm().clamp(min=1.0)
        return [(gradient / norm).nan_to_num(0.0, 0.0, 0.0) for gradient in found], 1 - kept.to(self.lost).mean()

    def _log_weights(self, ends: Ends, own: Tensor) -> Tensor:
        return ends.log_ratio + self.model.log_joint(self.x[own], ends.z)  # type: ignore[no-any-return]


def _rates(i: int, iterations: int) -> tuple[float, float, float]:
    """The rate of an iteration, by cosine decay to a twentieth, and Adam's two corrections."""
    return RATE * (0.05 + 0.95 * (1 + math.cos(math.pi * i / iterations)) / 2), 1 - BETAS[0] ** (i + 1), 1 - BETAS[1] ** (i + 1)


class _Learnt:
    """Constants as unbounded parameters: a factor of the start's steps for each leapfrog, and one for each dimension."""

    def __init__(self, start: Constants, size: int, mixing: bool, device: torch.device) -> None:
        self.start = start.like(torch.zeros((), dtype=torch.float64, device=device))
        one, zero = self.start.bridge.new_ones(1), self.start.bridge.new_zeros(1)
        increments = torch.cat([self.start.bridge, one]) - torch.cat([zero, self.start.bridge])
        self.parameters = [
            zero.new_zeros(start.steps, 1),
            zero.new_zeros(1, size),
            increments.clamp(min=1e-3).log(),
            self.start.persistence.clamp(0.01, 0.999).logit(),
            zero.new_zeros(size),
            *([zero.new_zeros(size, size)] if mixing else []),
        ]
        self.mixing = torch.eye(size).to(zero) if self.start.mixing is None else self.start.mixing
        for parameter in self.parameters:
            parameter.requires_grad_()

    def constants(self) -> Constants:
        time, dimension, increments, persistence, widening, *mixing = self.parameters
        return Constants(
            self.start.step * (time + dimension).exp(),
            increments.softmax(0).cumsum(0)[:-1],
            persistence.sigmoid(),
            self.start.widening * widening.exp(),
            self.mixing + SLOWLY * mixing[0] if mixing else self.start.mixing,
        )


@contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    """A CUDA stream of its own, where recordings are allowed."""
    own, outside = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    own.wait_stream(outside)
    with torch.cuda.stream(own):
        yield
    outside.wait_stream(own)


def _never_waits(work: Callable[[], object]) -> bool:
    """Whether it can be recorded: the GPU is never waited for. Validation of a distribution's arguments does wait, for one."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return True


def _recorded(work: Callable[[], None]) -> Callable[[], None]:
    """The same work as a CUDA graph, or as it is where something in it cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with contextlib.suppress(RuntimeError):  # of the recording, during which nothing is computed
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
        return graph.replay
    return work
