"""Steps recorded as CUDA graphs, which one call replays.

A graph has fixed shapes, so there is one for each number of data and of log-weights. The first step with a new shape runs without
recording, which compiles and loads whatever is needed; if the shape comes again, the step is recorded. A graph holds addresses,
so whatever a recorded step reads must live as long as the graph does: in the program, in the compiled functions, counts, plans
and memory that are kept, or in the graph's own memory.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.lab.fast.captured import WIDEST, bucket_of
from dohyo.packing import Plan

_LINE = 256  # bytes to which tensors are aligned


@dataclass(frozen=True)
class _Recorded:
    """A step in two graphs, the indices that the first reads, and the memory from and to which its samples are copied."""

    index: Tensor
    draws: torch.cuda.CUDAGraph
    drawn: Tensor
    read: Tensor
    step: torch.cuda.CUDAGraph


class Beside:
    """On a CUDA GPU, work at the same time as what follows, up to `join`; elsewhere nothing changes."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.contexts = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            self.contexts.enter_context(torch.cuda.stream(self.stream))

    def __exit__(self, *_: object) -> None:
        self.contexts.close()

    def join(self) -> None:
        """Let what follows wait for it."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


class Replayed:
    """Steps whose samples are drawn on a separate stream, while the previous step is still running.

    The samples are then copied in one piece to where the step reads them.
    """

    def __init__(self, step: Callable[[Sequence[Tensor], Any], None], device: torch.device) -> None:
        self.step = step
        self.stream, self.ahead = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        self.pool, self.pool_ahead = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self.free = torch.cuda.Event()

    def ready(self) -> None:
        """Make the next sampling wait for all work so far, above all for the indices."""
        self.free.record(self.stream)

    def _replay(self, draws: Callable[[], None], drawn: Tensor, read: Tensor, step: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self.ahead):
            self.ahead.wait_event(self.free)
            draws()
        self.stream.wait_stream(self.ahead)
        read.copy_(drawn)
        self.free.record(self.stream)
        step.replay()


class Graphs(Replayed):
    """Takes steps. Call it with indices and the number of log-weights for each datum. Sampling has a separate graph."""

    def __init__(
        self,
        draw: Callable[[Tensor, Plan], list[Tensor]],
        step: Callable[[Sequence[Tensor], Any], None],
        generators: Sequence[torch.Generator],
        device: torch.device,
    ) -> None:
        super().__init__(step, device)
        self.draw, self.generators = draw, generators
        self.seen: dict[tuple[int, int], tuple[Plan, list[Tensor]]] = {}
        self.recorded: dict[tuple[int, int], _Recorded] = {}
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, index: Tensor, n: int) -> None:
        key = index.shape[1], n
        if key not in self.recorded:
            if key not in self.seen:
                plan = Plan.even(index.shape[1], n, index.device)
                drawn = self.draw(index, plan)
                if n <= WIDEST:
                    self.seen[key] = plan, [part.to("meta") for part in drawn]
                return self.step(drawn, plan)
            self.recorded[key] = self._record(index, *self.seen[key])
        recorded = self.recorded[key]

        def draws() -> None:
            recorded.index.copy_(index)
            recorded.draws.replay()

        return self._replay(draws, recorded.drawn, recorded.read, recorded.step)

    def _record(self, index: Tensor, plan: Plan, like: list[Tensor]) -> _Recorded:
        own, size = index.clone(), sum(map(_room, like))
        bucket = bucket_of(size)
        if bucket not in self.memory:
            self.memory[bucket] = index.new_empty(bucket, dtype=torch.uint8), index.new_empty(bucket, dtype=torch.uint8)
        drawn, read = (whole[:size] for whole in self.memory[bucket])

        def draws() -> None:
            for place, part in zip(_views(drawn, like), self.draw(own, plan), strict=True):
                place.copy_(part)

        with torch.cuda.stream(self.ahead):
            self.ahead.wait_stream(self.stream)
            first = _graph(draws, self.pool_ahead, self.generators)
        second = _graph(lambda: self.step(_views(read, like), plan), self.pool, [])
        return _Recorded(own, first, drawn, read, second)


class FilledGraphs(Replayed):
    """Takes steps whose samples are drawn by a function that fills tensors, because their number varies within one shape.

    Only the steps are recorded. Each shape has memory of its own, in which padding is always finite.
    """

    def __init__(self, step: Callable[[Sequence[Tensor], Any], None], device: torch.device) -> None:
        super().__init__(step, device)
        self.memory: dict[Any, tuple[list[Tensor], Tensor, Tensor]] = {}
        self.recorded: dict[Any, torch.cuda.CUDAGraph] = {}

    def __call__(self, shape: Any, like: Callable[[], list[Tensor]], fill: Callable[[list[Tensor]], None]) -> None:
        """Take a step; `like` gives the tensors to fill, on meta."""
        if shape not in self.memory:
            drawn, read = (torch.zeros(sum(map(_room, like())), dtype=torch.uint8, device=self.stream.device) for _ in range(2))
            self.memory[shape] = _views(drawn, like()), drawn, read
            fill(views := _views(read, like()))
            return self.step(views, shape)
        views, drawn, read = self.memory[shape]
        if shape not in self.recorded:
            self.recorded[shape] = _graph(lambda: self.step(_views(read, like()), shape), self.pool, [])
        return self._replay(lambda: fill(views), drawn, read, self.recorded[shape])


def _room(like: Tensor) -> int:
    return -(-like.nbytes // _LINE) * _LINE


def _views(memory: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Tensors like these, one after another in memory."""
    rooms = memory.split([_room(one) for one in like])
    return [room[: one.nbytes].view(one.dtype).view(one.shape) for room, one in zip(rooms, like, strict=True)]


def _graph(work: Callable[[], None], pool: Any, generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    """Record what `work` does on the current stream."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    graph.capture_begin(pool=pool)
    try:
        work()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the first error is the one to report
            graph.capture_end()
        raise
    graph.capture_end()
    return graph
