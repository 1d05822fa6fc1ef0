"""Rewards from files, written by hand or the real ones of the OR-Library where DOHYO_DATA has them; best known values."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dohyo.lab.rewards import Custom, Quadratic, load, max_cut
from dohyo.lab.rewards.quadratic import BEST_KNOWN, checksum
from test_rewards import Weights, by_hand, everything, line_of, sparse, triangular

from benchmarks.solvers import polish

REAL = Path(os.environ["DOHYO_DATA"]) / "qubo" if os.environ.get("DOHYO_DATA") else None
real_files = pytest.mark.skipif(
    REAL is None or not REAL.is_dir(), reason="needs the OR-Library files: set DOHYO_DATA to a folder that holds qubo/"
)


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


in_a_folder = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
