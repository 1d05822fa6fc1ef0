"""Files of quadratic problems: the OR-Library's bqp, D-Wave's .qubo and the Gset's graphs; errors name the file and the line."""

import math
import re
from collections import deque
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.files import read_whole
from dohyo.lab.rewards.quadratic import LARGEST, Quadratic, max_cut

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")  # 18 digits fit into 64 bits


class Lines:
    """The lines of a file that are not blank and do not begin with `comment`, read one after another: `left` holds those that
    are not read yet, with their numbers from one; `number` is that of the line read last."""

    def __init__(self, path: Path | str, comment: str | None = None) -> None:
        self.path, self.number, self._line = Path(path).expanduser(), 0, ""
        lines = enumerate(_text(self.path).split("\n"), 1)
        self.left = deque((number, line) for number, line in lines if line.strip() and not (comment and line.startswith(comment)))
        if not self.left:
            raise DohyoError(f"{self.path}: the file is empty")
        self.first = self.left[0][1]

    def next(self, wanted: str, count: int | None = None) -> list[str]:
        """The words of the next line, which should be `wanted` and have `count` words."""
        if not self.left:
            raise DohyoError(f"{self.path}: the file ends after line {self.number}, where {wanted} should come")
        self.number, self._line = self.left.popleft()
        words = self._line.split()
        if count is not None and len(words) != count:
            form = ", three numbers i j w" if count == 3 else ""
            self.refuse(f"here {wanted} should come{form}; this line is {self.shown()}")
        return words

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error for the line read last."""
        raise DohyoError(f"{self.path}, line {self.number}: {reason}")

    def shown(self) -> str:
        """The line read last, for an error message."""
        return _short(self._line.strip())

    def whole(self, word: str, what: str, least: int, most: int) -> int:
        """A whole number within bounds."""
        if not _WHOLE.fullmatch(word):
            self.refuse(f"{what} is {_short(word)}; it must be a whole number")
        value = int(word)
        if not least <= value <= most:
            self.refuse(f"{what} is {value}; it must be from {least} to {most}")
        return value

    def weight(self, word: str) -> int | float:
        """A finite number; an int if it is written as one."""
        if _WHOLE.fullmatch(word):
            return int(word)
        if word.lstrip("+-").isdecimal():
            self.refuse(f"the weight is {_short(word)}; whole numbers may have 18 digits")
        try:
            value = float(word) if "_" not in word else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self.refuse(f"the weight is {_short(word)}; it must be a finite number")
        return value


class Entries:
    """Weights of pairs of `variables` variables, from lines `i j w`; `origin` is the number of the first variable, 0 or 1."""

    def __init__(self, lines: Lines, variables: int, origin: int) -> None:
        self.lines, self.variables, self.origin = lines, variables, origin
        self._seen: dict[tuple[int, int], int] = {}
        self._values: list[int | float] = []

    def read(self, wanted: str) -> tuple[int, int]:
        """Read one line; the pair in it, smaller number first, counted from zero."""
        lines, words = self.lines, self.lines.next(wanted, 3)
        last = self.variables - 1 + self.origin
        i, j = (lines.whole(word, "a variable's number", self.origin, last) - self.origin for word in words[:2])
        pair = (i, j) if i <= j else (j, i)
        if pair in self._seen:
            lines.refuse(f"the pair {words[0]} {words[1]} was given before, on line {self._seen[pair]}; give each pair once")
        self._seen[pair] = lines.number
        self._values.append(lines.weight(words[2]))
        return pair

    def matrix(self) -> Tensor:
        """(d, d), upper triangular; int64 if every weight is whole, else float64."""
        whole = all(isinstance(value, int) or (value.is_integer() and abs(value) < 2**53) for value in self._values)
        dtype = torch.int64 if whole else torch.float64
        values = [int(value) for value in self._values] if whole else self._values
        matrix = torch.zeros(self.variables, self.variables, dtype=dtype)
        if values:
            i, j = torch.tensor(list(self._seen)).T
            matrix[i, j] = torch.tensor(values, dtype=dtype)
        return matrix


def _text(path: Path) -> str:
    if not path.exists():
        raise DohyoError(f"{path}: there is no such file")
    try:
        raw = read_whole(path)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise DohyoError(f"{path}: cannot be read ({error.strerror}); give the path of a text file") from error
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DohyoError(f"{path}: this is not a text file; unpack it if it is an archive")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def load(path: Path | str, index: int | None = None) -> Quadratic:
    r"""A reward from a file. Its first line decides the format, and the ending .qubo:

    - One number: the OR-Library's bqp. The number of problems, then for each of them `n nonzeros` and as many lines `i j q_ij`,
      counted from one. R(x) = x'Qx, where one triangle of the symmetric Q is given, so off-diagonal entries count twice.
    - Two numbers: a graph of the Gset for Max-Cut. `n m`, then m lines `i j w`, one for each edge, counted from one. R(x) is the
      weight of the cut, the same for x and 1 - x.
    - `c` or `p`: the .qubo of D-Wave's qbsolv. `c ...` for comments, `p qubo 0 maxNodes nNodes nCouplers`, then nNodes lines
      `i i q_ii` and nCouplers lines `i j q_ij`, counted from zero. **The format is one of minimisation: the reward is minus
      the energy** of the file. Each pair counts once, and nodes without a line have weight 0.

    A problem whose best value is known is recognised by its weights, under any file name and in any of the formats.

    Args:
        index: Which of the file's problems, from one; needed if there are several.

    References:
        Beasley, OR-Library: distributing test problems by electronic mail (1990); its bqp files are from 1998. Helmberg and
        Rendl, A spectral bundle method for semidefinite programming (2000), for the Gset. Booth, Reinhardt and Roy,
        Partitioning optimization problems for hybrid classical/quantum execution (D-Wave 2017), for .qubo.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "problem.txt"
        >>> _ = path.write_text("1\n2 2\n1 1 3\n1 2 -4\n")
        >>> load(path)
        Quadratic('problem.txt', variables=2)
        >>> load(path)(torch.tensor([[1, 0], [1, 1]]))
        tensor([ 3, -5])
        >>> _ = path.write_text("c a comment\np qubo 0 2 2 1\n0 0 3\n1 1 -5\n0 1 2\n")
        >>> load(path)(torch.tensor([[1, 0], [0, 1], [1, 1]]))
        tensor([-3,  5,  0])
    """
    lines = Lines(path)
    words = lines.first.split()
    if lines.path.suffix.lower() == ".qubo" or lines.first.startswith("c") or words[0] == "p":
        _chosen(lines, 1, index)
        return _qubo(Lines(path, comment="c"))
    if len(words) == 1:
        return _bqp(lines, index)
    if len(words) == 2:
        _chosen(lines, 1, index)
        return _gset(lines)
    raise DohyoError(
        f"{lines.path}, line 1: the first line has {len(words)} words; it must be the number of problems (OR-Library bqp), "
        "'n m' (Gset graph) or 'p qubo 0 maxNodes nNodes nCouplers' (.qubo)"
    )


def _bqp(lines: Lines, index: int | None) -> Quadratic:
    count = lines.whole(lines.next("the number of problems")[0], "the number of problems", 1, 1_000_000)
    wanted = _chosen(lines, count, index)
    for problem in range(1, count + 1):
        variables, nonzeros = _sizes(lines, f"problem {problem} of {count}", "n nonzeros", loops=True)
        entries = Entries(lines, variables, origin=1)
        for entry in range(1, nonzeros + 1):
            what = f"entry {entry} of {nonzeros} of problem {problem}"
            if problem == wanted:
                entries.read(what)
            else:
                lines.next(what, 3)
        if problem == wanted:
            matrix = entries.matrix()
    _finished(lines, "the last problem")
    # q_ij stands for q_ji too
    return Quadratic(matrix + matrix.triu(1), lines.path.name if count == 1 else f"{lines.path.name}, problem {wanted}")


def _qubo(lines: Lines) -> Quadratic:
    form = "p qubo 0 maxNodes nNodes nCouplers"
    words = lines.next(f"the line {form!r}")
    if len(words) != 6 or words[:2] != ["p", "qubo"]:
        lines.refuse(f"the first line must be {form!r}; it is {lines.shown()}")
    variables = lines.whole(words[3], "maxNodes", 1, LARGEST)
    nodes = lines.whole(words[4], "nNodes", 0, variables)
    couplers = lines.whole(words[5], "nCouplers", 0, variables * (variables - 1) // 2)
    declared, entries = lines.number, Entries(lines, variables, origin=0)
    pairs = []
    while lines.left:
        pairs.append(entries.read("a node or a coupler"))
    on_diagonal = sum(i == j for i, j in pairs)
    for what, said, came in (("nodes", nodes, on_diagonal), ("couplers", couplers, len(pairs) - on_diagonal)):
        if said != came:
            raise DohyoError(f"{lines.path}: line {declared} says {said} {what}, but {came} lines give one")
    return Quadratic(-entries.matrix(), lines.path.name)


def _gset(lines: Lines) -> Quadratic:
    variables, edges = _sizes(lines, "the graph", "n m", loops=False)
    entries = Entries(lines, variables, origin=1)
    for edge in range(1, edges + 1):
        i, j = entries.read(f"edge {edge} of {edges}")
        if i == j:
            lines.refuse(
                f"an edge from node {i + 1} to itself; if this is a quadratic problem and not a graph, "
                "write a first line with the number of problems, 1, as the OR-Library does"
            )
    _finished(lines, f"edge {edges}")
    return max_cut(entries.matrix(), lines.path.name)


def _chosen(lines: Lines, count: int, index: int | None) -> int:
    """The number of the problem that `index` selects in a file of `count`, from one."""
    if index is None and count > 1:
        raise DohyoError(f"{lines.path}: the file holds {count} problems; choose one with index (--index) from 1 to {count}")
    if index is not None and not 1 <= index <= count:
        raise DohyoError(f"{lines.path}: index (--index) is {index}; the file's problems are 1 to {count}")
    return index or 1


def _sizes(lines: Lines, what: str, form: str, loops: bool) -> tuple[int, int]:
    """The numbers of variables and of entries, from the line that gives them."""
    words = lines.next(f"the line {form!r} of {what}", 2)
    variables = lines.whole(words[0], "n", 1, LARGEST)
    pairs = variables * (variables + 1 if loops else variables - 1) // 2
    return variables, lines.whole(words[1], form.split()[1], 0, pairs)


def _finished(lines: Lines, last: str) -> None:
    if lines.left:
        lines.next("")
        lines.refuse(f"the file should end after {last}; this line is {lines.shown()}")
