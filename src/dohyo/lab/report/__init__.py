"""A page from the folders of studies and runs: one file of HTML."""

import os
from collections.abc import Iterable
from pathlib import Path

from dohyo.errors import DohyoError
from dohyo.lab.folder import CONFIG, STUDY
from dohyo.lab.report.entries import Entry
from dohyo.lab.report.page import check_page, write_report
from dohyo.lab.report.runs import read_run
from dohyo.lab.report.studies import read_study

__all__ = ["Entry", "check_page", "find", "read", "write_report"]

_MOST_FOLDERS = 10_000


def read(folder: Path) -> Entry:
    """What there is to say about a folder; a DohyoError if it holds neither a study nor a run, or is damaged."""
    if (folder / STUDY).is_file():
        return read_study(folder)
    if (folder / CONFIG).is_file():
        return read_run(folder)
    if not folder.is_dir():
        raise DohyoError(f"{folder}: there is no such folder; name those that `dohyo reproduce` or `dohyo train` made")
    below = [str(path) for path in find([folder])]
    hint = f"a study's folder holds {STUDY}, a run's {CONFIG}"
    if below:
        hint = f"name those below it: {' '.join(below[:4])}{' ...' if len(below) > 4 else ''}"
    raise DohyoError(f"{folder}: holds neither a study nor a run; {hint}")


def find(places: Iterable[Path]) -> list[Path]:
    """Every folder below these that holds a study or a run; the folders inside such a folder are parts of it."""
    found = []
    for place in places:
        for number, (folder, below, files) in enumerate(os.walk(place)):
            if number > _MOST_FOLDERS:
                raise DohyoError(f"{place}: has more than {_MOST_FOLDERS} folders below it; name those of studies and runs")
            below.sort()
            if STUDY in files or CONFIG in files:
                found.append(Path(folder))
                below.clear()
    return found
