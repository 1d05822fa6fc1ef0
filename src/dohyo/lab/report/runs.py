"""A run's folder, as `dohyo train`, `dohyo reverse-kl` and `dohyo qpbo` leave it, finished or not."""

from pathlib import Path
from typing import Any

from dohyo.errors import DohyoError
from dohyo.lab.folder import CONFIG, Values, read_config, read_records, read_result
from dohyo.lab.report.beside import notices, read_beside
from dohyo.lab.report.entries import Entry, as_yaml, versions
from dohyo.lab.report.grids import NOTHING, Cell, Grid, duration, grid, number
from dohyo.lab.report.kinds import KINDS, Kind, on_one_axis
from dohyo.lab.report.pictures import Figure, figure


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
        groups: dict[tuple[str, str], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((str(row[1]), str(row[2])), []).append(i)
        for members in groups.values():
            placed = on_one_axis([rows[i] for i in members], columns.index(kind.measure))
            for i, row in zip(members, placed, strict=True):
                rows[i] = row
        tables.append(grid(f"dohyo {command}", columns, rows))
    return tables


def _nothing(value: Any) -> bool:
    return (value.key if isinstance(value, Cell) else value) is None


def _entry(kind: Kind) -> Entry:
    folder, config, result, replicas = kind.folder, kind.config, kind.result, kind.replicas()
    name = folder.resolve().name
    compared = kind.compared()
    seconds, beside = duration(result.get("seconds")), read_beside(folder, result)
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
        notices=[*notices(result), *beside.notices] if result else [_unfinished(kind)],
        headline=[*kind.headline(), *beside.headline] if result else [],
        tables=kind.tables(),
        figures=_pictures(kind),
        facts=[
            ("Command", f"dohyo {kind.command}"),
            ("Seeds", ", ".join(str(one.result.get("seed", config["seed"])) for one in replicas or [kind])),
            *[(word.capitalize(), number(result[word])) for word in ("epochs", "steps") if word in result],
            ("Time", seconds.text),
            ("Versions", versions(result.get("versions")) or NOTHING),
            *([("Verdict", reason)] if (reason := _reason(result)) else []),
            ("Folder", str(folder)),
        ],
        config=as_yaml(config),
        more=[*more, *([("Every number", [grid("", ["name", "value"], numbers)], [])] if numbers else [])],
        compared={**compared, "time": seconds},
    )


def _reason(result: Values) -> str:
    return str((result.get("verdict") or {}).get("reason") or "")


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
