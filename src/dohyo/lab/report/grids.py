"""Tables as they are shown: every number formatted once, with the key that it is sorted by."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

NOTHING = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_LEADING = re.compile(rf"[+{_MINUS}-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?=$|[\s±%(])")


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: What is shown.
        key: What it is sorted by: a number, or the text in a column of words; None comes last in either direction.
        link: The id of a section of the page.
        marks: Low, middle and high as percentages of an axis that this column's comparable cells share.
    """

    text: str
    key: float | str | None
    link: str = ""
    marks: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Grid:
    """A table that is ready to be shown."""

    title: str
    columns: list[str]
    numeric: list[bool]
    rows: list[list[Cell]]
    note: str = ""


def grid(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> Grid:
    """A table of numbers, words, None and cells. A column of words that all begin with a number is sorted by it.

    Example:
        >>> table = grid("", ["estimator", "NLL"], [["IWAE", 84.784], ["SUMO", 84.4], ["none", None]])
        >>> [[cell.text for cell in row] for row in table.rows], table.numeric
        ([['IWAE', '84.78'], ['SUMO', '84.40'], ['none', '–']], [False, True])
    """
    shown = [_column([row[i] for row in rows]) for i in range(len(columns))]
    keys = [[cell.key for cell in column if cell.key is not None] for column in shown]
    numeric = [bool(own) and not any(isinstance(key, str) for key in own) for own in keys]
    return Grid(title, list(columns), numeric, [list(row) for row in zip(*shown, strict=True)] if rows else [], note)


def with_error(value: float | None, error: float | None) -> str:
    """A number with as many digits as its error bar allows.

    Example:
        >>> with_error(25.8006, 0.1854), with_error(-1.2345, None), with_error(None, 0.1), with_error(2.5, -1)
        ('25.80 ± 0.19', '-1.234', '–', '2.5')
    """
    if not _known(value):
        return NOTHING
    if not _known(error) or error <= 0:
        return number(value)
    decimals = min(6, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def number(value: float | None, digits: int = 4) -> str:
    """A number with this many digits; whole numbers in full."""
    if not _known(value):
        return NOTHING
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.{digits}g}"


def duration(seconds: float | None) -> Cell:
    """A time as people write it, sorted by its seconds.

    Example:
        >>> [duration(seconds).text for seconds in (0.83, 75, 4000, None)]
        ['0.83 s', '1 min 15 s', '1 h 6 min', '–']
    """
    if not _known(seconds):
        return Cell(NOTHING, None)
    whole = round(seconds)
    if whole < 60:
        text = f"{seconds:.2g} s" if seconds < 10 else f"{whole} s"
    elif whole < 3600:
        text = f"{whole // 60} min {whole % 60} s"
    else:
        text = f"{whole // 3600} h {whole % 3600 // 60} min"
    return Cell(text, float(seconds))


def measured(value: float | None, error: float | None, unit: str = "") -> Cell:
    """A number with its error bar in words and on an axis."""
    reach = error or 0.0
    return Cell(with_error(value, error) + (unit if value is not None else ""), value,
                marks=None if value is None else (value - reach, value, value + reach))  # fmt: skip


def on_one_axis(cells: Sequence[Cell]) -> list[Cell]:
    """Marks as percentages of an axis that holds all of them; none where there is nothing to compare."""
    ends = [end for cell in cells for end in cell.marks or ()]
    low, width = (min(ends), max(ends) - min(ends) or 1.0) if ends else (0.0, 1.0)
    several = sum(cell.marks is not None for cell in cells) > 1

    def placed(cell: Cell) -> Cell:
        share = [round(100 * (end - low) / width, 2) for end in cell.marks or ()]
        return replace(cell, marks=tuple(share) if several and share else None)

    return [placed(cell) for cell in cells]


def _known(value: Any) -> TypeGuard[float]:
    """Whether it is a number that can be shown."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _column(values: list[Any]) -> list[Cell]:
    """Words are sorted by the numbers that they begin with if all do, else all cells are sorted as words."""
    values = [("yes" if value else "no") if isinstance(value, bool) else value for value in values]
    decimals = _decimals([float(value) for value in values if _known(value)])
    cells = []
    for value in values:
        if isinstance(value, Cell):
            cells.append(value)
        elif _known(value):
            cells.append(Cell(number(value) if decimals is None else f"{value:.{decimals}f}", float(value)))
        elif value is None or value == "" or isinstance(value, float):  # which is not finite
            cells.append(Cell(NOTHING, None))
        else:
            found = _LEADING.match(str(value))
            cells.append(Cell(str(value), float(found[0].replace(",", "").replace(_MINUS, "-")) if found else str(value)))
    if any(isinstance(cell.key, str) for cell in cells):
        return [replace(cell, key=None if cell.key is None else cell.text) for cell in cells]
    return cells


def _decimals(numbers: list[float]) -> int | None:
    """The decimals of a whole column, so that its digits line up; None where the sizes differ too much."""
    sizes = [math.floor(math.log10(abs(value))) for value in numbers if value]
    if not sizes or all(value.is_integer() for value in numbers):
        return None
    decimals = max(0, 1 - min(sizes), 3 - max(sizes))
    return decimals if max(sizes) + 1 + decimals <= 7 and decimals <= 5 else None
