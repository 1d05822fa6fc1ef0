"""Quadratic functions of bits, computed without rounding if the weights are whole."""

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dohyo.errors import DohyoError, reporting
from dohyo.lab.rewards.reward import Reward

LARGEST = 20_000  # variables: the weights are a dense matrix, 3 GB at this size
_EXACT = 2.0**52  # float64 holds whole numbers up to 2^53; the margin is for rounding in the test itself
_LARGEST = 2.0**62  # likewise for int64
_SPLIT = 24  # bits of the lower part: sums over 20,000 variables stay below 2^52 in it, and in the upper one

# x'Qx of Beasley's OR-Library instances (maximisation), by `checksum` and never by a file's name: values from the literature,
# each reached again by tabu search.
BEST_KNOWN: dict[str, int] = {
    "841f2bc80619801525570b72300b55ca0370dfaa9e0fb443ea483c5d045d1f71": 2098,  # bqp50.1
    "98742840effaab878a475ac7d9f1da13359fc05f8141e13613791330dffb560c": 3702,  # bqp50.2
    "f19eb5d0d342f43f87ca57f300a6d045721c483586a004bd30140b8a43e77ff0": 4626,  # bqp50.3
    "91f21661b65e61a984a8a7b57acdd24734050b50dd7556394d3b520329144dc3": 3544,  # bqp50.4
    "2823569b1bb48006203df822b0f31ea2e8a41ec0878b917435c66c0aa1d38879": 4012,  # bqp50.5
    "1c6c777fb0c25a3016604ce43bfb8c956f65dfa5fca5ce83161dc4b9dfd606b1": 7970,  # bqp100.1
    "d361a7e9bdfffecb63e220d1dc9884bf3132fb3bf88ce6804e50c749142db68d": 11036,  # bqp100.2
    "fab4dbde6275773db1f14e4ea409e17361ebecbe169cf0eb991636a3010ace76": 12723,  # bqp100.3
    "77f12b5be89c84f5fcaafc9a7cabc157ba49a5783a1c254b6fb5c4e743335707": 10368,  # bqp100.4
    "abe199d9cd6941d201ca1a00b7e08ef3e65328e5265ecff1b59cca2b94041751": 9083,  # bqp100.5
    "8d44fd2f8412005e607e407be6ab41141a25b6b4518bda22b0324cb6483d6e5a": 45607,  # bqp250.1
    "2cb1ff18c4d8bcc7ccd67bfb8249c64a668c38553cea1ca3fbb06c8b1c978905": 44810,  # bqp250.2
    "b818255420ae2df55f0efdfccf143fbd12881dc0d7fe1b81ba2bd458029227fd": 49037,  # bqp250.3
    "879a9b1cd68442bc3009050578b6f920722c8edb3449950ca04661ed7aa38605": 41274,  # bqp250.4
    "f4cb17bcccfe3d410af9d2eb893fd027deb37cabe6df93bef2e4ceaa8b630155": 47961,  # bqp250.5
    "97c5ff4aac3cac842e1100a50092f318268d836be0a89f3e7177c0a6d0a2dcfa": 116586,  # bqp500.1
    "e73a38b8b3f65755e87024e51faed432580b6e3cf759f9eb14f971f4223b10c0": 128339,  # bqp500.2
    "ab308e2ec7718c91a34d024b2514699fb31e13661dc09a48a3a0fdb0eb442c81": 130812,  # bqp500.3
    "2c66400b9d9e009118e2d793adcb4211724aec8a9e97dbbe8d435d4684d927dd": 130097,  # bqp500.4
    "9bbd2f2fba77cd2755842e55ff5b5e7c0a67e52dba6c9756e5a712275a52c3d4": 125487,  # bqp500.5
}


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


def checksum(weights: Tensor) -> str | None:
    """The sha256 of a quadratic function with whole weights w, upper triangular (d, d); None if a weight is not whole.

    The bytes are d, then i, j, w_ij for each w_ij that is not 0 with i <= j, counted from zero, row by row, all as
    little-endian int64. So functions share it only if they are equal for every x, and a file's name, its format and the
    order of its lines do not matter.
    """
    whole = weights.long()
    if weights.is_floating_point() and not (bool((whole == weights).all()) and bool((weights.abs() < 2**53).all())):
        return None
    i, j = whole.nonzero(as_tuple=True)
    entries = torch.stack([i, j, whole[i, j]], 1)
    head = torch.tensor([len(weights)])
    return hashlib.sha256(torch.cat([head, entries.flatten()]).numpy().astype("<i8").tobytes()).hexdigest()
