"""Files of quadratic problems: the OR-Library's, D-Wave's .qubo, and the Gset's graphs.

What is wrong with a file is said in a ValueError of one line that names the file and the line.
"""

from pathlib import Path

from dohyo.errors import DohyoError
from dohyo.lab.rewards.lines import LARGEST, Entries, Lines
from dohyo.lab.rewards.quadratic import Quadratic, max_cut


def read_bqp(path: Path | str, index: int | None = None) -> Quadratic:
    r"""A problem of the OR-Library's bqp text format.

    .. math:: R(x) = x^\top Q x = \sum_i q_{ii} x_i + 2 \sum_{i<j} q_{ij} x_i x_j

    The file says how many problems there are; then for each `n nonzeros` and as many lines `i j q_ij`, counted from one.
    One triangle of the symmetric Q is given, the other follows, so that off-diagonal entries count twice.

    Args:
        index: Which of the problems, from one; needed where there are several.

    References:
        Beasley, OR-Library: distributing test problems by electronic mail (1990); its bqp files are from 1998.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "two.txt"
        >>> _ = path.write_text("2\n2 2\n1 1 3\n1 2 -4\n3 1\n2 3 7\n")
        >>> read_bqp(path, index=1)(torch.tensor([[1, 0], [1, 1]]))
        tensor([ 3, -5])
    """
    return bqp(Lines(path), index)


def read_qubo(path: Path | str) -> Quadratic:
    r"""A problem of the .qubo format of D-Wave's qbsolv, with its sign changed.

    .. math:: R(x) = -E(x), \qquad E(x) = \sum_i q_{ii} x_i + \sum_{i<j} q_{ij} x_i x_j

    **The format is one of minimisation: E is the file's energy, and the reward to maximise is minus the energy.** The
    lines are `c ...` for comments, `p qubo 0 maxNodes nNodes nCouplers`, then nNodes lines `i i q_ii` and nCouplers lines
    `i j q_ij`, counted from zero, in any order. Each pair is given once and counts once, unlike in the OR-Library. Nodes
    below maxNodes without a line have weight 0.

    References:
        Booth, Reinhardt and Roy, Partitioning optimization problems for hybrid classical/quantum execution (D-Wave 2017).

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "small.qubo"
        >>> _ = path.write_text("c a comment\np qubo 0 2 2 1\n0 0 3\n1 1 -5\n0 1 2\n")
        >>> read_qubo(path)(torch.tensor([[1, 0], [0, 1], [1, 1]]))
        tensor([-3,  5,  0])
    """
    return qubo(Lines(path, comment="c"))


def read_gset(path: Path | str) -> Quadratic:
    r"""A Max-Cut problem: a weighted graph in the format of the Gset.

    .. math:: R(x) = \sum_{i<j} w_{ij}\, [x_i \ne x_j]

    The first line is `n m`, then m lines `i j w` follow, one for each edge, counted from one. The reward is the weight of
    the cut, the same for x and 1 - x.

    References:
        Helmberg and Rendl, A spectral bundle method for semidefinite programming (2000); Rinaldi's generator rudy.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "path.txt"
        >>> _ = path.write_text("3 2\n1 2 1\n2 3 4\n")
        >>> read_gset(path)(torch.tensor([[0, 0, 1], [0, 1, 0]]))
        tensor([4, 5])
    """
    return gset(Lines(path))


def bqp(lines: Lines, index: int | None) -> Quadratic:
    """See `read_bqp`."""
    words = lines.next("the number of problems")
    if len(words) != 1:
        lines.refuse(f"the first line must be the number of problems alone; it is {lines.shown()}")
    count = lines.whole(words[0], "the number of problems", 1, 1_000_000)
    wanted = chosen(lines, count, index)
    matrices = {}
    for problem in range(1, count + 1):
        variables, nonzeros = _sizes(lines, f"problem {problem} of {count}", "n nonzeros", loops=True)
        entries = Entries(lines, variables, origin=1)
        for entry in range(1, nonzeros + 1):
            what = f"entry {entry} of {nonzeros} of problem {problem}"
            if problem == wanted:
                entries.read(what)
            elif len(lines.next(what)) != 3:
                lines.refuse(f"here {what} should come, three numbers i j q; this line is {lines.shown()}")
        if problem == wanted:
            matrices[problem] = entries.matrix()
    _finished(lines, "the last problem")
    weights = matrices[wanted] + matrices[wanted].triu(1)  # q_ij stands for q_ji too
    return Quadratic(weights, lines.path.name if count == 1 else f"{lines.path.name}, problem {wanted}")


def qubo(lines: Lines) -> Quadratic:
    """See `read_qubo`."""
    form = "p qubo 0 maxNodes nNodes nCouplers"
    words = lines.next(f"the line {form!r}")
    if len(words) != 6 or words[:2] != ["p", "qubo"]:
        lines.refuse(f"the first line must be {form!r}; it is {lines.shown()}")
    variables = lines.whole(words[3], "maxNodes", 1, LARGEST)
    nodes = lines.whole(words[4], "nNodes", 0, variables)
    couplers = lines.whole(words[5], "nCouplers", 0, variables * (variables - 1) // 2)
    declared = lines.number
    entries = Entries(lines, variables, origin=0)
    on_diagonal = 0
    read = 0
    while len(lines):
        i, j = entries.read("a node or a coupler")
        on_diagonal += i == j
        read += 1
    for what, said, came in (("nodes", nodes, on_diagonal), ("couplers", couplers, read - on_diagonal)):
        if said != came:
            raise DohyoError(f"{lines.path}: line {declared} says {said} {what}, but {came} lines give one")
    return Quadratic(-entries.matrix(), lines.path.name)


def gset(lines: Lines) -> Quadratic:
    """See `read_gset`."""
    variables, edges = _sizes(lines, "the graph", "n m", loops=False)
    entries = Entries(lines, variables, origin=1)
    for edge in range(1, edges + 1):
        i, j = entries.read(f"edge {edge} of {edges}")
        if i == j:
            lines.refuse(
                f"an edge from node {i + 1} to itself; if this is a quadratic problem and no graph, "
                "write a first line with the number of problems, 1, as the OR-Library does"
            )
    _finished(lines, f"edge {edges}")
    return max_cut(entries.matrix(), lines.path.name)


def chosen(lines: Lines, count: int, index: int | None) -> int:
    """The problem that `index` means in a file of `count`, from one."""
    if index is None and count > 1:
        raise DohyoError(f"{lines.path}: the file holds {count} problems; choose one with index (--index) from 1 to {count}")
    if index is not None and not 1 <= index <= count:
        raise DohyoError(f"{lines.path}: index (--index) is {index}; the file's problems are 1 to {count}")
    return index or 1


def _sizes(lines: Lines, what: str, form: str, loops: bool) -> tuple[int, int]:
    """The line that says how many variables and how many entries there are."""
    words = lines.next(f"the line {form!r} of {what}")
    if len(words) != 2:
        lines.refuse(f"here the line {form!r} of {what} should come; this line is {lines.shown()}")
    variables = lines.whole(words[0], "n", 1, LARGEST)
    pairs = variables * (variables + 1 if loops else variables - 1) // 2
    return variables, lines.whole(words[1], form.split()[1], 0, pairs)


def _finished(lines: Lines, last: str) -> None:
    if len(lines):
        lines.next("")
        lines.refuse(f"the file should end after {last}; this line is {lines.shown()}")
