"""What the commands that train share: a new run or a resumed one, progress, Ctrl-C, the result."""

import dataclasses
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from dohyo.errors import DohyoError, reporting
from dohyo.lab.cli.screen import count, progress_bar, say
from dohyo.lab.experiments.run import Run
from dohyo.lab.folder import CHECKPOINT, RESULT, Values
from dohyo.lab.parsing import Parser
from dohyo.lab.training.config import StepConfig, resumable_fields
from dohyo.lab.training.processes import launch, leave, on_first
from dohyo.lab.training.state import load_checkpoint

_OWN = ("out", "resume", "json", "config", "explicit", "interrupted")  # what is not in a run's config
_DAMAGED = "{}: is damaged, or of another version ({{}}); remove it, and --resume writes it again"


class RunParser(Parser):
    """--print_config also prints what other options say, such as the recipe."""

    config_type: type[StepConfig]

    def dump(self, cfg: Namespace, **options: Any) -> str:
        whole, implied = cfg.clone(), self.config_type.implied(vars(cfg)).items()
        vars(whole).update((name, value) for name, value in implied if cfg[name] is None)
        return str(super().dump(whole, **options))

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Without what the file has only from others of its values, such as its recipe: they may be changed."""
        values = super().parse_path(cfg_path, *args, **kwargs)
        for name, value in self.config_type.implied(vars(values)).items():
            if values.get(name) == value:
                del values[name]
        return values


def run_parser(run_type: type[Run[Any]], description: str, examples: str) -> Parser:
    """The options of a config, and those of every command that trains."""
    parser = RunParser(description=description, epilog=examples)
    parser.config_type = run_type.config_type
    parser.add_class_arguments(run_type.config_type)
    parser.add_argument("--out", type=Path, help="a new folder for the run (required unless --resume)")
    text = f"a run's folder, to continue it; of its options only {_resumable(run_type.config_type)} may change"
    parser.add_argument("--resume", type=Path, help=text)
    parser.add_json()
    parser.add_config()
    return parser


def run_command(
    run_type: type[Run[Any]], config: Namespace, note: Callable[[Values], str], summary: Callable[[Values], list[str]]
) -> int:
    """Start or resume a run, and print its result: `note` is a record in a few words, for the progress bar, and `summary` the
    lines to print for a result, to the first of which the folder is added."""
    if (config.out is None) == (config.resume is None):
        raise DohyoError("give --out FOLDER for a new run, or --resume FOLDER to continue one")
    made = {key: value for key, value in config.items() if key not in _OWN}
    explicit = {key: value for key, value in config.explicit.items() if key not in _OWN}

    def opened() -> Run[Any]:
        new = config.resume is None
        return run_type(config.out, run_type.config_type(**made)) if new else _resumed(run_type, config.resume, explicit)

    run = opened()
    fabric = launch(run.config.device)
    quiet = config.json or not fabric.is_global_zero
    if config.resume is None:
        on_first(fabric, run.check_new)
        run.check(fabric)  # everything that can be wrong, before the first file
    try:
        with run.beginning(fabric) if config.resume is None else run.writing(fabric):
            if config.resume is not None:
                run = opened()  # another process may have continued it since
            result = kept = run.result if run.finished else None
            if result is None:
                with _peers(run.folder):
                    result = _train(run, fabric, quiet, config.interrupted, note)
            elif not quiet:
                with reporting(_DAMAGED.format(run.folder / RESULT)):
                    text = _finished(run, result)
                say(text)
    except KeyboardInterrupt:
        text = f"interrupted; continue with: dohyo {run.command} --resume {run.folder}"
        raise KeyboardInterrupt(text if fabric.is_global_zero else "") from None  # said once
    leave(fabric)
    if fabric.is_global_zero and config.json:
        print(json.dumps(result))
    elif fabric.is_global_zero:
        with nullcontext() if kept is None else reporting(_DAMAGED.format(run.folder / RESULT)):
            first, *others = summary(result)
        for line in (f"{first}; everything is in {run.folder}", *others):
            say(line)
    return 0


def _finished(run: Run[Any], result: Values) -> str:
    """What to say of a run that has its result, and how it goes on."""
    done, unit, limit = result[run.length], run.config.unit, run.config.max_seconds or math.inf
    late = any(one["seconds"] >= limit for one in result.get("replicas") or [result])
    longer = f"--{run.length}" if done >= run.config.length else "--max-seconds" if late else ""
    reason = f"{longer} N extends it" if longer else "it ended by itself"
    return f"{run.folder}: already finished after {count(done)} {unit}{'s' * (done != 1)}; {reason}"


def _resumable(config_type: Any) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in resumable_fields(config_type))


def _resumed(run_type: type[Run[Any]], folder: Path, explicit: dict[str, Any]) -> Run[Any]:
    run = run_type.open(folder)
    free = resumable_fields(run.config)
    for key, value in explicit.items():
        if key not in free and value != getattr(run.config, key):
            name, own = key.replace("_", "-"), getattr(run.config, key)
            raise DohyoError(f"--{name} {value} differs from the run's {own}; a resumed run keeps its config "
                             f"(only {_resumable(run.config)} may change): start a new one with --out")  # fmt: skip
    run.config = dataclasses.replace(run.config, **{key: explicit[key] for key in free if key in explicit})
    return run


@contextmanager
def _peers(folder: Path) -> Iterator[None]:
    """Say so where torch's communication raises an error because another process is gone."""
    try:
        yield
    except RuntimeError as error:
        frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
        if not str(frame.f_globals.get("__name__")).startswith("torch.distributed"):
            raise
        raise DohyoError(f"another process of the job failed ({str(error).splitlines()[0]}); the checkpoint is kept: start "
                         f"as many again with --resume {folder}") from error  # fmt: skip


def _reached(completed: float, total: int, spent: float, seconds: float | None) -> float:
    """How far the bar is, which knows of the end by the clock.

    Example:
        >>> _reached(10, 100, spent=30, seconds=None), _reached(10, 100, spent=30, seconds=60), _reached(90, 100, 30, 60)
        (10, 50.0, 90)
        >>> _reached(10, 100, spent=99, seconds=60)
        100
    """
    return min(max(completed, spent / (seconds or math.inf) * total), total)


def _train(run: Any, fabric: Any, quiet: bool, interrupted: list[int], note: Callable[[Values], str]) -> Values:
    run.check(fabric)
    for line in () if quiet else run.notes:
        say(line)
    unit = run.config.unit
    with progress_bar("{task.fields[done]}/{task.total}", quiet) as progress:
        folders = [replica.folder for replica in getattr(run, "replicas", [])] or [run.folder]
        known = [load_checkpoint(folder)["numbers"] if (folder / CHECKPOINT).exists() else {} for folder in folders]
        done, total = [numbers.get(unit, 0) for numbers in known], run.config.length * len(folders)
        seconds = run.config.max_seconds if len(folders) == 1 else None
        begun = time.monotonic() - known[0].get("seconds", 0.0)
        training = progress.add_task(run.length, total=total, note="", done=0)
        testing = progress.add_task("test", total=None, note="", visible=False, done=0)
        said: set[str] = set()
        shown = 0.0  # when steps were last

        def show(completed: float, **more: Any) -> None:
            reached = _reached(completed, total, time.monotonic() - begun, seconds)
            progress.update(training, completed=reached, done=math.floor(completed), **more)

        show(sum(done))

        def on_epoch(record: Values) -> None:
            if interrupted:
                raise KeyboardInterrupt
            done[record.get("replica", 0)] = record[unit]
            show(sum(done), note=note(record))
            for line in () if quiet else {*record.get("notices", ())} - said:
                progress.console.print(f"warning: {line}", markup=False, highlight=False, soft_wrap=True)
                said.add(line)

        def on_test(done: int, total: int) -> None:
            progress.update(testing, completed=done, total=total, visible=True, done=done)

        def on_step(completed: float) -> None:
            nonlocal shown
            if time.monotonic() > shown + 0.2:
                show(completed)
                shown = time.monotonic()

        if len(folders) == 1:  # an epoch can take long
            run.parts[1].on_step = on_step
        result: Values = run.train(fabric, on_epoch, on_test)
        return result
