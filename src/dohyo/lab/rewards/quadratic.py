"""Quadratic functions of bits, computed without rounding if the weights are whole."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dohyo.errors import DohyoError, reporting
from dohyo.lab.rewards.known import BEST_KNOWN, checksum
from dohyo.lab.rewards.reward import Reward

LARGEST = 20_000  # variables: the weights are a dense matrix, 3 GB at this size
_EXACT = 2.0**52  # float64 holds whole numbers up to 2^53; the margin is for rounding in the test itself
_LARGEST = 2.0**62  # likewise for int64
_SPLIT = 24  # bits of the lower part: sums over 20,000 variables stay below 2^52 in it, and in the upper one


class Quadratic(Reward):
    r"""A quadratic pseudo-Boolean function, exact where its weights are whole numbers.

    .. math:: R(x) = x^\top M x = \sum_i w_i x_i + \sum_{i<j} w_{ij} x_i x_j,
              \qquad w_i = M_{ii}, \quad w_{ij} = M_{ij} + M_{ji}

    Any square matrix will do: only the w matter. A symmetric M counts each off-diagonal entry twice, as the OR-Library does;
    an upper triangular one holds w itself.

    Args:
        matrix: M, (d, d). Integers give int64 rewards, without rounding at any size; other numbers give float64.
        name: For messages and tables.

    Attributes:
        weights: w as an upper triangular (d, d), int64 or float64, on the CPU.
        tolerance: Differences of rewards up to this are rounding; 0 for whole numbers.

    References:
        Boros and Hammer, Pseudo-Boolean optimization (2002); Beasley, OR-Library (1990).

    Example:
        >>> reward = Quadratic([[3, -2], [-2, 5]])
        >>> reward(torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]))
        tensor([0, 3, 5, 4])
    """

    def __init__(self, matrix: Any, name: str = "quadratic") -> None:
        with reporting(f"the matrix of {name} is not an array of numbers ({{}}); give a (d, d) tensor or array"):
            # Through NumPy, which reads lists of floats in double precision.
            matrix = matrix.detach().cpu() if isinstance(matrix, Tensor) else torch.from_numpy(np.array(matrix))
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0 or matrix.is_complex():
            raise DohyoError(f"the matrix of {name} is {matrix.dtype} {tuple(matrix.shape)}; it must be real and square, (d, d)")
        self.name = name
        self.variables = len(matrix)
        whole = not matrix.is_floating_point()
        total = _total(matrix, name)
        matrix = matrix.to(torch.int64 if whole else torch.float64)
        self.weights = matrix.triu() + matrix.tril(-1).T
        self.tolerance = 0.0 if whole else 1e-12 * total
        large = whole and total > _EXACT
        parts = [self.weights >> _SPLIT, self.weights & (2**_SPLIT - 1)] if large else [self.weights]
        self._parts = [part.double() for part in parts]

    @cached_property
    def maximum(self) -> float | int | None:
        """The best known value for these weights, or None."""
        return BEST_KNOWN.get(checksum(self.weights) or "")

    def __call__(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.values(x)

    def values(self, x: Tensor) -> Tensor:
        """R without a check of x, which would make a GPU wait."""
        bits = x.detach().double()
        self._parts = [part.to(x.device) for part in self._parts]  # they stay where the last x was
        values: list[Tensor] = [((bits @ part) * bits).sum(-1) for part in self._parts]
        if self.weights.is_floating_point():
            return values[0]
        *high, low = (value.long() for value in values)
        return (high[0] << _SPLIT) + low if high else low


def random_qpbo(variables: int, seed: int) -> Quadratic:
    r"""The paper's problem: all weights uniform in [-1, 1].

    .. math:: R(x) = \sum_i w_i x_i + \sum_{i<j} w_{ij} x_i x_j, \qquad w_i, w_{ij} \sim U[-1, 1]

    References:
        Luo et al., SUMO (ICLR 2020), with d = 100 and 500.

    Example:
        >>> reward = random_qpbo(100, seed=0)
        >>> float(reward(torch.zeros(1, 100)))
        0.0
    """
    if not 1 <= variables <= LARGEST:
        raise DohyoError(f"variables is {variables}; it must be from 1 to {LARGEST:,}: the weights are a dense matrix")
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(variables, variables, generator=generator, dtype=torch.float64)
    return Quadratic((2 * uniform - 1).triu(), name=f"random QPBO of {variables} variables, seed {seed}")


def max_cut(edges: Any, name: str = "max-cut") -> Quadratic:
    r"""The weight of the edges between the nodes with bit 0 and those with bit 1.

    .. math:: R(x) = \sum_{i<j} e_{ij}\, [x_i \ne x_j] = \sum_{i<j} e_{ij}\, (x_i + x_j - 2 x_i x_j)

    Args:
        edges: (d, d), e_ij once for each edge: above the diagonal, or below, with zeros on it and on the other side.

    Example:
        >>> triangle = max_cut([[0, 1, 1], [0, 0, 1], [0, 0, 0]])
        >>> triangle(torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0]]))
        tensor([0, 2, 2])
    """
    once = Quadratic(edges, name).weights  # checked, and in one triangle
    if bool(once.diagonal().any()):
        raise DohyoError(f"an edge of {name} joins a node with itself, which no cut can separate; set the diagonal to zero")
    _total(once, name, times=4)
    return Quadratic((once.sum(0) + once.sum(1)).diag() - 2 * once, name)


def _total(matrix: Tensor, name: str, times: int = 1) -> float:
    """The sum of the absolute values, which bounds every partial sum of R."""
    total = times * float(matrix.double().abs().sum())
    if not total < float("inf"):
        raise DohyoError(f"the matrix of {name} holds NaN, infinite or huge values; remove or replace them")
    if not matrix.is_floating_point() and total >= _LARGEST:
        raise DohyoError(f"the weights of {name} add up to {total:.3g}, beyond 64 bits; divide them, or give them as floats")
    return total
