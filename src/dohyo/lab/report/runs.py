"""A run's folder, as `dohyo train`, `dohyo reverse-kl` and `dohyo qpbo` leave it, finished or not."""

from pathlib import Path
from typing import Any

import yaml

from dohyo.errors import DohyoError
from dohyo.lab.report.entries import CONFIG, RESULT, Entry, as_yaml, blaming, read_json, versions
from dohyo.lab.report.grids import NOTHING, Cell, Grid, duration, grid, number
from dohyo.lab.report.kinds import KINDS, Kind, Values, on_one_axis
from dohyo.lab.report.pictures import Figure, figure


def read_run(folder: Path) -> Entry:
    path = folder / CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise DohyoError(f"{path}: is damaged ({error}); put it back, or leave this folder out") from error
    kind = next((kind for kind in KINDS.values() if isinstance(config, dict) and kind.sign in config), None)
    if kind is None:
        raise DohyoError(f"{path}: is not the config of a run of dohyo {', '.join(KINDS)}; leave this folder out")
    result = read_json(folder / RESULT) if (folder / RESULT).is_file() else {}
    with blaming(f"{folder}: {CONFIG} or {RESULT} is not of this version of dohyo", "run it again"):
        return _entry(folder, kind(config, result))


def compare(entries: list[Entry]) -> list[Grid]:
    """One table of all runs for each command. Those of the same data, target or problem are drawn on one axis."""
    tables = []
    for command, kind in KINDS.items():
        runs = [entry for entry in entries if entry.kind == command]
        if not runs:
            continue
        known = [
            name for name in runs[0].compared if any(not _nothing(run.compared[name]) for run in runs) or name == kind.measure
        ]
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


def _entry(folder: Path, kind: Kind) -> Entry:
    config, result = kind.config, kind.result
    name = folder.resolve().name
    compared = kind.compared()
    seconds = duration(result.get("seconds"))
    replicas = result.get("replicas", [])
    more: list[tuple[str, list[Grid], list[Figure]]] = []
    for i, part in enumerate(_parts(folder, config)[1:]):
        figures = _pictures(part, type(kind)(config, replicas[i] if replicas else {}))
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
        notices=list(result.get("warnings", [])) if result else [_unfinished(folder, kind)],
        headline=kind.headline() if result else [],
        tables=kind.tables(),
        figures=_pictures(folder, kind),
        facts=[
            ("Command", f"dohyo {kind.command}"),
            ("Seeds", ", ".join(str(one["seed"]) for one in replicas or [config])),
            *[(word.capitalize(), number(result[word])) for word in ("epochs", "steps") if word in result],
            ("Time", seconds.text),
            ("Versions", versions(result.get("versions")) or NOTHING),
            ("Folder", str(folder)),
        ],
        config=as_yaml(config),
        more=[*more, *([("Every number", [grid("", ["name", "value"], numbers)], [])] if numbers else [])],
        compared={**compared, "time": seconds},
    )


def _state(kind: Kind) -> str:
    """A run may have ended by itself, or may have been extended after this result; which, only its checkpoint knows."""
    done, total = kind.result.get(kind.length), kind.config[kind.length]
    if done is None:
        return "not finished"
    return "finished" if done >= total else f"{number(done)} of {total} {kind.length}"


def _parts(folder: Path, config: Values) -> list[Path]:
    """The folder, and those of its replicas."""
    replicas = config.get("replicas", 1)
    return [folder, *(folder / f"replica_{i}" for i in range(replicas if replicas > 1 else 0))]


def _unfinished(folder: Path, kind: Kind) -> str:
    from dohyo.lab.training.log import read_records  # it brings all of training with it

    parts = _parts(folder, kind.config)
    records = [records[-1] for records in map(read_records, parts) if records]
    done, total = sum(record[kind.length.removesuffix("s")] for record in records), kind.config[kind.length]
    total *= max(1, len(parts) - 1)
    return f"Not finished: {done} of {total} {kind.length} are done. dohyo {kind.command} --resume {folder} goes on."


def _pictures(folder: Path, kind: Kind) -> list[Figure]:
    alts = kind.alts()
    order = list(alts)
    found = []
    for file in sorted(folder.glob("*.png"), key=lambda file: (order.index(file.stem) if file.stem in order else 99, file.name)):
        title = file.stem.replace("_", " ").capitalize()
        found.append(figure(file, title, alts.get(file.stem, f"{title}: a picture in the run's folder")))
    return found
