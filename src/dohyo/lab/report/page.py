"""The page: one file that loads nothing."""

import base64
import datetime
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

import dohyo
from dohyo.errors import DohyoError
from dohyo.files import output_file, replacing
from dohyo.lab.report.entries import Entry
from dohyo.lab.report.grids import Cell, Grid, grid
from dohyo.lab.report.runs import compare, differences

_SIGNS = {True: "✓", False: "✕", None: "?"}  # beside the words, never alone


def write_report(entries: Sequence[Entry], path: Path) -> None:
    """Write the page of these entries to `path`, whole or not at all.

    Everything is in the one file: styles, script and pictures. A Content-Security-Policy forbids it to load anything, and to
    run any script but the one that sorts tables, so that nothing in a run's texts can.
    """
    check_page(path)
    text = render(entries)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")  # for halves of characters, which JSON can hold


def check_page(path: Path) -> None:
    if path.suffix not in (".html", ".htm"):
        raise DohyoError(f"{path}: the ending of a page must be .html")
    output_file(path)


def render(entries: Sequence[Entry]) -> str:
    if not entries:
        raise DohyoError("there is nothing to report; give the folder of a study or a run")
    ids = [f"{i}-{re.sub('[^a-z0-9]+', '-', entry.name.lower()).strip('-') or 'run'}" for i, entry in enumerate(entries, 1)]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    style, script = _file("style.css"), _file("sort.js")
    return environment.from_string(_file("page.html")).render(
        entries=list(zip(ids, entries, strict=True)),
        overview=_overview(entries),
        comparisons=[*compare(list(entries)), *differences(entries)],
        links={entry.folder: name for name, entry in zip(ids, entries, strict=True)},
        signs=_SIGNS,
        summary=_summary(entries),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        icon=base64.b64encode(_file("ring.svg").encode()).decode(),
        ring=Markup(_file("ring.svg")),
        version=dohyo.__version__,
        today=datetime.date.today().isoformat(),
    )


def _overview(entries: Sequence[Entry]) -> Grid:
    rows = [
        [
            Cell(entry.title if entry.kind == "study" else entry.name, entry.title, link=entry.folder),
            f"study {entry.name}, {entry.scale}" if entry.kind == "study" else f"run of dohyo {entry.kind}",
            Cell(entry.outcome, entry.outcome),  # words, though they may begin with a number
            entry.state,
            entry.seconds,
        ]
        for entry in entries
    ]
    return grid("", ["what", "kind", "what came out", "state", "time"], rows)


def _summary(entries: Sequence[Entry]) -> str:
    counts = Counter("study" if entry.kind == "study" else "run" for entry in entries)
    many = {"study": "studies", "run": "runs"}
    return " and ".join(f"{n} {word if n == 1 else many[word]}" for word, n in sorted(counts.items(), reverse=True))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return resources.files("dohyo.lab.report").joinpath("templates", name).read_text(encoding="utf-8")
