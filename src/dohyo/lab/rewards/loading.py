"""`load`: a problem from a file of any format that is read here."""

from pathlib import Path

from dohyo.errors import DohyoError
from dohyo.lab.rewards.lines import Lines
from dohyo.lab.rewards.quadratic import Quadratic
from dohyo.lab.rewards.readers import bqp, chosen, gset, qubo


def load(path: Path | str, index: int | None = None) -> Quadratic:
    r"""A reward from a file: the OR-Library's bqp format, D-Wave's .qubo, or a graph of the Gset for Max-Cut.

    The first line decides, and the ending .qubo: one number is the OR-Library's, two are a graph's, `c` or `p` is .qubo.
    The best known value is recognised by what the problem is, under any file name and in any of the formats.

    Args:
        index: Which of the file's problems, from one; needed where there are several.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "problem.txt"
        >>> _ = path.write_text("1\n2 2\n1 1 3\n1 2 -4\n")
        >>> load(path)
        Quadratic('problem.txt', variables=2)
    """
    lines = Lines(path)
    words = lines.first.split()
    if lines.path.suffix.lower() == ".qubo" or lines.first.startswith("c") or words[0] == "p":
        chosen(lines, 1, index)
        return qubo(Lines(path, comment="c"))
    if len(words) == 1:
        return bqp(lines, index)
    if len(words) == 2:
        chosen(lines, 1, index)
        return gset(lines)
    raise DohyoError(
        f"{lines.path}, line 1: the first line has {len(words)} words; it must be the number of problems (OR-Library bqp), "
        "'n m' (Gset graph) or 'p qubo 0 maxNodes nNodes nCouplers' (.qubo)"
    )
