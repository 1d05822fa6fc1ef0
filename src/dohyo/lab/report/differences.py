"""Paired differences of log p(x) between the runs of a page that were evaluated on the same data."""

import re
from collections.abc import Sequence
from pathlib import Path

import dohyo
from dohyo.lab.evaluations import Saved, is_current, load_evaluation
from dohyo.lab.folder import TEST_VALUES, VALUES
from dohyo.lab.report.entries import Entry
from dohyo.lab.report.grids import Cell, Grid, grid, with_error

_NOTE = (
    "Each against the best, datum by datum, so that the variation between data cancels. The intervals hold with 95% confidence."
)


def differences(entries: Sequence[Entry]) -> list[Grid]:
    """A table for each set of data that two runs or more were evaluated on, by `dohyo evaluate` or else by their tests."""
    tables: list[Grid] = []
    shown: set[str] = set()
    for file in (VALUES, TEST_VALUES):
        groups: dict[tuple[int, int, str], list[tuple[Entry, Saved]]] = {}
        for entry in entries:
            if entry.kind == "train" and entry.folder not in shown and is_current(path := Path(entry.folder) / file):
                found = load_evaluation(path, entry.name)
                key = (found.evaluation.fingerprint, len(found.evaluation.per_datum), found.evaluation.kind)
                groups.setdefault(key, []).append((entry, found))
        for members in groups.values():
            finite = [(entry, found) for entry, found in members if bool(found.evaluation.per_datum.isfinite().all())]
            if len(finite) > 1 and len(finite[0][1].evaluation.per_datum) > 1:
                tables.append(_table(finite))
                shown.update(entry.folder for entry, _ in finite)
    return tables


def _table(members: list[tuple[Entry, Saved]]) -> Grid:
    members = sorted(members, key=lambda member: -member[1].evaluation.mean)
    (_, best), rows, warnings = members[0], [], []
    for entry, found in members:
        mean = with_error(found.evaluation.mean, found.evaluation.stderr)
        row = [Cell(entry.name, entry.name, link=entry.folder), found.estimator.name, Cell(mean, found.evaluation.mean)]
        if found is best:
            rows.append([*row, None, None, "the best"])
            continue
        compared = dohyo.compare(found.evaluation, best.evaluation, names=(found.name, best.name))
        warnings += list(compared.warnings)
        low, high = compared.interval
        difference = Cell(with_error(compared.difference, compared.stderr), compared.difference)
        rows.append([*row, difference, Cell(f"{low:.3f} to {high:.3f}", low), "worse" if high < 0 else "cannot tell"])
    columns = ["run", "estimator", "log p(x), nats", "minus the best", "95% interval", "verdict"]
    title = f"Differences of log p(x) on the same {len(best.evaluation.per_datum)} data"
    sentences = [f"{re.sub('^both', 'Both', line)}." for line in dict.fromkeys(warnings)]
    return grid(title, columns, rows, " ".join([_NOTE, *sentences]))
