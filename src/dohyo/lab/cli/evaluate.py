"""`dohyo evaluate`: log p(x) of a trained model."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace

import dohyo
from dohyo.errors import DohyoError
from dohyo.evaluation import check_sizes, check_target
from dohyo.files import output_file
from dohyo.lab.cli.screen import answer, estimator_from, interval, number, passing_bar, say, show_evaluation, show_table
from dohyo.lab.evaluations import save_evaluation
from dohyo.lab.experiments.annealing import CHAINS, EXAMINED, Anneal, Asked, Weights, check_anneal, choose_weights, plot_weights
from dohyo.lab.experiments.density import DensityRun, evaluate_over_processes
from dohyo.lab.folder import EVALUATION, VALUES, write_json
from dohyo.lab.parsing import Parser
from dohyo.lab.training.config import Device, Options, option
from dohyo.lab.training.processes import launch, leave
from dohyo.lab.training.state import load_checkpoint

_EXAMPLES = """examples:
  dohyo evaluate runs/a                                                  # annealed weights where the encoder's are too heavy
  dohyo evaluate runs/a --anneal 16 --cost 1000                          # chains of 16 leapfrogs, a picture beside the run
  dohyo evaluate runs/a --anneal 0 --estimator iwae --cost 5000          # as it is done everywhere
  dohyo evaluate runs/a --estimator multilevel-rr --cost 50 --json
  dohyo evaluate runs/a --estimator symmetric-sumo --cost 20 --target-stderr 0.05 --reference --out values.npz

A chain of T leapfrogs takes 3 T + 1 evaluations of p(x, z). What is found goes to evaluation.json in the run's folder.
"""
COST, ANNEALED_COST, FEWEST = 50.0, 1000.0, 8  # evaluations of p(x, z) for each estimate; chains, where few could be paid
_MOST_WEIGHTS = 1e14  # a month at forty million a second


@dataclass
class EvaluateConfig(Options):
    """How `dohyo evaluate` evaluates."""

    estimator: str = option("multilevel-rr", "What estimates log p(x); or the .json or .yaml file of a tuned estimator.")
    cost: float | None = option(
        None, "The expected evaluations of p(x, z) for each estimate, as near as the estimator can come; null for 50 log-weights "
        "of the encoder, or for 1,000 evaluations by chains, of which there are at least 8.",
    )  # fmt: skip
    anneal: Anneal = option(
        "auto", "Leapfrogs of the chains that make the log-weights, 0 for the encoder's own; auto takes chains where k-hat is "
        "above 0.7 for more than three tenths of the data, or above 1.2 for any, and chooses their length.",
    )  # fmt: skip
    split: Literal["test", "valid", "train"] = option("test", "Which of the run's data to evaluate on.")
    replicates: int = option(1, "Estimates for each datum.")
    target_stderr: float | None = option(None, "The standard error wanted for the noise; a pilot then fixes the replicates.")
    max_rows: int | None = option(
        None, "The most rows given to the network at a time, which bounds memory; null for 2,000 on a CPU and 200,000 on a GPU."
    )
    out: Path | None = option(
        None, "A .npz file for the values of each datum, for `dohyo compare`; null for evaluation.npz in the run's folder."
    )
    seed: int = option(0, "The seed of the evaluation.")
    device: Device = option("auto", "Where to compute.")


def parser() -> Parser:
    made = Parser(description="log p(x) of a trained model, with an error bar and a verdict on it.", epilog=_EXAMPLES)
    made.add_argument("run", type=Path, help="a run's folder")
    made.add_class_arguments(EvaluateConfig)
    text = "the averaged parameters (train --average) instead of the best ones, whose files in the run's folder stay as they are"
    made.add_argument("--average", action="store_true", help=text)
    made.add_argument("--reference", action="store_true", help="add the paper's IWAE-5000 to the table")
    made.add_json()
    made.add_config()
    return made


def run(options: Namespace) -> int:
    trained = DensityRun.open(options.run)
    check_anneal(options.anneal)
    estimator = estimator_from(options.estimator, COST if options.cost is None else options.cost)
    if options.target_stderr is not None:
        if options.replicates != 1:
            raise DohyoError("--target-stderr chooses the replicates; give it or --replicates, not both")
        check_target(options.target_stderr, estimator)
    if options.out is not None and options.out.suffix != ".npz":
        raise DohyoError(f"--out is {options.out}; the values of each datum go to a .npz file")
    if options.out is not None:
        output_file(options.out)
    model, data = trained.trained(options.average), trained.data
    x = {"test": data.test, "valid": data.valid, "train": data.train}[options.split]
    if options.split == "train" and data.kind == "grey":
        raise DohyoError("every batch of the training data is binarised at random; evaluate the splits test or valid")
    check_sizes(len(x), options.replicates, options.max_rows)
    total = estimator.expected_cost * len(x) * options.replicates
    if total > _MOST_WEIGHTS:
        raise DohyoError(f"{len(x)} data at this cost would take {total:.2g} log-weights, which takes years; lower --cost")
    fabric = launch(options.device)
    what = f"{options.split} average" if options.average else options.split
    asked = Asked(options.anneal, what, options.seed, options.max_rows)
    with passing_bar("tuning chains", options.json or not fabric.is_global_zero) as on_tuning:
        weights = choose_weights(fabric, options.run, model, x, asked, on_tuning)
    if weights.steps:
        cost = ANNEALED_COST if options.cost is None else options.cost
        estimator = estimator_from(options.estimator, max(cost / weights.each, FEWEST))
    reports = []
    for own, weighed in ((estimator, weights), *([(dohyo.IWAE(5000), Weights(model))] if options.reference else [])):
        result = _evaluated(fabric, weighed, x, own, options, own is estimator)
        reports.append(_report(result, own, weighed, options))
        if own is estimator and fabric.is_global_zero and (options.out is not None or not options.average):
            _save(result, own, weighed, options, bool(trained.config.anneal) and not weighed.steps)
    leave(fabric)
    if not fabric.is_global_zero:
        return 0
    found = {**reports[0], **({"reference": reports[1]} if options.reference else {})}
    title = f"{options.run}{', averaged' if options.average else ''}: {len(x)} {options.split} data"
    answer(found, options.json, lambda: _show(reports, title))
    if not options.average:
        _keep(found, weights, model, x.to(fabric.device), asked, options)
    return 0


def _report(result: dohyo.Evaluation, estimator: dohyo.Estimator, weights: Weights, options: Namespace) -> dict[str, Any]:
    found = result.to_dict()
    return {
        "run": str(options.run),
        "split": options.split,
        "average": options.average,
        "estimator": estimator.name,
        "estimator_arguments": dohyo.to_dict(estimator),
        "steps": weights.steps,
        "evaluations_per_weight": weights.each,
        "expected_cost": estimator.expected_cost * weights.each,
        "nll": -result.mean,
        **found,
        "warnings": [*found["warnings"], *weights.warnings],
    }


def _show(reports: list[dict[str, Any]], title: str) -> None:
    columns = ["estimator", "weights", "expected cost", "NLL", "its noise", "95% interval of log p(x)", "evaluations", "kind"]
    rows = [[report["estimator"], Weights(None, report["steps"]).name, f"{report['expected_cost']:.4g}",
             f"{report['nll']:.3f} ± {number(report['stderr'])}",
             "" if report["noise_stderr"] is None else number(report["noise_stderr"]), interval(report), str(report["cost"]),
             report["kind"]] for report in reports]  # fmt: skip
    show_table(title, columns, rows, words=("estimator", "weights", "kind"))
    for report in reports:
        show_evaluation(report, f"{report['estimator']} at {report['expected_cost']:.4g}: " if len(reports) > 1 else "")


def _save(result: dohyo.Evaluation, estimator: dohyo.Estimator, weights: Weights, options: Namespace, of_encoder: bool) -> None:
    """Each datum's values, for `dohyo compare`; `of_encoder`: by an encoder's weights, though theta followed chains."""
    best = load_checkpoint(options.run)["numbers"]["best_epoch"]
    about = {"run": str(options.run), "split": options.split, "annealed": weights.steps > 0, "best_epoch": best}
    about["through_chains"] = of_encoder
    try:
        save_evaluation(options.out or options.run / VALUES, result, estimator, **about)
    except OSError as error:
        if options.out is not None:
            raise
        print(f"dohyo: the values are not kept for dohyo compare: {error}; --out writes them elsewhere", file=sys.stderr)


def _keep(found: dict[str, Any], weights: Weights, model: Any, x: Any, asked: Asked, options: Namespace) -> None:
    """What was found, and the picture of annealed weights, in the run's folder, where the report looks for them."""
    best = load_checkpoint(options.run)["numbers"]["best_epoch"]
    try:
        write_json(options.run / EVALUATION, found | {"best_epoch": best})
        if weights.steps:
            picture = plot_weights(options.run, model, weights, x, asked)
            if not options.json:
                say(f"written: {picture}")
    except OSError as error:  # the numbers are printed already; the folder may be somebody else's
        print(f"dohyo: not kept for the report: {error}", file=sys.stderr)


def _evaluated(fabric: Any, weights: Weights, x: Any, estimator: Any, options: Namespace, first: bool) -> dohyo.Evaluation:
    with passing_bar(estimator.name, options.json or not fabric.is_global_zero) as on_test:
        return evaluate_over_processes(
            fabric, weights.model, x, estimator, on_test, seed=options.seed, max_rows=options.max_rows,
            replicates=options.replicates if first else 1,
            target_stderr=options.target_stderr if first else None,
            khat_data=EXAMINED,  # as many as auto looks at: a verdict on few data would often contradict it
            **({"khat_samples": CHAINS} if weights.steps else {}),
        )  # fmt: skip
