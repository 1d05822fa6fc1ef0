"""A study's folder, as `dohyo reproduce` leaves it, finished or not."""

from collections import Counter
from pathlib import Path

from dohyo.errors import DohyoError
from dohyo.lab.folder import SCHEMA_VERSION, STUDY, VERDICTS, Conclusion, Values, check_values, read_json
from dohyo.lab.report.entries import Entry, Figure, as_yaml, figure, versions
from dohyo.lab.report.grids import Grid, duration, grid

_AGAIN = "let `dohyo reproduce` write it again"
_STUDY = {
    "schema_version": int, "study": str, "title": str, "question": str, "scale": str, "config": dict, "seeds": list,
    "versions": dict | None, "seconds": float | int, "cells_done": int, "cells_total": int, "cells": dict,
    "conclusions": list, "tables": list, "pictures": list,
}  # fmt: skip
_CELL = {"options": dict, "seconds": float | int}
_CONCLUSION = {"claim": str, "paper": str, "found": str, "holds": bool | None}
_TABLE = {"title": str, "columns": list, "rows": list, "note": str | None}
_PICTURE = {"file": str, "title": str, "alt": str}


def read_study(folder: Path) -> Entry:
    path = folder / STUDY
    found = check_values(read_json(path, _AGAIN), _STUDY, path, _AGAIN)
    if found["schema_version"] != SCHEMA_VERSION:
        raise DohyoError(f"{path}: schema_version is {found['schema_version']}; this version of dohyo reads {SCHEMA_VERSION}")
    cells = dict(zip(found["cells"], _parts(list(found["cells"].values()), _CELL, path), strict=True))
    claims = _parts(found["conclusions"], _CONCLUSION, path)
    conclusions = [Conclusion(one["claim"], one["paper"], one["found"], one.get("holds")) for one in claims]
    name, scale, done, total = (found[key] for key in ("study", "scale", "cells_done", "cells_total"))
    seconds, partial = duration(found["seconds"]), done < total
    options = {name: ", ".join(f"{key} {value}" for key, value in cell["options"].items()) for name, cell in cells.items()}
    rows = [[name, options[name], duration(cell["seconds"])] for name, cell in cells.items()]
    return Entry(
        kind="study",
        name=name,
        folder=str(folder),
        title=found["title"],
        question=found["question"],
        outcome=tally(conclusions),
        state=f"{done} of {total} cells" if partial else "finished",
        seconds=seconds,
        scale=scale,
        notices=[
            f"Not finished: {done} of {total} cells are done, and what follows is based on these alone. "
            f"dohyo reproduce {name} --scale {scale} --out {folder} continues."
        ] if partial else [],
        findings=conclusions,
        tables=[_table(one, path) for one in _parts(found["tables"], _TABLE, path)],
        facts=[
            ("Scale", scale),
            ("Cells", f"{done} of {total}"),
            ("Seeds", ", ".join(str(seed) for seed in found["seeds"])),
            ("Time", seconds.text),
            ("Versions", versions(found.get("versions"))),
            ("Folder", str(folder)),
        ],
        figures=[_figure(folder, one) for one in _parts(found["pictures"], _PICTURE, path)],
        config=as_yaml(found["config"]),
        more=[(f"Cells, {done} of {total}", [grid("", ["cell", "options", "time"], rows)], [])] if rows else [],
    )  # fmt: skip


def tally(conclusions: list[Conclusion]) -> str:
    """How many claims hold, do not hold, or stay open.

    Example:
        >>> tally([Conclusion("a", "", "", True), Conclusion("b", "", "", True), Conclusion("c", "", "", None)])
        '2 hold, 1 cannot tell'
    """
    counts = Counter(one.verdict for one in conclusions)
    plural = {"holds": "hold", "does not hold": "do not hold"}
    counted = [(verdict, counts[verdict]) for verdict in VERDICTS.values() if counts[verdict]]
    words = [f"{n} {plural.get(verdict, verdict) if n > 1 else verdict}" for verdict, n in counted]
    return ", ".join(words) or "no conclusion yet"


def _parts(found: list[Values], kinds: Values, path: Path) -> list[Values]:
    """The objects in a list of a study.json, each with the values it needs."""
    for one in found:
        if not isinstance(one, dict):
            raise DohyoError(f"{path}: holds {one!r:.40} where an object should be; {_AGAIN}")
        check_values(one, kinds, path, _AGAIN)
    return found


def _table(found: Values, path: Path) -> Grid:
    columns, rows = found["columns"], found["rows"]
    for row in rows:
        if not isinstance(row, list) or len(row) != len(columns):
            length = len(row) if isinstance(row, list) else "no"
            raise DohyoError(f"{path}: table {found['title']!r}: a row has {length} cells for {len(columns)} columns; {_AGAIN}")
    return grid(found["title"], [str(column) for column in columns], rows, found.get("note") or "")


def _figure(folder: Path, picture: Values) -> Figure:
    file = picture["file"]
    if Path(file).name != file:
        raise DohyoError(f"{folder / STUDY}: picture {file!r} does not lie in the study's own folder; {_AGAIN}")
    return figure(folder / file, picture["title"], picture["alt"])
