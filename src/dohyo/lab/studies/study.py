"""What a study of the paper is, and how one is reproduced: cells of work, what they show, and pictures."""

import dataclasses
import json
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from matplotlib.figure import Figure

from dohyo.errors import DohyoError, check_seed, reporting
from dohyo.files import plain, remove_leftovers
from dohyo.lab.experiments.run import Run
from dohyo.lab.folder import CELLS, LOCK, SCHEMA_VERSION, STUDY, WORK, Conclusion, Picture, Table, as_values, versions, write_json
from dohyo.lab.plots.picture import write_picture
from dohyo.lab.studies.kept import done_cells, read_cell, read_study, restore_cells
from dohyo.lab.training.config import Device, Options, option
from dohyo.lab.training.processes import Busy, locked
from dohyo.names import check_choices, named

_PLOT_EVERY = 60.0  # seconds, while cells are being done
_MOST = 10_000  # trials, replicas and runs: cells, or parts of one
LOOK_EVERY = 0.5  # seconds, while other processes do the cells that are left

Cell = dict[str, Any]
Row = list[str | float | None]  # of a table
Advance = Callable[[float], None]
OnProgress = Callable[[str, float, int], None]


@dataclass(frozen=True)
class StudyConfig(Options):
    """The options of every study."""

    seed: int = option(0, "The seed of everything.")
    device: Device = option("auto", "Where to compute.")

    def __post_init__(self) -> None:
        check_choices(self)
        check_seed("seed", self.seed)
        for name in ("trials", "replicas", "runs"):
            if getattr(self, name, 0) > _MOST:
                raise DohyoError(f"{name} is {getattr(self, name)}; it must be at most {_MOST}")

    def _at_least(self, **least: int) -> None:
        """A DohyoError that names the first number that is too small."""
        for name, value in least.items():
            if getattr(self, name) < value:
                raise DohyoError(f"{name} is {getattr(self, name)}; it must be at least {value}")


C = TypeVar("C", bound=StudyConfig)


class Study(ABC, Generic[C]):
    """A table or figure of the paper, in independent cells.

    Attributes:
        name: What `dohyo reproduce` calls it.
        title: A headline.
        question: What is asked, in two or three plain sentences.
        SCALES: The config at each scale: smoke for tests, small for minutes, paper for the full size.
        picks: Keys of the cells' options by which the command line may pick cells; none may be a key of the config.
        lengths: Those that say how long a cell trains: where more is wanted than a cell was made with, it is gone on with.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    SCALES: ClassVar[Mapping[str, Any]]
    picks: ClassVar[tuple[str, ...]] = ()
    lengths: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: C, scale: str = "small") -> None:
        self.config, self.scale = config, scale

    @classmethod
    def at(cls, scale: str, **changes: Any) -> Self:
        """The study at a scale, with some numbers of its config changed."""
        return cls(dataclasses.replace(named(cls.SCALES, scale, "scale"), **changes), scale)

    @property
    def seeds(self) -> list[int]:
        """Every seed that the cells use: a cell's own, and the following ones for its replicas."""
        firsts = {(options.get("seed", self.config.seed), options.get("replicas", 1)) for options in self.cells().values()}
        return sorted({seed for first, count in firsts for seed in range(first, first + count)})

    @abstractmethod
    def cells(self) -> dict[str, Cell]:
        """The options of each cell by its name, in order: all that its result depends on. Names become file names."""

    def run_of(self, name: str, options: Cell, folder: Path) -> Run[Any] | None:
        """The run that a cell trains in its folder, if it trains one: its config is checked before any cell is begun."""
        return None

    @abstractmethod
    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        """Do one cell, and return its result as JSON can hold it.

        Args:
            folder: For a run that can be resumed; it does not exist unless the cell makes it. Other cells' folders lie beside it.
            advance: To be called with the share that is done, 0 to 1.
        """

    @abstractmethod
    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        """What the results of the finished cells show; there may be few of them."""

    @abstractmethod
    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        """Plot what the results of the finished cells allow."""


def reproduce(
    study: Study[Any], folder: Path, on_progress: OnProgress = lambda name, done, total: None, only: Iterable[str] | None = None
) -> dict[str, Any]:
    """Do the cells that are not done yet, and write study.json after each; returns what it holds.

    If it is killed, at most the cell in progress is lost, and that one continues from what it keeps in its own folder. Several
    processes may share a study, also on several machines: each cell is done by one of them, and all wait for the last.

    Args:
        on_progress: Called with the name of a cell, how many cells are done, and how many there are to do.
        only: The names of the cells to do, by default all. study.json describes all that are done.
    """
    work = Reproduction(study, folder, only)
    busy, todo = 0, deque(work.wanted)
    while todo:
        name = todo.popleft()

        def advance(share: float, number: int = len(work.wanted) - len(todo) - 1, name: str = name) -> None:
            on_progress(name, number + share, len(work.wanted))

        if name not in work.done and not do_cell(study, name, folder, advance):
            todo.append(name)  # another process is doing it
            busy += 1
            time.sleep(LOOK_EVERY if busy >= len(todo) else 0)
            advance(0.0)
            continue
        busy = 0
        advance(1.0)
        if not todo or name not in work.done:
            work.write(last=not todo)
    return work.report


class Reproduction:
    """What is to be done for a study in its folder; errors of the folder and of configs are raised before anything is written.

    Attributes:
        wanted: The names of the cells to do.
        done: Those cells of the study that were done before.
        report: What study.json holds.
    """

    def __init__(self, study: Study[Any], folder: Path, only: Iterable[str] | None = None) -> None:
        self.study, self.folder, self.cells = study, folder, _plain_cells(study)
        self.wanted = list(self.cells) if only is None else list(only)
        self.done = done_cells(folder, study.name, self.cells, study.lengths)
        for seed in study.seeds:  # those of replicas, too
            check_seed("seed", seed)
        for name in self.wanted:
            study.run_of(name, self.cells[name], folder / WORK / name)
        self.report: dict[str, Any] = {}
        self.plotted = -math.inf
        with locked(folder / LOCK, wait=True):
            restore_cells(folder, study.name)
            if not (folder / STUDY).exists():  # says what the folder is
                self._write(plot=False)

    def write(self, last: bool) -> None:
        """study.json from all cells that are done, and now and then the pictures."""
        plot = last or time.monotonic() - self.plotted > _PLOT_EVERY
        with locked(self.folder / LOCK, wait=True):
            self._write(plot)
        self.plotted = time.monotonic() if plot else self.plotted

    def _write(self, plot: bool) -> None:
        """From the files in the folder, so that several processes may do cells of one study at a time."""
        study, folder = self.study, self.folder
        remove_leftovers(folder)
        done = done_cells(folder, study.name, self.cells, study.lengths)
        results = {name: cell["result"] for name, cell in done.items()}
        pictures = read_study(folder, study.name)["pictures"] if (folder / STUDY).exists() else []
        wrong = f"{folder / CELLS}: what some cells hold does not fit the study ({{}}); remove those that dohyo did not write"
        with reporting(wrong) if self.done else nullcontext():
            conclusions, tables = study.summarise(results) if results else ([], [])
            if plot:
                pictures = [dataclasses.asdict(picture) for picture in study.plot(results, folder)]
        self.report = plain({
            "schema_version": SCHEMA_VERSION,
            "study": study.name,
            "title": study.title,
            "question": study.question,
            "scale": study.scale,
            "config": as_values(study.config),
            "seeds": study.seeds,
            "versions": versions(),
            "seconds": sum(cell["seconds"] for cell in done.values()),
            "cells_done": len(done),
            "cells_total": len(self.cells),
            "cells": done,
            "conclusions": [dataclasses.asdict(conclusion) for conclusion in conclusions],
            "tables": [dataclasses.asdict(table) for table in tables],
            "pictures": pictures,
        })  # fmt: skip
        write_json(folder / STUDY, self.report)


def do_cell(study: Study[Any], name: str, folder: Path, advance: Advance) -> bool:
    """Do a cell unless another process has done it; False if one is doing it."""
    path, options = folder / CELLS / f"{name}.json", _plain_cells(study)[name]
    try:
        with locked(path.with_name(f".{name}.lock")):
            remove_leftovers(path.parent, path.name)
            if name not in done_cells(folder, study.name, {name: options}, study.lengths):
                before = read_cell(path)["seconds"] if path.exists() else 0.0  # of a shorter training, which goes on
                begun = time.monotonic()
                result = study.run_cell(name, options, folder / WORK / name, advance)
                write_json(path, {"options": options, "result": result, "seconds": before + time.monotonic() - begun})
    except Busy:
        return False
    return True


def _plain_cells(study: Study[Any]) -> dict[str, Cell]:
    """The options as they are read from a file again."""
    return {name: json.loads(json.dumps(plain(options))) for name, options in study.cells().items()}


def picked(study: Study[Any], wanted: Mapping[str, Iterable[str]]) -> list[str]:
    """The names of the cells whose options have one of the wanted values for every key."""
    cells = study.cells()
    for key, values in wanted.items():
        there = {_text(options[key]): None for options in cells.values() if key in options}
        for value in values:
            named(there, _text(value), key)
    texts = {key: {_text(value) for value in values} for key, values in wanted.items()}
    found = [n for n, options in cells.items() if all(key in options and _text(options[key]) in texts[key] for key in texts)]
    if not found:
        together = " and ".join(f"{key} {' or '.join(values)}" for key, values in wanted.items())
        raise DohyoError(f"no cell has {together}; leave one of these out")
    return found


def save_picture(figure: Figure, numbers: dict[str, Any], folder: Path, file: str, title: str, alt: str) -> Picture:
    """Write a figure as .png and .svg with its numbers beside them."""
    for suffix in (".svg", ".png"):
        write_picture(figure, numbers, (folder / file).with_suffix(suffix))
    return Picture(file, title, alt)


def _text(value: Any) -> str:
    """A value as people write it: 5 and 5.0 are the same."""
    try:
        return f"{float(value):g}"
    except ValueError:  # not a number
        return str(value)
