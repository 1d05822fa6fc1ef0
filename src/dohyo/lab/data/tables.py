"""Tables of numbers: CSV files, with or without a header, and Parquet files; as in `readers`, errors do not name the file."""

import csv
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from dohyo.errors import DohyoError
from dohyo.lab.claims import check_memory
from dohyo.lab.data.dataset import Source

Row = tuple[int, list[str]]  # the number of its line, and its cells

_DELIMITERS = ",;\t"
_LONGEST = 2**25  # characters of a row
_SAMPLE = 2**16  # characters, from which the number of numbers is guessed
_SHOWN = 40  # characters of a cell or a name in a message or a picture


def read_csv(path: Path) -> Source:
    """The numbers of a CSV file, with commas, semicolons or tabs between them; with a header if a cell of line 1 is no number."""
    rows = ((number, row) for number, row in csv_rows(path, _DELIMITERS) if "".join(row).strip() or len(row) > 1)
    start = next(rows, None)
    if start is None:
        raise DohyoError("it is empty; it must hold rows of numbers")
    first = start[1]
    words = [cell for cell in first if not _is_number(cell)]
    if words and len(words) < len(first) and not "".join(words).strip():
        raise DohyoError("its first line has numbers and empty cells; name every column, or fill the cells")
    names = column_names(first if words else [""] * len(first))
    table = numbers(rows if words else itertools.chain([start], rows), names, "replace it, or leave the column out")
    if not len(table):
        raise DohyoError("it holds a header and no rows; it must hold rows of numbers")
    if len(first) > 2 and np.array_equal(table[0] - table[0, 0], np.arange(len(first))) and table[0, 0] in (0, 1):
        raise DohyoError("its first line counts 0, 1, 2, ...; is it a header? Name the columns with letters, or remove the line")
    if words and not first[0].strip() and len(table) > 1 and np.array_equal(table[:, 0] - table[0, 0], np.arange(len(table))):
        raise DohyoError("its first column has no name and counts the rows; leave it out (in pandas, to_csv(..., index=False))")
    return Source({"the table": whole_numbers(table)}, columns=names)


def csv_rows(path: Path, delimiters: str) -> Iterator[Row]:
    """The rows of a CSV file, one at a time, with that delimiter of which the first line has most."""
    reader: Any = None
    length = 0  # characters since the last row

    def lines(file: TextIO) -> Iterator[str]:
        nonlocal length
        for line in iter(lambda: file.readline(_LONGEST), ""):
            length += len(line)
            if length >= _LONGEST:
                raise DohyoError(f"it has a row of more than {_LONGEST} characters; put each datum into a row of its own")
            yield line

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in iter(lambda: file.readline(_LONGEST), "") if line.strip()), "")
            delimiter, sample = max(delimiters, key=first.count), file.read(_SAMPLE)
        guess = path.stat().st_size / max(1, len(sample)) * (sample.count(delimiter) + sample.count("\n"))
        check_memory(int(guess) // 2, 8)  # half of it, because a guess may be wrong
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(lines(file), delimiter=delimiter)
            for row in reader:
                length = 0
                yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise DohyoError(f"it is not text in UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except csv.Error as error:
        raise DohyoError(f"line {reader.line_num}: {error}; is it a CSV file?") from error


def numbers(rows: Iterable[Row], names: tuple[str, ...], remedy: str) -> NDArray[np.float64]:
    """The numbers of rows as long as `names`; `remedy` is what can be done about a cell that is none."""
    found, width = array("d"), len(names)  # a list of lists would take many times the memory
    for number, row in rows:
        if len(row) != width:
            raise DohyoError(f"line {number} has {len(row)} cells, but the first line has {width}; make all lines equally long")
        try:
            found.extend(map(float, row))
        except ValueError as error:
            place, cell = next((i, cell) for i, cell in enumerate(row) if not _is_number(cell))
            came = "is empty" if not cell.strip() else f"is {shown(cell)!r}, not a number"
            raise DohyoError(f"line {number}, {names[place]}: the cell {came}; {remedy}") from error
        check_memory(len(found), found.itemsize)
    return np.frombuffer(found).reshape(-1, max(1, width))


def read_parquet(path: Path) -> Source:
    """The columns of a Parquet file, which must all be numbers."""
    try:
        from pyarrow import parquet, types  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise DohyoError("Parquet needs pyarrow: pip install pyarrow; or save the table as CSV") from error
    try:
        with parquet.ParquetFile(path) as file:
            for name, kind in zip(file.schema_arrow.names, file.schema_arrow.types, strict=True):
                if file.metadata.num_rows and not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
                    raise DohyoError(f"{shown(name)} holds {shown(str(kind))}; leave it out, or make it numbers without gaps")
            check_memory(file.metadata.num_rows * file.metadata.num_columns, 8)  # which a few bytes may stand for
            table = file.read()
    except DohyoError:
        raise
    except Exception as error:  # pyarrow raises its own errors, and others for damaged files
        raise DohyoError(f"it cannot be read ({' '.join(str(error).split()):.200}); is it a Parquet file?") from error
    names = column_names(table.column_names)
    if not names or not table.num_rows:
        raise DohyoError(f"it is empty, {table.num_rows} rows of {len(names)} columns")
    columns = []
    for name, column in zip(names, table.columns, strict=True):
        values = column.to_numpy()
        if values.dtype.kind not in "fiub":
            raise DohyoError(f"{name} holds {shown(str(column.type))}; leave it out, or make it numbers without gaps")
        columns.append(values)
    return Source({"the table": whole_numbers(np.stack(columns, 1))}, columns=names)


def column_names(header: Sequence[str]) -> tuple[str, ...]:
    """What to call each column in messages and pictures: its name in one short line, or its number."""
    return tuple(shown(name) or f"column {i}" for i, name in enumerate(header, start=1))


def shown(text: str) -> str:
    """Text of a stranger's file in one line, without control characters, and not too long."""
    text = "".join(letter if letter.isprintable() else " " for letter in " ".join(text[: 4 * _SHOWN].split()))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def whole_numbers(table: NDArray[Any]) -> NDArray[Any]:
    """As integers if all are whole: in a CSV file 3 and 3.0 are the same."""
    if table.dtype.kind != "f" or not (np.isfinite(table).all() and (np.abs(table) < 2**53).all()):
        return table
    return table.astype(np.int64) if (table == np.floor(table)).all() else table


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
