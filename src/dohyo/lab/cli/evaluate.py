"""`dohyo evaluate`: log p(x) of a trained model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from rich.progress import Progress

import dohyo
from dohyo.errors import DohyoError
from dohyo.evaluation import check_target
from dohyo.lab.cli.screen import console, estimator_from, interval, number, show_evaluation, show_table
from dohyo.lab.evaluations import save_evaluation
from dohyo.lab.experiments.density import DensityRun, evaluate_over_processes
from dohyo.lab.folder import VALUES
from dohyo.lab.parsing import Parser
from dohyo.lab.training.config import Device
from dohyo.lab.training.processes import launch, leave

_EXAMPLES = """examples:
  dohyo evaluate runs/a --estimator iwae --cost 5000
  dohyo evaluate runs/a --estimator multilevel-rr --cost 50 --json
  dohyo evaluate runs/a --estimator symmetric-sumo --cost 20 --target-stderr 0.05 --reference --out values.npz
"""


@dataclass
class EvaluateConfig:
    """How `dohyo evaluate` evaluates.

    Attributes:
        estimator: What estimates log p(x); or the .json or .yaml file of a tuned estimator.
        cost: The expected number of log-weights for each estimate, as near as the estimator can come.
        split: Which of the run's data to evaluate on.
        replicates: Estimates for each datum.
        target_stderr: The standard error wanted for the estimator's noise; a pilot then fixes the replicates.
        max_rows: The most rows given to the network at a time, which bounds memory; null for 2,000 on a CPU and 200,000 on a GPU.
        out: A .npz file for the values of each datum, for `dohyo compare`; null for evaluation.npz in the run's folder.
        seed: The seed of the evaluation.
        device: Where to compute.
    """

    estimator: str = "multilevel-rr"
    cost: float = 50.0
    split: Literal["test", "valid", "train"] = "test"
    replicates: int = 1
    target_stderr: float | None = None
    max_rows: int | None = None
    out: Path | None = None
    seed: int = 0
    device: Device = "auto"


def parser() -> Parser:
    made = Parser(description="log p(x) of a trained model, with an error bar.", epilog=_EXAMPLES)
    made.add_argument("run", type=Path, help="a run's folder")
    made.add_class_arguments(EvaluateConfig)
    made.add_argument("--reference", action="store_true", help="add the paper's IWAE-5000 to the table")
    made.add_json()
    made.add_config()
    return made


def run(options: Namespace) -> int:
    trained = DensityRun.open(options.run)
    estimators = [estimator_from(options.estimator, options.cost), *([dohyo.IWAE(5000)] if options.reference else [])]
    if options.target_stderr is not None:
        check_target(options.target_stderr, estimators[0])
    if options.out is not None and options.out.suffix != ".npz":
        raise DohyoError(f"--out is {options.out}; the values of each datum go to a .npz file")
    model, data = trained.trained(), trained.data
    x = {"test": data.test, "valid": data.valid, "train": data.train}[options.split]
    if options.split == "train" and data.kind == "grey":
        raise DohyoError("every batch of the training data is binarised at random; evaluate the splits test or valid")
    fabric = launch(options.device)
    reports = []
    for estimator in estimators:
        first = estimator is estimators[0]
        result = _evaluated(fabric, model, x, estimator, options, first)
        reports.append({
            "run": str(options.run),
            "split": options.split,
            "estimator": estimator.name,
            "estimator_arguments": dohyo.to_dict(estimator),
            "expected_cost": estimator.expected_cost,
            "nll": -result.mean,
            **result.to_dict(),
        })  # fmt: skip
        if first and fabric.is_global_zero:
            path = options.out or options.run / VALUES
            save_evaluation(path, result, estimator, run=str(options.run), split=options.split)
    leave(fabric)
    if fabric.is_global_zero and options.json:
        print(json.dumps({**reports[0], **({"reference": reports[1]} if options.reference else {})}))
    elif fabric.is_global_zero:
        _show(reports, f"{options.run}: {len(x)} {options.split} data")
    return 0


def _show(reports: list[dict[str, Any]], title: str) -> None:
    columns = ["estimator", "expected cost", "NLL", "of which noise", "95% interval of log p(x)", "log-weights", "kind"]
    rows = [[report["estimator"], f"{report['expected_cost']:.4g}", f"{report['nll']:.3f} ± {number(report['stderr'])}",
             "" if report["noise_stderr"] is None else number(report["noise_stderr"]), interval(report), str(report["cost"]),
             report["kind"]] for report in reports]  # fmt: skip
    show_table(title, columns, rows, words=("estimator", "kind"))
    for report in reports:
        show_evaluation(report)


def _evaluated(fabric: Any, model: Any, x: Any, estimator: Any, options: Namespace, first: bool) -> dohyo.Evaluation:
    quiet = options.json or not fabric.is_global_zero
    with Progress(console=console(), disable=quiet, transient=True) as progress:
        task = progress.add_task(estimator.name, total=-(-len(x) // fabric.world_size))
        return evaluate_over_processes(
            fabric, model, x, estimator, seed=options.seed, max_rows=options.max_rows,
            replicates=options.replicates if first else 1,
            target_stderr=options.target_stderr if first else None,
            progress=lambda done: progress.update(task, completed=done),
        )  # fmt: skip
