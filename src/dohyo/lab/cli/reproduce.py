"""`dohyo reproduce`: the paper's tables and figures, one study each."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

from jsonargparse import Namespace
from rich.progress import Progress

from dohyo.errors import DohyoError
from dohyo.lab.cli.screen import answer, progress_bar, say, show_table
from dohyo.lab.folder import VERDICTS
from dohyo.lab.parsing import Parser
from dohyo.lab.studies import STUDIES, reproduce
from dohyo.lab.studies.side_by_side import on_this_machine, reproduce_side_by_side
from dohyo.lab.studies.study import Reproduction, picked
from dohyo.lab.training.processes import launch
from dohyo.names import named

_EXAMPLES = """examples:
  dohyo reproduce convergence --scale smoke --out out/convergence
  dohyo reproduce estimates --scale small --out out/estimates
  dohyo reproduce table1 --scale paper --data mnist --cost 5 --estimator sumo --out out/table1    # one cell, resumable
  dohyo reproduce table1 --scale small --workers 4 --out out/table1                    # four cells at a time on this machine
  dohyo reproduce table1 --scale paper --scheduler tcp://node1:8786 --out out/table1   # on the machines of a Dask cluster
  dohyo reproduce convergence --help                                 # what a study asks, and its options

After a kill or Ctrl-C the same command continues; at most the cells in progress are lost, back to their last checkpoints.
"""
_NO_STUDY = f"give a study ({', '.join(STUDIES)}) and --out FOLDER, a new one or one to continue"


def parser(arguments: Sequence[str]) -> Parser:
    """The options of the study that the arguments name."""
    meant = [argument for argument in arguments if argument in STUDIES] or [a for a in arguments[:1] if not a.startswith("-")]
    if not meant:
        if arguments and not {"-h", "--help"} & set(arguments):
            raise DohyoError(_NO_STUDY)
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
    cells = [cell for config in [*study.SCALES.values()][::-1] for cell in study(config).cells().values()]
    for key in study.picks:
        known = dict.fromkeys(cell[key] for cell in cells if key in cell)
        text = f"do only the cells with this {key}, or with one of these ({', '.join(map(str, known))})"
        made.add_argument(f"--{key}", nargs="+", type=str, help=text)
    made.add_argument("--workers", type=int, help="do so many cells at a time, each in a process with its part of the cores")
    made.add_argument("--scheduler", type=str, help="do the cells on the Dask cluster at this address, such as tcp://node1:8786")
    made.add_json()
    made.add_class_arguments(type(study.SCALES["paper"]))
    for key in study.picks:
        made.list_no_choices(key)  # they are the study's own, not those of the other commands
    return made


def run(options: Namespace) -> int:
    if options.get("out") is None:
        raise DohyoError(_NO_STUDY)
    if options.workers is not None and options.scheduler is not None:
        raise DohyoError("give --workers for this machine or --scheduler for a Dask cluster, not both")
    study_type = STUDIES[options.study]
    own = ("study", "scale", "out", "workers", "scheduler", "json", *study_type.picks)
    study = study_type.at(options.scale, **{key: value for key, value in options.explicit.items() if key not in own})
    picks = {key: options[key] for key in study_type.picks if options[key]}
    only = picked(study, picks) if picks else None
    if options.scheduler is None:
        launch(study.config.device)  # so that a missing device is reported before anything begins
    several = options.workers is not None or options.scheduler is not None
    try:
        report, failed = (_side_by_side if several else _one_by_one)(study, options, only)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command continues with {options.out}") from None
    answer(report, options.json, lambda: _show(report, options.out))
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise DohyoError(f"{len(failed)} of {report['cells_total']} cells failed ({reasons}); the same command tries them again")
    return 0


def _show(report: dict[str, Any], folder: Path) -> None:
    columns = ["claim", "the paper", "found", "verdict"]
    rows = [[one["claim"], one["paper"], one["found"], VERDICTS[one["holds"]]] for one in report["conclusions"]]
    title = f"{report['title']}: {report['cells_done']} of {report['cells_total']} cells"
    show_table(title, columns, rows, words=columns, lines=True)
    say(f"everything is in {folder}")


def _one_by_one(study: Any, options: Namespace, only: list[str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    with progress_bar("{task.completed:.1f}/{task.total} cells", options.json) as progress:
        task = progress.add_task(study.name, total=None, note="", visible=False)  # until the folder is found right

        def on_progress(name: str, done: float, total: int) -> None:
            if options.interrupted:
                raise KeyboardInterrupt
            progress.update(task, completed=done, total=total, note=name, visible=True)

        return reproduce(study, options.out, on_progress, only), {}


def _side_by_side(study: Any, options: Namespace, only: list[str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The report, and why cells failed."""
    if options.scheduler is None:
        place = on_this_machine(study, options.out, options.workers)
    elif find_spec("distributed") is None:
        raise DohyoError("--scheduler needs distributed, which is not installed: pip install 'dohyo[cluster]'")
    else:
        from dohyo.lab.studies.cluster import on_cluster

        place = on_cluster(study, options.out, options.scheduler, lambda text: print(f"dohyo: {text}", file=sys.stderr))
    with place as submit, progress_bar("{task.fields[done]}", options.json) as progress:
        work = Reproduction(study, options.out, only)
        failed = reproduce_side_by_side(work, submit, _Bars(progress, work))
        return work.report, failed


class _Bars:
    """One bar for the study, and one for each cell in progress."""

    def __init__(self, progress: Progress, work: Reproduction) -> None:
        self.progress, self.total, self.bars = progress, len(work.wanted), dict[str, Any]()
        self.shares = {name: 1.0 for name in work.wanted if name in work.done}
        self.whole = progress.add_task(work.study.name, total=self.total, completed=len(self.shares), done="", note="")
        self._count()

    def advance(self, name: str, share: float) -> None:
        if name not in self.bars:
            self.bars[name] = self.progress.add_task(f"  {name}", total=1.0, done="", note="")
        self.progress.update(self.bars[name], completed=share, done=f"{share:.0%}")
        self._count(name, share)

    def end(self, name: str, problem: str | None) -> None:
        if problem is not None:
            print(f"dohyo: the cell {name} failed: {problem}; the others go on", file=sys.stderr)
        if name in self.bars:
            self.progress.remove_task(self.bars.pop(name))
        self._count(name, float(problem is None))

    def _count(self, *now: Any) -> None:
        self.shares |= [now] if now else []
        done = sum(self.shares.values())
        self.progress.update(self.whole, completed=done, done=f"{done:.1f}/{self.total} cells")
