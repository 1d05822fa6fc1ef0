"""A run's folder, as `dohyo train`, `dohyo reverse-kl` and `dohyo qpbo` leave it, finished or not; and tables of several runs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dohyo
from dohyo.errors import DohyoError
from dohyo.lab.evaluations import Saved, is_current, load_evaluation, of_encoders
from dohyo.lab.folder import CONFIG, TEST_VALUES, VALUES, read_config, read_records, read_result
from dohyo.lab.report.entries import Entry, Figure, as_yaml, figure, notices, read_beside, versions
from dohyo.lab.report.grids import NOTHING, Cell, Grid, duration, grid, number, on_one_axis, with_error
from dohyo.lab.report.kinds import KINDS, Kind

_NOTE = (
    "Each against the best, datum by datum, so that the variation between data cancels. The intervals hold with 95% confidence."
)


def read_run(folder: Path) -> Entry:
    config = read_config(folder)
    kind = next((kind for kind in KINDS.values() if kind.sign in config), None)
    if kind is None:
        raise DohyoError(f"{folder / CONFIG}: is not the config of a run of dohyo {', '.join(KINDS)}; leave this folder out")
    return _entry(kind(folder, config, read_result(folder) or {}))


def compare(entries: list[Entry]) -> list[Grid]:
    """One table of all runs for each command. Those of the same data, target or problem share an axis."""
    tables = []
    for command, kind in KINDS.items():
        runs = [entry for entry in entries if entry.kind == command]
        if not runs:
            continue
        known = [n for n in runs[0].compared if n == kind.measure or any(not _nothing(run.compared[n]) for run in runs)]
        columns = ["run", *known]
        rows = [[Cell(run.name, run.name, link=run.folder), *(run.compared[name] for name in known)] for run in runs]
        at, groups = columns.index(kind.measure), dict[tuple[str, str], list[list[Any]]]()
        for row in rows:
            groups.setdefault((str(row[1]), str(row[2])), []).append(row)
        for members in groups.values():
            for row, cell in zip(members, on_one_axis([row[at] for row in members]), strict=True):
                row[at] = cell
        tables.append(grid(f"dohyo {command}", columns, rows))
    return tables


def _nothing(value: Any) -> bool:
    return (value.key if isinstance(value, Cell) else value) is None


def _entry(kind: Kind) -> Entry:
    folder, config, result, replicas = kind.folder, kind.config, kind.result, kind.replicas()
    name = folder.resolve().name
    compared = kind.compared()
    seconds, (beside, said) = duration(result.get("seconds")), read_beside(folder, result)
    more: list[tuple[str, list[Grid], list[Figure]]] = []
    for i, replica in enumerate(replicas):
        figures = _pictures(replica)
        more += [(f"Pictures of replica {i}", [], figures)] if figures else []
    numbers = [[key, str(value)] for key, value in result.items() if isinstance(value, str | int | float | None)]
    return Entry(
        kind=kind.command,
        name=name,
        folder=str(folder),
        title=name,
        question=kind.question(),
        outcome=f"{kind.measure} {compared[kind.measure].text}" if result else "no result yet",
        state=_state(kind),
        seconds=seconds,
        notices=[*notices(result), *said] if result else [_unfinished(kind)],
        headline=[*kind.headline(), *beside] if result else [],
        tables=kind.tables(),
        figures=_pictures(kind),
        facts=[
            ("Command", f"dohyo {kind.command}"),
            ("Seeds", ", ".join(str(one.result.get("seed", config["seed"])) for one in replicas or [kind])),
            *[(word.capitalize(), number(result[word])) for word in ("epochs", "steps") if word in result],
            ("Time", seconds.text),
            ("Versions", versions(result.get("versions")) or NOTHING),
            *([("Verdict", str(reason))] if (reason := (result.get("verdict") or {}).get("reason")) else []),
            ("Folder", str(folder)),
        ],
        config=as_yaml(config),
        more=[*more, *([("Every number", [grid("", ["name", "value"], numbers)], [])] if numbers else [])],
        compared={**compared, "time": seconds},
    )


def _state(kind: Kind) -> str:
    """A run may have ended by itself, or may have been extended after this result; only its checkpoint knows which."""
    done, total = kind.result.get(kind.length), kind.config[kind.length]
    if done is None:
        return "not finished"
    return "finished" if done >= total else f"{number(done)} of {total} {kind.length}"


def _unfinished(kind: Kind) -> str:
    runs = kind.replicas() or [kind]
    records = [records[-1] for run in runs if (records := read_records(run.folder))]
    done = sum(record.get(kind.length.removesuffix("s"), 0) for record in records)
    total = kind.config[kind.length] * len(runs)
    return f"Not finished: {done} of {total} {kind.length} are done. dohyo {kind.command} --resume {kind.folder} continues."


def _pictures(kind: Kind) -> list[Figure]:
    alts, found = kind.alts(), []
    places = {name: place for place, name in enumerate(alts)}
    for file in sorted(kind.folder.glob("*.png"), key=lambda file: (places.get(file.name, len(alts)), file.name)):
        title = file.stem.replace("_", " ").capitalize()
        found.append(figure(file, title, alts.get(file.name, f"{title}: a picture in the run's folder")))
    return found


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
        warnings += [*of_encoders([found, best]), *compared.warnings]
        low, high = compared.interval
        difference = Cell(with_error(compared.difference, compared.stderr), compared.difference)
        rows.append([*row, difference, Cell(f"{low:.3f} to {high:.3f}", low), "worse" if high < 0 else "cannot tell"])
    columns = ["run", "estimator", "log p(x), nats", "minus the best", "95% interval", "verdict"]
    title = f"Differences of log p(x) on the same {len(best.evaluation.per_datum)} data"
    sentences = [f"{re.sub('^both', 'Both', line)}." for line in dict.fromkeys(warnings)]
    return grid(title, columns, rows, " ".join([_NOTE, *sentences]))
