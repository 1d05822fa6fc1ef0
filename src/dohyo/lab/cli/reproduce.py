"""`dohyo reproduce`: the paper's tables and figures, one study each."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from jsonargparse import Namespace

from dohyo.errors import DohyoError
from dohyo.lab.cli.parsing import Parser, console
from dohyo.lab.cli.runs import interruptible, say

_EXAMPLES = """examples:
  dohyo reproduce convergence --scale smoke --out out/convergence
  dohyo reproduce estimates --scale small --out out/estimates
  dohyo reproduce table1 --scale paper --data mnist --cost 5 --estimator sumo --out out/table1    # one cell, resumable
  dohyo reproduce convergence --help                                 # what a study asks, and its options

The same command goes on with a folder where it was killed or stopped, and loses the cell in progress at most.
"""
_VERDICTS = {True: "yes", False: "NO", None: "cannot tell"}


def reproduce_parser(arguments: Sequence[str]) -> Parser:
    """The options of the study that the arguments name."""
    from dohyo.lab.studies import STUDIES
    from dohyo.names import named

    meant = [argument for argument in arguments if argument in STUDIES] or [a for a in arguments[:1] if not a.startswith("-")]
    if not meant:
        names = "\n".join(f"  {name:14s}{study.title}" for name, study in STUDIES.items())
        parser = Parser(description=f"Reproduce a table or a figure of the paper. The studies are\n\n{names}", epilog=_EXAMPLES)
        parser.add_argument("study", nargs="?", help=", ".join(STUDIES))
        return parser
    study = named(STUDIES, meant[0], "study")
    about = (
        f"{study.title}.\n\n{fill(study.question, 110)}\n\nThe defaults of the study's own numbers are those of --scale paper."
    )
    parser = Parser(description=about, epilog=_EXAMPLES)
    parser.add_argument("study", help=study.name)
    parser.add_argument("--scale", default="small", help="smoke (seconds), small (minutes) or paper (the full size)")
    parser.add_argument("--out", type=Path, help="the study's folder, a new one or one to go on with (required)")
    for key in study.picks:
        parser.add_argument(f"--{key}", nargs="+", type=str, help=f"do only the cells with this {key}, or one of these")
    parser.add_json()
    parser.add_class_arguments(type(study.SCALES["paper"]))
    return parser


def reproduce(options: Namespace) -> int:
    from dohyo.lab.studies import STUDIES
    from dohyo.lab.studies.study import picked
    from dohyo.lab.training.processes import launch

    if options.get("out") is None:
        raise DohyoError(f"give a study ({', '.join(STUDIES)}) and --out FOLDER, a new one or one to go on with")
    study_type = STUDIES[options.study]
    own = ("study", "scale", "out", "json", *study_type.picks)
    study = study_type.at(options.scale, **{key: value for key, value in options.explicit.items() if key not in own})
    picks = {key: options[key] for key in study_type.picks if options[key]}
    only = picked(study, picks) if picks else None
    launch(study.config.device)  # a wrong one is said before anything is begun
    try:
        with interruptible() as interrupted:
            report = _with_progress(study, options, only, interrupted)
    except KeyboardInterrupt:
        print(f"dohyo: interrupted; the same command goes on with {options.out}", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(report))
    else:
        _show(report, options.out)
    return 0


def _with_progress(study: Any, options: Namespace, only: list[str] | None, interrupted: list[int]) -> dict[str, Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dohyo.lab.studies.study import reproduce as run

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.1f}/{task.total} cells"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=console(), disable=options.json) as progress:
        task = progress.add_task(study.name, total=None, note="")

        def on_progress(name: str, done: float, total: int) -> None:
            if interrupted:
                raise KeyboardInterrupt
            progress.update(task, completed=done, total=total, note=name)

        return run(study, options.out, on_progress, only)


def _show(report: dict[str, Any], folder: Path) -> None:
    from rich.table import Table

    table = Table(title=f"{report['title']}: {report['cells_done']} of {report['cells_total']} cells", show_lines=True)
    for heading in ("claim", "the paper", "found", "holds"):
        table.add_column(heading)
    for each in report["conclusions"]:
        table.add_row(each["claim"], each["paper"], each["found"], _VERDICTS[each["holds"]])
    console().print(table, markup=False)
    say(False, f"everything is in {folder}")
