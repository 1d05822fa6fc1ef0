"""The cells that a study's folder holds, which a stranger may have written."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dohyo.errors import DohyoError
from dohyo.files import replacing_folder
from dohyo.lab.folder import CELLS, STUDY, WORK, Values, check_places, check_values, read_json, write_json

_KINDS = {"cells": dict, "pictures": list}  # of study.json, as far as it is read here
_CELL_KINDS = {"options": dict, "result": dict, "seconds": float | int}
_NAME = re.compile(r"\w[\w.+=-]{0,150}", re.ASCII)  # of a cell: a file name without a path


def _read(path: Path, kinds: Mapping[str, Any]) -> Values:
    remedy = "remove it, and the same command writes it again"
    return check_values(read_json(path, remedy), kinds, path, remedy)


def read_study(folder: Path, study: str) -> Values:
    """What study.json holds; a DohyoError if it is another study's, or if the name of a cell could lead out of the folder."""
    path = folder / STUDY
    report = _read(path, {"study": str})
    if report["study"] != study:
        raise DohyoError(f"{folder} holds the study {report['study']!r:.40}, not {study!r}; choose another --out")
    report = _read(path, _KINDS)
    for name, cell in report["cells"].items():
        if not _NAME.fullmatch(name) or not isinstance(cell, dict):
            raise DohyoError(f"{path}: {name!r:.60} is not a cell of a study; this file was not written by dohyo: do not use it")
        check_values(cell, _CELL_KINDS, path, "remove the file")
    return report


def read_cell(path: Path) -> Values:
    """What the file of a cell holds."""
    return _read(path, _CELL_KINDS)


def restore_cells(folder: Path, study: str) -> None:
    """The cells of a study that was kept without them: study.json holds them too."""
    if (folder / STUDY).exists() and not (folder / CELLS).exists():
        with replacing_folder(folder / CELLS) as temporary:
            for name, cell in read_study(folder, study)["cells"].items():
                write_json(temporary / f"{name}.json", cell)


def done_cells(folder: Path, study: str, cells: dict[str, Values], lengths: Collection[str] = ()) -> dict[str, Values]:
    """The cells that the folder holds; a DohyoError if they are of another study, or were made with other options.

    Args:
        lengths: Options that may grow: a cell that was made with less of one is not done yet.
    """
    kept: dict[str, Values] = {}
    for place in (folder, folder / CELLS, folder / WORK):
        check_places(place, of_folders=place.name == WORK)
    if (folder / STUDY).exists():
        report = read_study(folder, study)
        kept = report["cells"] if not (folder / CELLS).exists() else {}
    paths = {name: folder / CELLS / f"{name}.json" for name in cells}
    done = {name: kept[name] if name in kept else read_cell(path) for name, path in paths.items()
            if name in kept or path.exists()}  # fmt: skip
    short = set()
    for name, cell in done.items():
        before, options = cell["options"], cells[name]
        for key in {**before, **options}:
            if key in lengths and isinstance(before.get(key), int | float) and before[key] < options[key]:
                short.add(name)
            elif before.get(key) != options.get(key):
                raise DohyoError(
                    f"{paths[name]}: was made with {key} {before.get(key)!r}, and {options.get(key)!r} is wanted now; choose "
                    "another --out, give the options that it was made with, or remove that file to do the cell again"
                )
    return {name: cell for name, cell in done.items() if name not in short}
