"""Text files of numbers, read line by line with errors that say where they are."""

import math
import re
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.files import read_whole

LARGEST = 20_000  # variables: the weights are a dense matrix, 3 GB at this size
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")  # 18 digits fit into 64 bits


class Lines:
    """The lines of a file that are not blank, with their numbers, and a position among them.

    Args:
        comment: Lines that begin with this are left out.
    """

    def __init__(self, path: Path | str, comment: str | None = None) -> None:
        self.path = Path(path).expanduser()
        lines = enumerate(_text(self.path).split("\n"), 1)
        self._lines = [(number, line) for number, line in lines if line.strip() and not (comment and line.startswith(comment))]
        self._place = 0
        if not self._lines:
            raise DohyoError(f"{self.path}: the file is empty")
        self.first = self._lines[0][1]

    def __len__(self) -> int:
        """How many lines are left."""
        return len(self._lines) - self._place

    def next(self, wanted: str, count: int | None = None) -> list[str]:
        """The words of the next line, which should be `wanted` and have `count` words."""
        if not len(self):
            raise DohyoError(f"{self.path}: the file ends after line {self._lines[-1][0]}, where {wanted} should come")
        self._place += 1
        words = self._lines[self._place - 1][1].split()
        if count is not None and len(words) != count:
            form = ", three numbers i j w" if count == 3 else ""
            self.refuse(f"here {wanted} should come{form}; this line is {self.shown()}")
        return words

    @property
    def number(self) -> int:
        """The number of the line read last, from one."""
        return self._lines[self._place - 1][0]

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error for the line read last."""
        raise DohyoError(f"{self.path}, line {self.number}: {reason}")

    def shown(self) -> str:
        """The line read last, for an error message."""
        return _short(self._lines[self._place - 1][1].strip())

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
