"""`dohyo reproduce`: the paper's tables and figures, one study each."""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from jsonargparse import Namespace

from dohyo.errors import DohyoError
from dohyo.lab.cli.screen import interruptible, progress_bar, say, show_table
from dohyo.lab.folder import VERDICTS
from dohyo.lab.parsing import Parser
from dohyo.lab.studies import STUDIES, reproduce
from dohyo.lab.studies.study import picked
from dohyo.lab.training.processes import launch
from dohyo.names import named

_EXAMPLES = """examples:
  dohyo reproduce convergence --scale smoke --out out/convergence
  dohyo reproduce estimates --scale small --out out/estimates
  dohyo reproduce table1 --scale paper --data mnist --cost 5 --estimator sumo --out out/table1    # one cell, resumable
  dohyo reproduce convergence --help                                 # what a study asks, and its options

After a kill or Ctrl-C the same command continues; at most the cell in progress is lost.
"""


def parser(arguments: Sequence[str]) -> Parser:
    """The options of the study that the arguments name."""
    meant = [argument for argument in arguments if argument in STUDIES] or [a for a in arguments[:1] if not a.startswith("-")]
    if not meant:
        names = "\n".join(f"  {name:14s}{study.title}" for name, study in STUDIES.items())
        made = Parser(description=f"Reproduce a table or a figure of the paper. The studies are\n\n{names}", epilog=_EXAMPLES)
        made.add_argument("study", nargs="?", help=", ".join(STUDIES))
        return made
    study = named(STUDIES, meant[0], "study")
    defaults = "The defaults of the study's own numbers are those of --scale paper."
    made = Parser(description=f"{study.title}.\n\n{fill(study.question, 110)}\n\n{defaults}", epilog=_EXAMPLES)
    made.add_argument("study", help=study.name)
    made.add_argument("--scale", default="small", help="smoke (seconds), small (minutes) or paper (the full size)")
    made.add_argument("--out", type=Path, help="the study's folder, a new one or one to continue (required)")
    for key in study.picks:
        made.add_argument(f"--{key}", nargs="+", type=str, help=f"do only the cells with this {key}, or one of these")
    made.add_json()
    made.add_class_arguments(type(study.SCALES["paper"]))
    return made


def run(options: Namespace) -> int:
    if options.get("out") is None:
        raise DohyoError(f"give a study ({', '.join(STUDIES)}) and --out FOLDER, a new one or one to continue")
    study_type = STUDIES[options.study]
    own = ("study", "scale", "out", "json", *study_type.picks)
    study = study_type.at(options.scale, **{key: value for key, value in options.explicit.items() if key not in own})
    picks = {key: options[key] for key in study_type.picks if options[key]}
    only = picked(study, picks) if picks else None
    launch(study.config.device)  # so that a missing device is reported before anything begins
    interrupted: list[int] = []
    try:
        with interruptible() as interrupted:
            report = _with_progress(study, options, only, interrupted)
    except KeyboardInterrupt:
        print(f"dohyo: interrupted; the same command continues with {options.out}", file=sys.stderr)
        return 128 + (interrupted or [signal.SIGINT])[0]
    if options.json:
        print(json.dumps(report))
        return 0
    columns = ["claim", "the paper", "found", "verdict"]
    rows = [[one["claim"], one["paper"], one["found"], VERDICTS[one["holds"]]] for one in report["conclusions"]]
    title = f"{report['title']}: {report['cells_done']} of {report['cells_total']} cells"
    show_table(title, columns, rows, words=columns, lines=True)
    say(f"everything is in {options.out}")
    return 0


def _with_progress(study: Any, options: Namespace, only: list[str] | None, interrupted: list[int]) -> dict[str, Any]:
    with progress_bar("{task.completed:.1f}/{task.total} cells", options.json) as progress:
        task = progress.add_task(study.name, total=None, note="")

        def on_progress(name: str, done: float, total: int) -> None:
            if interrupted:
                raise KeyboardInterrupt
            progress.update(task, completed=done, total=total, note=name)

        return reproduce(study, options.out, on_progress, only)
