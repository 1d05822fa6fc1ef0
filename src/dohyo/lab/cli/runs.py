"""What the commands that train share: a new run or a resumed one, progress, Ctrl-C, the result."""

import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from dohyo.errors import DohyoError
from dohyo.lab.cli.parsing import Parser, console

if TYPE_CHECKING:
    from dohyo.lab.experiments.run import Run


def run_parser(config_type: type, length: str, description: str, examples: str) -> Parser:
    """The options of a config, and those of every command that trains."""
    parser = Parser(description=description, epilog=examples)
    parser.add_class_arguments(config_type)
    parser.add_argument("--out", type=Path, help="a new folder for the run (required unless --resume)")
    parser.add_argument("--resume", type=Path, help=f"a run's folder, to go on where it stopped; --{length} N extends it")
    parser.add_json()
    parser.add_config()
    return parser


def run_command(
    run_type: "type[Run[Any]]",
    config: Namespace,
    note: Callable[[dict[str, Any]], str],
    summary: Callable[[dict[str, Any]], list[str]],
) -> int:
    """Start or resume a run, and print its result.

    Args:
        note: What to say of a record beside the progress bar.
        summary: The lines to print of a result; the folder is added to the first.
    """
    from dohyo.lab.training.processes import launch, leave

    own = ("out", "resume", "json", "config")
    options = {key: value for key, value in config.items() if key not in (*own, "explicit")}
    explicit = {key: value for key, value in config.explicit.items() if key not in own}
    if (config.out is None) == (config.resume is None):
        raise DohyoError("give --out FOLDER for a new run, or --resume FOLDER to go on with one")
    if config.resume is None:
        fabric = launch(config.device)
        run = _new_run(run_type, config.out, options, fabric)
    else:
        run = _resumed_run(run_type, config.resume, explicit)
        fabric = launch(explicit.get("device", run.config.device))
    quiet = config.json or not fabric.is_global_zero
    length = run.length
    result = run.result if run.finished else None
    if result is not None:
        early = result[length] < getattr(run.config, length)
        reason = "it ended by itself" if early else f"--{length} N extends it"
        say(quiet, f"{run.folder}: already finished after {count(result[length])} {length}; {reason}")
    else:
        if fabric.is_global_zero:
            run.write_config()  # its length may have changed
        try:
            with interruptible() as interrupted:
                result = _train_with_progress(run, fabric, quiet, interrupted, note)
        except RuntimeError as error:
            if fabric.world_size == 1:
                raise
            raise DohyoError(f"another process of the job failed ({str(error).splitlines()[0]}); the checkpoint is kept: start "
                             f"as many again with --resume {run.folder}") from error  # fmt: skip
        except KeyboardInterrupt:
            if fabric.is_global_zero:
                print(f"dohyo: interrupted; go on with: dohyo {run.command} --resume {run.folder}", file=sys.stderr)
            return 130
    leave(fabric)
    if fabric.is_global_zero:
        if config.json:
            print(json.dumps(result))
        else:
            first, *others = summary(result)
            say(False, f"{first}; everything is in {run.folder}")
            for line in others:
                say(False, line)
    return 0


def _new_run(run_type: "type[Run[Any]]", folder: Path, options: dict[str, Any], fabric: Any) -> "Run[Any]":
    from dohyo.lab.experiments.run import CONFIG

    run = run_type(folder, run_type.config_type(**options))
    if fabric.broadcast((folder / CONFIG).exists()):
        again = f"dohyo {run.command} --resume {folder}"
        raise DohyoError(f"{folder} already holds a run; go on with it ({again}), or choose another --out")
    _ = run.parts  # a wrong name must leave no folder behind
    if fabric.is_global_zero:
        run.write_config()
    return run


def _resumed_run(run_type: "type[Run[Any]]", folder: Path, explicit: dict[str, Any]) -> "Run[Any]":
    run = run_type.open(folder)
    for key, value in explicit.items():
        if key not in (*run.free, "device") and value != getattr(run.config, key):
            changes = ", ".join(f"--{key.replace('_', '-')}" for key in (*run.free, "device"))
            raise DohyoError(f"--{key} {value} differs from the run's {getattr(run.config, key)}; a resumed run keeps its config "
                             f"(only {changes} may change): start a new one with --out")  # fmt: skip
    run.config = dataclasses.replace(run.config, **{key: explicit[key] for key in run.free if key in explicit})
    return run


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C and a polite kill end the run; the signals seen are listed, because an exception may be lost in a callback."""
    seen: list[int] = []

    def interrupt(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train_with_progress(
    run: "Run[Any]", fabric: Any, quiet: bool, interrupted: list[int], note: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dohyo.lab.training.state import CHECKPOINT, load_checkpoint

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
    unit = run.length.removesuffix("s")
    with Progress(*columns, console=console(), disable=quiet) as progress:
        folders = [replica.folder for replica in getattr(run, "replicas", [])] or [run.folder]
        done = [load_checkpoint(folder)["numbers"][unit] if (folder / CHECKPOINT).exists() else 0 for folder in folders]
        total = getattr(run.config, run.length) * len(folders)
        training = progress.add_task(run.length, total=total, completed=sum(done), note="")
        testing = progress.add_task("test", total=None, note="", visible=False)
        said: set[str] = set()

        def on_epoch(record: dict[str, Any]) -> None:
            if interrupted:
                raise KeyboardInterrupt
            done[record.get("replica", 0)] = record[unit]
            progress.update(training, completed=sum(done), note=note(record))
            for line in () if quiet else {*record.get("notices", ())} - said:
                progress.console.print(f"warning: {line}", markup=False, highlight=False, soft_wrap=True)
                said.add(line)

        def on_test(done: int, total: int) -> None:
            progress.update(testing, completed=done, total=total, visible=True)

        return run.train(fabric, on_epoch, on_test)


def number(value: float | None, digits: int = 3) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def count(value: float) -> str:
    """A whole number as it is; a mean of such with one digit more."""
    return f"{value:.1f}".removesuffix(".0")


def say(quiet: bool, text: str) -> None:
    if not quiet:
        console().print(text, markup=False, highlight=False, soft_wrap=True)
