"""Rewards: brute force, exactness, and a user's own function."""

import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dohyo.lab.rewards import Custom, Quadratic, Reward, max_cut, random_qpbo, reward

Weights = dict[tuple[int, int], int]  # (i, j) with i <= j, from zero


def everything(variables: int) -> Tensor:
    return torch.tensor(list(itertools.product([0, 1], repeat=variables)))


def by_hand(weights: Weights, x: list[int]) -> int:
    """sum_i w_i x_i + sum_{i<j} w_ij x_i x_j, in Python's whole numbers."""
    return sum(w * x[i] * x[j] for (i, j), w in weights.items())


def triangular(weights: Weights, variables: int) -> Tensor:
    matrix = torch.zeros(variables, variables, dtype=torch.int64)
    for (i, j), w in weights.items():
        matrix[i, j] = w
    return matrix


def sparse(most: int = 100, diagonal: bool = True, zero: bool = False) -> st.SearchStrategy[tuple[int, Weights]]:
    """Some number of variables, and whole weights for some of the pairs."""

    def of_size(d: int) -> st.SearchStrategy[tuple[int, Weights]]:
        pairs = [(i, j) for i in range(d) for j in range(i if diagonal else i + 1, d)]
        values = st.integers(-most, most).filter(lambda w: zero or w != 0)
        weights = st.dictionaries(st.sampled_from(pairs), values, max_size=12) if pairs else st.just({})
        return st.tuples(st.just(d), weights)

    return st.integers(1, 6).flatmap(of_size)


def line_of(action: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    return message


# --- quadratic functions


def square(d: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(-99, 99), min_size=d, max_size=d), min_size=d, max_size=d)


@given(st.integers(1, 6).flatmap(square))
@settings(deadline=None, max_examples=50)
def test_any_square_matrix_is_summed_as_it_stands(matrix: list[list[int]]) -> None:
    made, d = Quadratic(matrix), len(matrix)
    expected = [sum(matrix[i][j] * x[i] * x[j] for i in range(d) for j in range(d)) for x in everything(d).tolist()]
    assert made(everything(d)).tolist() == expected
    assert made(everything(d)).dtype == torch.int64
    real = Quadratic(torch.tensor(matrix, dtype=torch.float32) / 8)(everything(d))
    assert (real.dtype, real.tolist()) == (torch.float64, [value / 8 for value in expected])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
)
def test_any_dtype_of_bits(dtype: torch.dtype) -> None:
    assert Quadratic([[3, -2], [-2, 5]])(everything(2).to(dtype)).tolist() == [0, 5, 3, 4]


@pytest.mark.parametrize("bits", [8, 40, 50, 56])
def test_whole_numbers_stay_exact(bits: int) -> None:
    """Up to 2^56 for each of 2^6 weights or so: far beyond what float64 tells apart."""
    random.seed(bits)
    weights = {(i, j): random.randint(-(2**bits), 2**bits) for i in range(8) for j in range(i, 8)}
    made = Quadratic(triangular(weights, 8))
    x = everything(8)
    expected = [by_hand(weights, row) for row in x.tolist()]
    assert made(x).tolist() == expected
    if bits == 56:  # the power twin
        assert Quadratic(triangular(weights, 8).double())(x).long().tolist() != expected


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        ([[1, 2]], r"int64 \(1, 2\); it must be real and square"),
        (torch.zeros(0, 0), "square"),
        (torch.zeros(2, 2, dtype=torch.complex64), "real and square"),
        ([[float("nan")]], "NaN"),
        ([[float("inf")]], "NaN, infinite"),
        ([[2**62]], "beyond 64 bits"),
        ([["a"]], "not an array of numbers"),
        ([[1, 2], [3]], "not an array of numbers"),
    ],
)
def test_bad_matrices(matrix: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Quadratic(matrix)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.zeros(2), r"\(2,\); quadratic needs \(n, 2\)"),
        (torch.zeros(3, 3), r"needs \(n, 2\)"),
        (torch.tensor([[0, 2]]), "other values than 0 and 1"),
        (torch.tensor([[0.0, float("nan")]]), "other values than 0 and 1"),
        (torch.tensor([[-1, 1]]), "other values than 0 and 1"),
    ],
)
def test_bad_bits(x: Tensor, reason: str) -> None:
    for made in (Quadratic([[1, 2], [3, 4]]), Custom(lambda x: x.sum(1), 2, "quadratic")):
        with pytest.raises(ValueError, match=reason):
            made(x)


def test_random_qpbo() -> None:
    made = random_qpbo(100, seed=3)
    assert torch.equal(made.weights, random_qpbo(100, seed=3).weights)
    assert not torch.equal(made.weights, random_qpbo(100, seed=4).weights)
    w = made.weights[torch.triu_indices(100, 100).unbind()]
    assert bool((w.abs() <= 1).all())
    assert bool((made.weights.tril(-1) == 0).all())
    assert (w.mean().abs() < 0.04, (w.var() - 1 / 3).abs() < 0.03) == (True, True)
    assert (made.variables, made.maximum) == (100, None)
    x = everything(10)
    small = random_qpbo(10, seed=0)
    expected = [sum(float(small.weights[i, j]) * b[i] * b[j] for i in range(10) for j in range(i, 10)) for b in x.tolist()]
    assert small(x).tolist() == pytest.approx(expected, abs=1e-12)
    # Frozen: other numbers from torch's generator would make old results and new ones different problems.
    assert small.weights[0, :2].tolist() == pytest.approx(FIRST_WEIGHTS, abs=1e-15)
    with pytest.raises(ValueError, match="variables is 0"):
        random_qpbo(0, seed=0)


FIRST_WEIGHTS = [0.9401060036131061, 0.4156397287995759]


def test_the_seed_leaves_torch_alone() -> None:
    state = torch.random.get_rng_state()
    random_qpbo(5, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())


@given(sparse(diagonal=False))
@settings(deadline=None, max_examples=50)
def test_max_cut_counts_the_edges_between_the_sides(problem: tuple[int, Weights]) -> None:
    d, edges = problem
    made, x = max_cut(triangular(edges, d)), everything(d)
    assert made(x).tolist() == [sum(w for (i, j), w in edges.items() if b[i] != b[j]) for b in x.tolist()]
    assert torch.equal(made(x), made(1 - x))


def test_max_cut_refuses_loops_and_huge_weights() -> None:
    assert "joins a node with itself" in line_of(lambda: max_cut([[1, 0], [0, 0]]))
    assert "beyond 64 bits" in line_of(lambda: max_cut([[0, 2**61], [0, 0]]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", [8, 55])
def test_on_a_gpu(bits: int) -> None:
    torch.manual_seed(0)
    made = Quadratic(torch.randint(-(2**bits), 2**bits, (10, 10)))
    x = everything(10)
    value = made(x.cuda())
    assert value.is_cuda
    assert torch.equal(value.cpu(), made(x))


# --- a user's function


def test_custom() -> None:
    made = reward(lambda x: (x * torch.arange(3)).sum(1), variables=3)
    assert isinstance(made, Reward)
    assert (made.name, made.variables) == ("<lambda>", 3)
    value = made(everything(3).float())
    assert (value.dtype, value.tolist()) == (torch.float64, [0, 2, 1, 3, 0, 2, 1, 3])
    assert Custom(lambda x: x.sum(1), 3)(everything(3)).dtype == torch.int64
    assert Custom(lambda x: x.sum(1) > 1, 3)(everything(3)).tolist() == [0, 0, 0, 1, 0, 1, 1, 1]


def test_custom_keeps_bits_and_gradients_apart() -> None:
    parameter = torch.ones(3, requires_grad=True)
    x = everything(3).float()
    value = Custom(lambda x: (x.mul_(2) * parameter).sum(1), 3)(x)
    assert torch.equal(x, everything(3).float())
    assert not value.requires_grad


def failing(x: Tensor) -> Tensor:
    raise KeyError("a\nb")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (failing, "failing, called with torch.float32 (4, 3), raised KeyError: 'a\\nb'"),
        (lambda x: x.sum(), "returned torch.float32 (); it must return a tensor of shape (4,)"),
        (lambda x: x, "returned torch.float32 (4, 3)"),
        (lambda x: x.sum(1, keepdim=True), "returned torch.float32 (4, 1)"),
        (lambda x: x.sum(1).squeeze(), "returned torch.float32 (); it must return a tensor of shape (1,)"),
        (lambda x: x.sum(1).numpy(), "returned a ndarray"),
        (lambda x: x.sum(1).tolist(), "returned a list; it must return a tensor of shape (4,), one finite number for each row"),
        (lambda x: None, "returned a NoneType"),
        (lambda x: x.sum(1) * 1j, "returned torch.complex64 (4,)"),
        (lambda x: x.sum(1) / 0 * 0, "returned nan for row 1 (4 rows are not finite); give an x that is not allowed a low"),
        (lambda x: torch.tensor([1, 1, -torch.inf, 1]), "returned -inf for row 3 (1 rows are not finite)"),
    ],
)
def test_a_wrong_function(function: Callable[[Tensor], Any], reason: str) -> None:
    assert reason in line_of(lambda: reward(function, 3))


def test_a_function_that_goes_wrong_later() -> None:
    made = reward(lambda x: torch.where(x.sum(1) == 20, torch.nan, x.sum(1)), 20)
    assert "returned nan for row 2 (1 rows are not finite)" in line_of(
        lambda: made(torch.stack([torch.zeros(20), torch.ones(20)]))
    )


def test_a_function_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def ones(x):\n    return x.sum(1)\n\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    made = reward("my_rewards:ones", 4)
    assert (made.name, made(torch.ones(2, 4)).tolist()) == ("my_rewards:ones", [4, 4])
    assert "has no one: did you mean 'ones'?" in line_of(lambda: reward("my_rewards:one", 4))
    assert "my_rewards:number is a int; it must be a function" in line_of(lambda: reward("my_rewards:number", 4))
    assert "there is no module 'no_such_rewards'" in line_of(lambda: reward("no_such_rewards:ones", 4))
    assert "variables is 0" in line_of(lambda: reward("my_rewards:ones", 0))
    assert "the reward is a int" in line_of(lambda: reward(3, 4))  # type: ignore[arg-type]


def test_lists_and_numpy_matrices() -> None:
    assert Quadratic([[0.1]]).weights.item() == 0.1  # lists are no float32
    assert Quadratic(np.array([[1, 2], [0, -5]], dtype=np.int32))(everything(2)).tolist() == [0, -5, 1, -2]
