"""A study's folder, as `dohyo reproduce` leaves it, finished or not."""

from pathlib import Path
from typing import Any

from dohyo.errors import DohyoError
from dohyo.lab.report.entries import STUDY, VERDICTS, Entry, Finding, as_yaml, blaming, read_json, versions
from dohyo.lab.report.grids import duration, grid
from dohyo.lab.report.pictures import Figure, figure

_WORDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number", (int, float): "a number"}


def read_study(folder: Path) -> Entry:
    found = read_json(folder / STUDY)
    with blaming(str(folder / STUDY), "let `dohyo reproduce` write it again"):
        return _entry(folder, found)


def findings(found: dict[str, Any]) -> list[Finding]:
    """The conclusions of a study.json."""
    made = []
    for one in _of(found, "conclusions", list):
        if one["holds"] not in (True, False, None):
            raise DohyoError(f"a conclusion's `holds` is {one['holds']!r}; it must be true, false or null")
        made.append(Finding(_of(one, "claim", str), _of(one, "paper", str), _of(one, "found", str), one["holds"]))
    return made


def tally(conclusions: list[Finding]) -> str:
    """How many claims hold, do not hold, or stay open.

    Example:
        >>> tally([Finding("a", "", "", True), Finding("b", "", "", True), Finding("c", "", "", None)])
        '2 hold, 1 cannot tell'
    """
    counts = {verdict: sum(one.holds is value for one in conclusions) for value, verdict in VERDICTS.items()}
    plural = {"holds": "hold", "does not hold": "do not hold"}
    words = [f"{n} {plural.get(verdict, verdict) if n > 1 else verdict}" for verdict, n in counts.items() if n]
    return ", ".join(words) or "no conclusion yet"


def _entry(folder: Path, found: dict[str, Any]) -> Entry:
    if found.get("schema_version") != 1:
        raise DohyoError(f"schema_version is {found.get('schema_version')!r}; this version of dohyo reads 1")
    name, scale = _of(found, "study", str), _of(found, "scale", str)
    done, total = _of(found, "cells_done", int), _of(found, "cells_total", int)
    seconds = duration(_of(found, "seconds", (int, float)))
    cells = _of(found, "cells", dict)
    rows = [[key, _options(cell["options"]), duration(cell["seconds"])] for key, cell in cells.items()]
    made = findings(found)
    partial = done < total
    return Entry(
        kind="study",
        name=name,
        folder=str(folder),
        title=_of(found, "title", str),
        question=_of(found, "question", str),
        outcome=tally(made),
        state=f"{done} of {total} cells" if partial else "finished",
        seconds=seconds,
        scale=scale,
        notices=[_unfinished(name, scale, folder, done, total)] if partial else [],
        findings=made,
        tables=[grid(t["title"], t["columns"], t["rows"], t.get("note", "")) for t in _of(found, "tables", list)],
        facts=[
            ("Scale", scale),
            ("Cells", f"{done} of {total}"),
            ("Seeds", ", ".join(str(seed) for seed in _of(found, "seeds", list))),
            ("Time", seconds.text),
            ("Versions", versions(found.get("versions"))),
            ("Folder", str(folder)),
        ],
        figures=[_figure(folder, one) for one in _of(found, "pictures", list)],
        config=as_yaml(_of(found, "config", dict)),
        more=[(f"Cells, {done} of {total}", [grid("", ["cell", "options", "time"], rows)], [])] if rows else [],
    )


def _unfinished(name: str, scale: str, folder: Path, done: int, total: int) -> str:
    return (f"Not finished: {done} of {total} cells are done, and what follows is of these alone. "
            f"dohyo reproduce {name} --scale {scale} --out {folder} goes on.")  # fmt: skip


def _figure(folder: Path, picture: dict[str, Any]) -> Figure:
    file = _of(picture, "file", str)
    if Path(file).name != file:
        raise DohyoError(f"picture {file!r} does not lie in the study's own folder")
    return figure(folder / file, _of(picture, "title", str), _of(picture, "alt", str))


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


def _of(found: dict[str, Any], key: str, kind: Any) -> Any:
    value = found[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DohyoError(f"{key} is {value!r:.40}; it must be {_WORDS[kind]}")
    return value
