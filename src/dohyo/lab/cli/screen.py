"""What the commands share: the screen, progress, and estimators by name."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import dohyo
from dohyo.errors import DohyoError
from dohyo.estimators import ESTIMATORS
from dohyo.files import read_whole
from dohyo.lab.folder import beyond_verdict, load_yaml
from dohyo.names import named


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        raise  # the error being handled: `main` ends with the status that shells expect


def console() -> Console:
    """The screen; as wide as tables need where it is not a terminal."""
    return _Screen(width=None if sys.stdout.isatty() else 120)


def say(text: str) -> None:
    console().print(text, markup=False, highlight=False, soft_wrap=True)


def answer(report: dict[str, Any], in_json: bool, show: Callable[[], None]) -> None:
    """Print a report as one JSON object, or let `show` print it in words."""
    if in_json:
        print(json.dumps(report))
    else:
        show()


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str], lines: bool = False
) -> None:
    """Print a table; columns other than those named in `words` hold numbers."""
    table = Table(title=Text(title), show_lines=lines)
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)


def show_evaluation(report: dict[str, Any], of: str = "") -> None:
    """Print what `Evaluation.to_dict` holds beyond the numbers of the table; `of` comes before each line."""
    if report["robust_interval"] is not None:
        low, high = report["robust_interval"]
        say(f"{of}median of means of log p(x): {report['robust_mean']:.3f} in [{low:.3f}, {high:.3f}]")
    for line in verdict_lines(report):
        say(of + line)


def verdict_lines(result: dict[str, Any]) -> list[str]:
    """Whether the error bar of a result or an evaluation can be trusted, and the warnings that are not about that."""
    verdict = result.get("verdict")
    return [*([f"verdict: {verdict['reason']}"] if verdict else []), *(f"warning: {line}" for line in beyond_verdict(result))]


def interval(report: dict[str, Any]) -> str:
    low, high = report["interval"]
    return "unknown" if low is None else f"{low:.3f} to {high:.3f}"


def number(value: float | None, digits: int = 3) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def measured(value: float, stderr: float | None) -> str:
    """A value and its standard error, with as many decimals as the error's first three digits, and at least three.

    Example:
        >>> measured(-1.270583, 0.012472), measured(-90.1234, None), measured(2.5, -1.0)
        ('-1.2706 ± 0.0125', '-90.123 ± ?', '2.500 ± -1.000')
    """
    digits = max(3, 2 - math.floor(math.log10(stderr))) if stderr and stderr > 0 else 3  # one of a damaged file may be below 0
    return f"{value:.{digits}f} ± {number(stderr, digits)}"


def count(value: float) -> str:
    """A whole number as it is; a mean of whole numbers with one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def of_replicas(result: dict[str, Any]) -> str:
    """How a line about a result begins: with nothing if there is one run."""
    return f"mean of {len(result['replicas'])} replicas: " if result.get("replicas") else ""


def each_replica(result: dict[str, Any], key: str) -> list[str]:
    """The line about one number of each replica; none if there is one run."""
    if not result.get("replicas") or f"{key}_spread" not in result:
        return []
    each = ", ".join(number(replica[key]) for replica in result["replicas"])
    return [f"each: {each}; their standard deviation is {number(result[f'{key}_spread'])}"]


def progress_bar(completed: str, quiet: bool) -> Progress:
    """A progress bar with a note behind it; `completed` says how far it is, such as "{task.completed}/{task.total}"."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(completed), TimeElapsedColumn(), TextColumn("left"),
               TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False))  # fmt: skip
    return Progress(*columns, console=console(), disable=quiet)


@contextlib.contextmanager
def passing_bar(name: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears when it is first called, with what is done and the total, and goes when its work has ended."""
    with Progress(console=console(), disable=quiet, transient=True) as progress:
        task = progress.add_task(name, total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


def estimator_from(name: str, cost: float, max_terms: int | None = None) -> dohyo.Estimator:
    """An estimator from its name and a cost, or from a file that `to_dict` was written to."""
    if not name.endswith((".json", ".yaml", ".yml")):
        return named(ESTIMATORS, name, "estimator").at_cost(cost, max_terms)
    try:
        return dohyo.from_dict(load_yaml(read_whole(Path(name)).decode()))
    except (yaml.YAMLError, ValueError, TypeError) as error:  # TypeError: such as a text for m
        raise DohyoError(f"{name}: {error}") from error
