"""`dohyo train`, `dohyo evaluate` and `dohyo sample`: density modelling."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

import dohyo
from dohyo.errors import DohyoError
from dohyo.lab.cli.parsing import Parser, console, estimator_from
from dohyo.lab.cli.runs import count, number, run_command, run_parser, say

_TRAIN = """examples:
  dohyo train --data digits --estimator sumo --cost 15 --epochs 20 --seed 0 --out runs/a
  dohyo train --resume runs/a --epochs 40
  dohyo train --data mnist --estimator iwae --cost 5 --encoder dreg --out runs/b
  dohyo train --data mine.npz --model package.module:Class --out runs/c
  dohyo train --data digits --estimator sumo --cost 15 --epochs 20 --replicas 3 --out runs/e
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
        max_rows: The most rows given to the network at a time: this bounds memory; null for 2,000 on a CPU and 200,000 on a GPU.
        out: A .npz file for the values of each datum.
        seed: Of the evaluation.
        device: cpu, cuda, mps or auto.
    """

    estimator: str = "multilevel-rr"
    cost: float = 50.0
    split: str = "test"
    replicates: int = 1
    target_stderr: float | None = None
    max_rows: int | None = None
    out: Path | None = None
    seed: int = 0
    device: str = "auto"


def train_parser() -> Parser:
    from dohyo.lab.experiments.density import DensityConfig

    return run_parser(DensityConfig, "epochs", "Train a latent-variable model by maximum likelihood.", _TRAIN)


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
    from dohyo.lab.experiments.density import DensityRun

    return run_command(DensityRun, config, _note, _summary)


def _note(record: dict[str, Any]) -> str:
    return (f"train {record['train_nll']:.2f} valid {record['valid_nll']:.2f} "
            f"clipped {record['clipped_decoder']:.0%} and {record['clipped_encoder']:.0%}")  # fmt: skip


def _summary(result: dict[str, Any]) -> list[str]:
    nll, stderr = number(result["test_nll"]), number(result["test_nll_stderr"])
    length = f"{count(result['epochs'])} epochs, {result['seconds']:.0f} s"
    lines = [f"test NLL {nll} ± {stderr} (IWAE-{result['test_terms']}), {length}"]
    if "replicas" in result:
        each = ", ".join(number(replica["test_nll"]) for replica in result["replicas"])
        lines[0] = f"mean of {len(result['replicas'])} replicas: {lines[0]}"
        lines.append(f"each: {each}; their standard deviation is {number(result['test_nll_spread'])}")
    lines += [f"warning: {line}" for line in result["warnings"]]
    return lines


def evaluate(config: Namespace) -> int:
    from rich.table import Table

    from dohyo.evaluation import check_target
    from dohyo.lab.experiments.density import DensityRun
    from dohyo.lab.training.processes import launch, leave
    from dohyo.names import named

    run = DensityRun.open(config.run)
    estimators = [estimator_from(config.estimator, config.cost)]
    if config.reference:
        estimators.append(dohyo.IWAE(5000))
    if config.target_stderr is not None:
        check_target(config.target_stderr, estimators[0])
    if config.out is not None and config.out.suffix != ".npz":
        raise DohyoError(f"--out is {config.out}; the values of each datum go to a .npz file")
    model, data = run.trained(), run.data
    split = {"test": data.test, "valid": data.valid, "train": data.train}
    x = named(split, config.split, "split")
    if config.split == "train" and data.kind == "grey":
        raise DohyoError("the training data are binarised anew in every batch; evaluate the splits test or valid")
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

    from dohyo.lab.experiments.density import evaluate_shared_out

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

    from dohyo.lab.experiments.density import DensityRun
    from dohyo.lab.plots.runs import plot_images, plot_reconstructions

    if config.count < 1:
        raise DohyoError(f"--count is {config.count}; it must be at least 1")
    run = DensityRun.open(config.run)
    model, data = run.trained(), run.data
    source: Any = model
    needed = "reconstruct" if config.reconstruct else "sample_mean"
    if not hasattr(source, needed):
        raise DohyoError(f"{type(model).__name__} has no method {needed}; write one (see dohyo.models.LatentVariableModel)")
    torch.manual_seed(config.seed)
    with torch.no_grad():
        if config.reconstruct:
            x = data.test[: config.count]
            plot_reconstructions(x, source.reconstruct(x), data.shape, config.out)
        else:
            plot_images(source.sample_mean(config.count), data.shape, config.out)
    say(False, f"written: {config.out}")
    return 0


def _write_values(path: Path, result: dohyo.Evaluation) -> None:
    import numpy as np

    from dohyo.files import replacing

    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, log_px=result.per_datum.numpy(), khat=result.khat.numpy())
