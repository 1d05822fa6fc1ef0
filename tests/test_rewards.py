"""Rewards: brute force, exactness, files written by hand, and the real OR-Library files where DOHYO_DATA names their folder."""

import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dohyo.lab.rewards import Custom, Quadratic, Reward, load, max_cut, random_qpbo, reward
from dohyo.lab.rewards.known import BEST_KNOWN, checksum

from benchmarks.solvers import polish

REAL = Path(os.environ["DOHYO_DATA"]) / "qubo" if os.environ.get("DOHYO_DATA") else None
real_files = pytest.mark.skipif(
    REAL is None or not REAL.is_dir(), reason="needs the OR-Library files: set DOHYO_DATA to a folder that holds qubo/"
)
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


def bqp_text(*problems: tuple[int, Weights]) -> str:
    lines = [str(len(problems))]
    for d, weights in problems:
        lines += [f"{d} {len(weights)}"] + [f"{i + 1} {j + 1} {w}" for (i, j), w in weights.items()]
    return "\n".join(lines) + "\n"


def qubo_text(d: int, weights: Weights) -> str:
    on_diagonal = sum(i == j for i, j in weights)
    head = f"c a comment\np qubo 0 {d} {on_diagonal} {len(weights) - on_diagonal}\n"
    return head + "".join(f"{i} {j} {w}\n" for (i, j), w in weights.items())


def gset_text(d: int, weights: Weights) -> str:
    return f"{d} {len(weights)}\n" + "".join(f"{i + 1} {j + 1} {w}\n" for (i, j), w in weights.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rewards")


def written(folder: Path, text: str | bytes, name: str = "problem.txt") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def line_of(action: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    return message


in_a_folder = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


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


# --- files


@given(st.lists(sparse(zero=True), min_size=1, max_size=3), st.randoms(use_true_random=False))
@in_a_folder
def test_bqp_round_trip_in_any_order_of_lines(folder: Path, problems: list[tuple[int, Weights]], order: random.Random) -> None:
    shuffled = []
    for d, weights in problems:
        entries = [((j, i) if order.random() < 0.5 else (i, j), w) for (i, j), w in weights.items()]
        order.shuffle(entries)
        shuffled.append((d, dict(entries)))
    plain, other = written(folder, bqp_text(*problems)), written(folder, bqp_text(*shuffled), "other.dat")
    for index, (d, weights) in enumerate(problems, 1):
        made, again = load(plain, index), load(other, index)
        doubled = {(i, j): w if i == j else 2 * w for (i, j), w in weights.items()}
        x = everything(d)
        assert made(x).tolist() == [by_hand(doubled, b) for b in x.tolist()]
        assert torch.equal(made.weights, again.weights)
        assert checksum(made.weights) == checksum(again.weights)


@given(sparse(zero=True))
@in_a_folder
def test_qubo_is_minus_the_energy(folder: Path, problem: tuple[int, Weights]) -> None:
    d, weights = problem
    made = load(written(folder, qubo_text(d, weights), "p.qubo"))
    x = everything(d)
    assert made(x).tolist() == [-by_hand(weights, b) for b in x.tolist()]
    assert made(x).dtype == torch.int64


@given(sparse(diagonal=False))
@in_a_folder
def test_gset_is_the_cut(folder: Path, problem: tuple[int, Weights]) -> None:
    d, edges = problem
    made = load(written(folder, gset_text(d, edges)))
    assert torch.equal(made.weights, max_cut(triangular(edges, d)).weights)


@given(sparse())
@in_a_folder
def test_a_function_is_recognised_in_any_format(folder: Path, problem: tuple[int, Weights]) -> None:
    """x'Qx of the OR-Library is minus the energy with off-diagonal entries of -2q; one changed entry is another function."""
    d, weights = problem
    energy = {(i, j): -w if i == j else -2 * w for (i, j), w in weights.items()}
    first = load(written(folder, bqp_text(problem)))
    second = load(written(folder, qubo_text(d, energy), "p.qubo"))
    assert checksum(first.weights) == checksum(second.weights) == checksum(second.weights.double()) != None  # noqa: E711
    for pair in weights:
        changed = weights | {pair: weights[pair] + 1}
        assert checksum(load(written(folder, bqp_text((d, changed)))).weights) != checksum(first.weights)
    wider = load(written(folder, bqp_text((d + 1, weights))))
    assert checksum(wider.weights) != checksum(first.weights)


def test_the_example_of_the_qbsolv_manual(tmp_path: Path) -> None:
    text = (
        "c\nc  This is a sample .qubo file\np  qubo  0  4  4  6\nc ----\n"
        "0  0   3.4\n1  1   4.5\n2  2   2.1\n3  3   -2.4\nc ----\n"
        "0  1   2.2\n0  2   3.4\n1  2   4.5\n0  3   -2\n1  3   4.5678\n2  3   -3.22\n"
    )
    made = load(written(tmp_path, text, "sample.txt"))
    assert made.variables == 4
    value = made(torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]]))
    assert value.dtype == torch.float64
    assert value.tolist() == pytest.approx([2.4, 3.52, -17.0478])


def test_names_blank_lines_and_line_ends(tmp_path: Path) -> None:
    one = load(written(tmp_path, "\ufeff1\r\n\r\n2 2\r\n 1 1  3\r\n\t2 1 -4\r\n\r\n", "a.txt"))
    assert (one.name, one(everything(2)).tolist()) == ("a.txt", [0, 0, 3, -5])
    two = load(written(tmp_path, "2\n1 1\n1 1 3\n1 1\n1 1 4\n", "b.txt"), 2)
    assert (two.name, repr(two)) == ("b.txt, problem 2", "Quadratic('b.txt, problem 2', variables=1)")
    assert two(everything(1)).tolist() == [0, 4]


def test_numbers_that_are_whole_but_written_as_floats(tmp_path: Path) -> None:
    whole = load(written(tmp_path, "1\n2 2\n1 1 3.0\n1 2 -4e1\n"))
    assert (whole.weights.dtype, whole.weights.tolist()) == (torch.int64, [[3, -80], [0, 0]])
    real = load(written(tmp_path, "1\n2 2\n1 1 3\n1 2 .5\n"))
    assert (real.weights.dtype, real.weights.tolist()) == (torch.float64, [[3, 1], [0, 0]])
    large = load(written(tmp_path, "1\n2 2\n1 1 999999999999999999\n1 2 123456789012345679\n"))
    assert large(everything(2)).tolist() == [0, 0, 10**18 - 1, 10**18 - 1 + 2 * 123456789012345679]


GOOD = "2\n3 2\n1 2 5\n3 3 -1\n2 1\n1 2 7\n"
TOO_FEW = "2\n3 3\n1 2 5\n3 3 -1\n2 1\n1 2 7\n"  # entries, for what is said of the first problem
TOO_MANY = "2\n3 1\n1 2 5\n3 3 -1\n2 1\n1 2 7\n"
MALFORMED = [
    # OR-Library
    ("", None, "the file is empty"),
    ("\n \n", None, "the file is empty"),
    (GOOD, None, "the file holds 2 problems; choose one with index (--index) from 1 to 2"),
    (GOOD, 0, "index (--index) is 0; the file's problems are 1 to 2"),
    (GOOD, 3, "index (--index) is 3; the file's problems are 1 to 2"),
    ("0\n", None, "line 1: the number of problems is 0"),
    ("-1\n", None, "line 1: the number of problems is -1"),
    ("hello\n", None, "line 1: the number of problems is 'hello'; it must be a whole number"),
    ("1.5\n", None, "line 1: the number of problems is '1.5'; it must be a whole number"),
    ("1_0\n", 1, "must be a whole number"),
    ("2\n", 1, "the file ends after line 1, where the line 'n nonzeros' of problem 1 of 2 should come"),
    ("2\n3 1\n1 2 5\n", 1, "the file ends after line 3, where the line 'n nonzeros' of problem 2 of 2 should come"),
    ("1\n3 2\n1 2 5\n", None, "the file ends after line 3, where entry 2 of 2 of problem 1 should come"),
    ("2\n3 2\n1 2 5\n3 3 -1\n2 2\n1 2 7\n", 1, "ends after line 6, where entry 2 of 2 of problem 2 should come"),
    (
        TOO_FEW,
        1,
        "line 5: here entry 3 of 3 of problem 1 should come, three numbers i j w; this line is '2 1'",
    ),
    (TOO_FEW, 2, "line 5: here entry 3 of 3 of problem 1 should come"),
    (
        TOO_MANY,
        1,
        "line 4: here the line 'n nonzeros' of problem 2 of 2 should come; this line is '3 3 -1'",
    ),
    ("1\n3 1\n1 2 5\n3 3 -1\n", None, "line 4: the file should end after the last problem; this line is '3 3 -1'"),
    ("1\n0 0\n", None, "line 2: n is 0; it must be from 1 to 20000"),
    ("1\n30000 0\n", None, "line 2: n is 30000"),
    ("1\n2 4\n", None, "line 2: nonzeros is 4; it must be from 0 to 3"),
    ("1\n2 -1\n", None, "line 2: nonzeros is -1"),
    ("1\n3 1\n0 2 5\n", None, "line 3: a variable's number is 0; it must be from 1 to 3"),
    ("1\n3 1\n1 4 5\n", None, "line 3: a variable's number is 4; it must be from 1 to 3"),
    ("1\n3 1\n1 x 5\n", None, "line 3: a variable's number is 'x'; it must be a whole number"),
    ("1\n3 1\n1.0 2 5\n", None, "line 3: a variable's number is '1.0'; it must be a whole number"),
    ("1\n3 1\n1 2 five\n", None, "line 3: the weight is 'five'; it must be a finite number"),
    ("1\n3 1\n1 2 nan\n", None, "line 3: the weight is 'nan'; it must be a finite number"),
    ("1\n3 1\n1 2 -inf\n", None, "line 3: the weight is '-inf'; it must be a finite number"),
    ("1\n3 1\n1 2 1e999\n", None, "line 3: the weight is '1e999'; it must be a finite number"),
    ("1\n3 1\n1 2 1_0.5\n", None, "line 3: the weight is '1_0.5'"),
    ("1\n3 1\n1 2 1234567890123456789\n", None, "line 3: the weight is '1234567890123456789'; whole numbers may have 18 digits"),
    ("1\n3 1\n1 2 5 6\n", None, "line 3: here entry 1 of 1 of problem 1 should come"),
    ("1\n3 2\n1 2 5\n2 1 5\n", None, "line 4: the pair 2 1 was given before, on line 3; give each pair once"),
    ("1\n3 2\n2 2 5\n\n2 2 5\n", None, "line 5: the pair 2 2 was given before, on line 3"),
    ("1\n3 1\n1 2 " + "y" * 500 + "\n", None, "yyy...'; it must be a finite number"),
    # graphs
    ("3 2\n1 2 1\n", None, "the file ends after line 2, where edge 2 of 2 should come"),
    ("3 1\n1 2 1\n2 3 1\n", None, "line 3: the file should end after edge 1; this line is '2 3 1'"),
    ("3 4\n", None, "line 1: m is 4; it must be from 0 to 3"),
    ("3 1\n2 2 1\n", None, "line 2: an edge from node 2 to itself; if this is a quadratic problem"),
    ("3 1\n1 4 1\n", None, "line 2: a variable's number is 4"),
    ("3 1\n1 2\n", None, "line 2: here edge 1 of 1 should come, three numbers i j w; this line is '1 2'"),
    ("3 x\n", None, "line 1: m is 'x'; it must be a whole number"),
    ("3 1\n1 2 1\n", 2, "index (--index) is 2; the file's problems are 1 to 1"),
    # .qubo
    ("c only comments\n", None, "the file is empty"),
    ("p qubo 0 3 1\n", None, "line 1: the first line must be 'p qubo 0 maxNodes nNodes nCouplers'; it is 'p qubo 0 3 1'"),
    ("c\np cnf 0 3 1 1\n", None, "line 2: the first line must be 'p qubo"),
    ("p qubo 0 3 4 0\n", None, "line 1: nNodes is 4; it must be from 0 to 3"),
    ("p qubo 0 3 0 4\n", None, "line 1: nCouplers is 4; it must be from 0 to 3"),
    ("p qubo 0 x 0 4\n", None, "line 1: maxNodes is 'x'"),
    ("p qubo 0 3 2 0\n0 0 1\n", None, "line 1 says 2 nodes, but 1 lines give one"),
    ("c\np qubo 0 3 0 2\n0 1 1\n", None, "line 2 says 2 couplers, but 1 lines give one"),
    ("p qubo 0 3 0 1\n0 1 1\n1 2 1\n", None, "line 1 says 1 couplers, but 2 lines give one"),
    ("p qubo 0 3 1 0\n3 3 1\n", None, "line 2: a variable's number is 3; it must be from 0 to 2"),
    ("p qubo 0 3 1 0\n-1 -1 1\n", None, "line 2: a variable's number is -1"),
    ("p qubo 0 3 0 2\nc\n0 1 1\n1 0 1\n", None, "line 4: the pair 1 0 was given before, on line 3"),
    ("p qubo 0 3 1 0\n0 0 x\n", None, "line 2: the weight is 'x'"),
    ("p qubo 0 3 0 0\n", 2, "the file's problems are 1 to 1"),
    # neither
    ("this is some text\n", None, "line 1: the first line has 4 words; it must be the number of problems"),
    (b"\x00\x01\x02", None, "this is not a text file; unpack it if it is an archive"),
    (b"\x1f\x8b\x08\xff\xfe", None, "this is not a text file"),
]


@pytest.mark.parametrize(("text", "index", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_files(text: str | bytes, index: int | None, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    message = line_of(lambda: load(path, index))
    assert message.startswith(str(path))
    assert reason in message
    assert len(message) < len(str(path)) + 250


def test_the_ending_qubo_decides(tmp_path: Path) -> None:
    path = written(tmp_path, "1\n2 1\n1 2 3\n", "wrong.qubo")
    assert "line 1: the first line must be 'p qubo" in line_of(lambda: load(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert line_of(lambda: load(tmp_path / "none.txt")) == f"{tmp_path / 'none.txt'}: there is no such file"
    assert "cannot be read (Is a directory)" in line_of(lambda: load(tmp_path))


# --- best known values


def test_the_table() -> None:
    assert len(BEST_KNOWN) == 20
    assert all(len(key) == 64 and value > 0 for key, value in BEST_KNOWN.items())


def test_unknown_problems_have_no_maximum() -> None:
    assert Quadratic([[1]]).maximum is None
    assert Quadratic([[1.5]]).maximum is None
    assert Quadratic([[1e300]]).maximum is None
    assert Custom(lambda x: x.sum(1), 2).maximum is None
    assert checksum(torch.tensor([[0.5]])) is None


def test_a_maximum_is_found_by_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights: Weights = {(0, 0): 3, (0, 2): -4, (1, 2): 7}
    key = checksum(triangular({(0, 0): 3, (0, 2): -8, (1, 2): 14}, 3))
    assert key == FROZEN_CHECKSUM  # it must not change: the table depends on it
    monkeypatch.setitem(BEST_KNOWN, key, 17)
    assert load(written(tmp_path, bqp_text((3, weights)), "anything.txt")).maximum == 17
    assert Quadratic(torch.tensor([[3.0, 0, -4], [0, 0, 7], [-4, 7, 0]])).maximum == 17
    assert load(written(tmp_path, bqp_text((3, weights | {(1, 2): 8})), "anything.txt")).maximum is None


FROZEN_CHECKSUM = "1221191350aa16075111bd97259fa7a6a0d71f8ef0b7578e85fd101208f7cabb"


@real_files
def test_real_files() -> None:
    assert REAL is not None
    for name, value in json.loads((REAL / "best_known.json").read_text()).items():
        size, index = name.removeprefix("bqp").split(".")
        made = load(REAL / f"bqp{size}.txt", int(index))
        assert (made.variables, made.maximum, made.weights.dtype) == (int(size), value, torch.int64)
        if int(size) <= 100:  # 1-flip climbing from random starts reaches these
            starts = torch.randint(2, (300, made.variables), generator=torch.Generator().manual_seed(0))
            assert int(made(polish(made, starts)).max()) == value


@real_files
def test_a_real_file_under_another_name_and_in_another_order(tmp_path: Path) -> None:
    assert REAL is not None
    lines = (REAL / "bqp50.txt").read_text().splitlines()
    entries = lines[2 : 2 + int(lines[1].split()[1])]
    random.Random(0).shuffle(entries)
    path = written(tmp_path, "\n".join(["1", lines[1], *entries]), "bqp500.5.txt")
    assert load(path).maximum == 2098
    i, j, q = entries[0].split()
    entries[0] = f"{i} {j} {int(q) + 1}"
    path = written(tmp_path, "\n".join(["1", lines[1], *entries]), "bqp50.1.txt")
    assert load(path).maximum is None


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
