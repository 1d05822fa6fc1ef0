"""`dohyo train`, `dohyo evaluate` and `dohyo sample`: density modelling."""

import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

import dohyo
from dohyo.cli.parsing import Parser, console, estimator_from

if TYPE_CHECKING:
    from dohyo.experiments.density import Run

_TRAIN = """examples:
  dohyo train --data digits --estimator sumo --cost 15 --epochs 20 --seed 0 --out runs/a
  dohyo train --resume runs/a --epochs 40
  dohyo train --data mnist --estimator iwae --cost 5 --encoder dreg --out runs/b
  dohyo train --data mine.npz --model package.module:Class --out runs/c
  torchrun --nproc-per-node 2 -m dohyo train --data digits --estimator sumo --cost 15 --epochs 2 --out runs/d
"""
_EVALUATE = """examples:
  dohyo evaluate runs/a --estimator iwae --cost 5000
  dohyo evaluate runs/a --estimator multilevel-rr --cost 50 --json
  dohyo evaluate runs/a --estimator symmetric-sumo --cost 20 --target-stderr 0.05 --reference --out values.npz
"""
_SAMPLE = """examples:
  dohyo sample runs/a --count 64 --out samples.png
  dohyo sample runs/a --count 16 --reconstruct --out reconstructions.png
"""


@dataclass
class EvaluateConfig:
    """How `dohyo evaluate` evaluates.

    Attributes:
        estimator: elbo, iwae, jvi, sumo, symmetric-sumo, multilevel-rr or multilevel-ss; or a tuned one's .json/.yaml.
        cost: The expected number of log-weights for each estimate.
        split: test, valid or train.
        replicates: Estimates for each datum.
        target_stderr: The standard error wanted of the estimator's noise; a pilot then fixes the replicates.
        max_rows: The most rows given to the network at a time: this bounds memory.
        out: A .npz file for the values of each datum.
        seed: Of the evaluation.
        device: cpu, cuda, mps or auto.
    """

    estimator: str = "multilevel-rr"
    cost: float = 50.0
    split: str = "test"
    replicates: int = 1
    target_stderr: float | None = None
    max_rows: int = 2_000
    out: Path | None = None
    seed: int = 0
    device: str = "auto"


def train_parser() -> Parser:
    from dohyo.experiments.density import DensityConfig

    parser = Parser(description="Train a latent-variable model by maximum likelihood.", epilog=_TRAIN)
    parser.add_class_arguments(DensityConfig)
    parser.add_argument("--out", type=Path, help="a new folder for the run (required unless --resume)")
    parser.add_argument("--resume", type=Path, help="a run's folder, to go on where it stopped; only --epochs may change")
    parser.add_json()
    parser.add_config()
    return parser


def evaluate_parser() -> Parser:
    parser = Parser(description="log p(x) of a trained model, with an error bar.", epilog=_EVALUATE)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_class_arguments(EvaluateConfig)
    parser.add_argument("--reference", action="store_true", help="the paper's IWAE-5000 in the same table")
    parser.add_json()
    parser.add_config()
    return parser


def sample_parser() -> Parser:
    parser = Parser(description="A picture of samples from a trained model.", epilog=_SAMPLE)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--count", type=int, default=64, help="how many")
    parser.add_argument("--out", type=Path, default=Path("samples.png"), help="the picture; its numbers go beside it as JSON")
    parser.add_argument("--reconstruct", action="store_true", help="test data above their reconstructions instead")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    return parser


def train(config: Namespace) -> int:
    from dohyo.training.processes import launch, leave

    own = ("out", "resume", "json", "config")
    options = {key: value for key, value in config.items() if key not in (*own, "explicit")}
    explicit = {key: value for key, value in config.explicit.items() if key not in own}
    if (config.out is None) == (config.resume is None):
        raise ValueError("give --out FOLDER for a new run, or --resume FOLDER to go on with one")
    if config.resume is None:
        fabric = launch(config.device)
        run = _new_run(config.out, options, fabric)
    else:
        run = _resumed_run(config.resume, explicit)
        fabric = launch(explicit.get("device", run.config.device))
    quiet = config.json or not fabric.is_global_zero
    result = run.result if run.finished else None
    if result is not None:
        early = result["epochs"] < run.config.epochs
        reason = f"no improvement for {run.config.stop_patience} epochs" if early else "--epochs N extends it"
        _say(quiet, f"{run.folder}: already finished after {result['epochs']} epochs; {reason}")
    else:
        if fabric.is_global_zero:
            run.write_config()  # --epochs may have changed
        try:
            with _interruptible() as interrupted:
                result = _train_with_progress(run, fabric, quiet, interrupted)
        except RuntimeError as error:
            if fabric.world_size == 1:
                raise
            raise ValueError(f"another process of the job failed ({str(error).splitlines()[0]}); the checkpoint is kept: start "
                             f"as many again with --resume {run.folder}") from error  # fmt: skip
        except KeyboardInterrupt:
            if fabric.is_global_zero:
                print(f"dohyo: interrupted; go on with: dohyo train --resume {run.folder}", file=sys.stderr)
            return 130
    leave(fabric)
    if fabric.is_global_zero:
        if config.json:
            print(json.dumps(result))
        else:
            nll = f"{_number(result['test_nll'])} ± {_number(result['test_nll_stderr'])} (IWAE-{result['test_terms']})"
            _say(False, f"test NLL {nll}, {result['epochs']} epochs, {result['seconds']:.0f} s; everything is in {run.folder}")
    return 0


def _new_run(folder: Path, options: dict[str, Any], fabric: Any) -> "Run":
    from dohyo.experiments.density import CONFIG, DensityConfig, Run

    run = Run(folder, DensityConfig(**options))
    if fabric.broadcast((folder / CONFIG).exists()):
        raise ValueError(f"{folder} already holds a run; go on with it (dohyo train --resume {folder}), or choose another --out")
    _ = run.parts  # a wrong name must leave no folder behind
    if fabric.is_global_zero:
        run.write_config()
    return run


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def _resumed_run(folder: Path, explicit: dict[str, Any]) -> "Run":
    from dohyo.experiments.density import Run

    run = Run.open(folder)
    for key, value in explicit.items():
        if key not in ("epochs", "device") and value != getattr(run.config, key):
            raise ValueError(f"--{key} {value} differs from the run's {getattr(run.config, key)}; a resumed run keeps its config "
                             "(only --epochs may change): start a new one with --out")  # fmt: skip
    run.config = dataclasses.replace(run.config, epochs=explicit.get("epochs", run.config.epochs))
    return run


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
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


def _train_with_progress(run: "Run", fabric: Any, quiet: bool, interrupted: list[int]) -> dict[str, Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dohyo.training.state import CHECKPOINT, load_checkpoint

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=console(), disable=quiet) as progress:
        done = load_checkpoint(run.folder)["numbers"]["epoch"] if (run.folder / CHECKPOINT).exists() else 0
        epochs = progress.add_task("epochs", total=run.config.epochs, completed=done, note="")
        testing = progress.add_task(f"test, IWAE-{run.config.test_terms}", total=None, note="", visible=False)

        def on_epoch(record: dict[str, Any]) -> None:
            if interrupted:
                raise KeyboardInterrupt
            note = (f"train {record['train_nll']:.2f} valid {record['valid_nll']:.2f} "
                    f"clipped {record['clipped_decoder']:.0%} and {record['clipped_encoder']:.0%}")  # fmt: skip
            progress.update(epochs, completed=record["epoch"], note=note)

        def on_test(done: int, total: int) -> None:
            progress.update(testing, completed=done, total=total, visible=True)

        return run.train(fabric, on_epoch, on_test)


def evaluate(config: Namespace) -> int:
    from rich.table import Table

    from dohyo.evaluation import check_target
    from dohyo.experiments.density import Run
    from dohyo.names import named
    from dohyo.training.processes import launch, leave

    run = Run.open(config.run)
    estimators = [estimator_from(config.estimator, config.cost)]
    if config.reference:
        estimators.append(dohyo.IWAE(5000))
    if config.target_stderr is not None:
        check_target(config.target_stderr, estimators[0])
    if config.out is not None and config.out.suffix != ".npz":
        raise ValueError(f"--out is {config.out}; the values of each datum go to a .npz file")
    model, data = run.trained()
    split = {"test": data.test, "valid": data.valid, "train": data.train}
    x = named(split, config.split, "split")
    if config.split == "train" and data.kind == "grey":
        raise ValueError("the training data are binarised anew in every batch; evaluate the splits test or valid")
    fabric = launch(config.device)
    reports = []
    for estimator in estimators:
        first = estimator is estimators[0]
        result = _evaluate_with_progress(fabric, model, x, estimator, config, first)
        reports.append({
            "run": str(config.run),
            "split": config.split,
            "estimator": estimator.name,
            "estimator_arguments": dohyo.to_dict(estimator),
            "expected_cost": estimator.expected_cost,
            "nll": -result.mean,
            **result.to_dict(),
        })  # fmt: skip
        if first and config.out is not None and fabric.is_global_zero:
            _write_values(config.out, result)
    leave(fabric)
    if not fabric.is_global_zero:
        return 0
    if config.json:
        print(json.dumps({**reports[0], **({"reference": reports[1]} if config.reference else {})}))
        return 0
    screen = console()
    table = Table(title=f"{config.run}: {len(x)} {config.split} data")
    for heading in ("estimator", "NLL", "of which noise", "95% interval of log p(x)", "log-weights", "kind"):
        table.add_column(heading, justify="left" if heading in ("estimator", "kind") else "right")
    for report in reports:
        noise = "" if report["noise_stderr"] is None else f"{report['noise_stderr']:.3f}"
        low, high = report["interval"]
        table.add_row(report["estimator"], f"{report['nll']:.3f} ± {report['stderr'] or float('nan'):.3f}", noise,
                      "unknown" if low is None else f"{low:.3f} to {high:.3f}", str(report["cost"]), report["kind"])  # fmt: skip
    screen.print(table)
    for report in reports:
        if report["robust_interval"] is not None:
            low, high = report["robust_interval"]
            screen.print(f"median of means of log p(x): {report['robust_mean']:.3f} in [{low:.3f}, {high:.3f}]", markup=False)
        for warning in report["warnings"]:
            screen.print(f"[yellow]{report['estimator']}:[/] {warning}")
    return 0


def _evaluate_with_progress(fabric: Any, model: Any, x: Any, estimator: Any, config: Namespace, first: bool) -> Any:
    from rich.progress import Progress

    from dohyo.experiments.density import evaluate_shared_out

    quiet = config.json or not fabric.is_global_zero
    with Progress(console=console(), disable=quiet, transient=True) as progress:
        task = progress.add_task(estimator.name, total=-(-len(x) // fabric.world_size))
        return evaluate_shared_out(
            fabric,
            model,
            x,
            estimator,
            seed=config.seed,
            replicates=config.replicates if first else 1,
            target_stderr=config.target_stderr if first else None,
            max_rows=config.max_rows,
            progress=lambda done: progress.update(task, completed=done),
        )


def sample(config: Namespace) -> int:
    import torch

    from dohyo.experiments.density import Run
    from dohyo.plots.runs import plot_images, plot_reconstructions

    if config.count < 1:
        raise ValueError(f"--count is {config.count}; it must be at least 1")
    model, data = Run.open(config.run).trained()
    source: Any = model
    needed = "reconstruct" if config.reconstruct else "sample_mean"
    if not hasattr(source, needed):
        raise ValueError(f"{type(model).__name__} has no method {needed}; write one (see dohyo.models.LatentVariableModel)")
    torch.manual_seed(config.seed)
    with torch.no_grad():
        if config.reconstruct:
            x = data.test[: config.count]
            plot_reconstructions(x, source.reconstruct(x), data.shape, config.out)
        else:
            plot_images(source.sample_mean(config.count), data.shape, config.out)
    _say(False, f"written: {config.out}")
    return 0


def _write_values(path: Path, result: dohyo.Evaluation) -> None:
    import numpy as np

    from dohyo.files import replacing

    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, log_px=result.per_datum.numpy(), khat=result.khat.numpy())


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        console().print(text, markup=False, highlight=False, soft_wrap=True)
