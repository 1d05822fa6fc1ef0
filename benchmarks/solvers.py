"""Solvers of quadratic problems to compare policies with, each given the same wall-clock time.

Simulated annealing and tabu search are those of D-Wave's dwave-samplers, which is not installed by default.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.rewards import Quadratic

_SLICE = 20  # milliseconds of one tabu search: a longer time is many searches, so that the best is known as it is found


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        solver: Its name.
        best_reward: The value of R at `best_x`, computed by the problem itself and not by the solver.
        best_x: d bits.
        seconds_to_best: When that was, from the start. A solver that reports a batch at a time is as late as the batch.
        seconds: How long it ran. The last batch is finished, so that this may be a little more than was given.
        rounds: Batches of starts.
    """

    solver: str
    best_reward: float | int
    best_x: list[int]
    seconds_to_best: float
    seconds: float
    rounds: int


def anneal(problem: Quadratic, seconds: float, seed: int = 0) -> Solution:
    """Simulated annealing, 1,000 sweeps for each start."""
    samplers = _samplers()
    return _timed("simulated annealing", problem, seconds, _reads(samplers.SimulatedAnnealingSampler(), problem, seed))


def tabu(problem: Quadratic, seconds: float, seed: int = 0) -> Solution:
    """Multistart tabu search, each for 20 ms."""
    samplers = _samplers()
    return _timed("tabu search", problem, seconds, _reads(samplers.TabuSampler(), problem, seed, timeout=_SLICE))


def descent(problem: Quadratic, seconds: float, seed: int = 0, starts: int = 100) -> Solution:
    """1-flip local search from uniformly random bits, many starts at a time; it needs nothing besides dohyo.

    Example:
        >>> from dohyo.lab.rewards import random_qpbo
        >>> problem = random_qpbo(20, seed=0)
        >>> found = descent(problem, seconds=0.1)
        >>> found.best_reward == problem(torch.tensor([found.best_x])).item()
        True
    """
    generator = torch.Generator().manual_seed(seed)

    def starting_points() -> Tensor:
        return torch.randint(2, (starts, problem.variables), generator=generator)

    return _timed("1-flip descent", problem, seconds, lambda: iter(lambda: polish(problem, starting_points()), None))


def polish(problem: Quadratic, x: Tensor) -> Tensor:
    """Each x (n, d) of int64 after 1-flip local search: the best single flip, until none helps.

    References:
        Merz and Freisleben, Greedy and local search heuristics for unconstrained binary quadratic programming (2002).

    Example:
        >>> polish(Quadratic([[3, -4], [-4, 5]]), torch.tensor([[1, 0], [0, 0]]))  # (1, 0) is a local maximum
        tensor([[1, 0],
                [0, 1]])
    """
    x, pairs = x.clone(), problem.weights.triu(1)
    pairs = pairs + pairs.T
    slope = problem.weights.diagonal() + x.to(pairs.dtype) @ pairs  # what R gains by each bit that is 1
    while True:
        best, flip = torch.where(x > 0, -slope, slope).max(1)
        row = (best > problem.tolerance).nonzero()[:, 0]
        if len(row) == 0:
            return x
        flip = flip[row]
        x[row, flip] = 1 - x[row, flip]
        slope[row] += (2 * x[row, flip] - 1)[:, None] * pairs[flip]


SOLVERS: dict[str, Callable[[Quadratic, float, int], Solution]] = {"anneal": anneal, "tabu": tabu, "descent": descent}


def _timed(solver: str, problem: Quadratic, seconds: float, batches: Callable[[], Iterator[Tensor]]) -> Solution:
    """Ask for batches of x until the time is up, but for at least one; the clock starts with the work, not with the import."""
    if not isinstance(problem, Quadratic):
        raise DohyoError(f"{solver} needs a quadratic problem, this is {type(problem).__name__}")
    if not 0 < seconds < float("inf"):
        raise DohyoError(f"seconds is {seconds}; it must be positive and finite")
    started, best, x, when, rounds = time.monotonic(), None, [], 0.0, 0
    for batch in batches():
        rewards = problem(batch)
        top = int(rewards.argmax())
        value, now = rewards[top].item(), time.monotonic() - started
        rounds += 1
        if best is None or value - best > problem.tolerance:
            best, x, when = problem(batch[top : top + 1]).item(), batch[top].int().tolist(), now
        if now >= seconds:
            break
    assert best is not None
    return Solution(solver, best, x, when, time.monotonic() - started, rounds)


def _reads(sampler: Any, problem: Quadratic, seed: int, **options: Any) -> Callable[[], Iterator[Tensor]]:
    """One start after another, each with a seed of its own."""

    def reads() -> Iterator[Tensor]:
        energy, generator = _energy(problem), torch.Generator().manual_seed(seed)
        while True:
            own = int(torch.randint(2**31 - 1, (), generator=generator))
            found = sampler.sample(energy, num_reads=1, seed=own, **options)
            columns = sorted(range(len(found.variables)), key=list(found.variables).__getitem__)
            yield torch.from_numpy(found.record.sample[:, columns].astype("int64"))

    return reads


def _samplers() -> Any:
    try:
        return importlib.import_module("dwave.samplers")
    except ImportError as error:
        raise DohyoError("simulated annealing and tabu search need dwave-samplers: pip install 'dohyo[solvers]'") from error


def _energy(problem: Quadratic) -> Any:
    """-R as a binary quadratic model, since the solvers minimise."""
    dimod: Any = importlib.import_module("dimod")  # dwave-samplers brings it
    weights = -problem.weights.double()
    i, j = weights.triu(1).nonzero(as_tuple=True)
    quadratic = (i.numpy(), j.numpy(), weights[i, j].numpy())
    return dimod.BinaryQuadraticModel.from_numpy_vectors(weights.diagonal().numpy(), quadratic, 0.0, "BINARY")
