"""`dohyo estimate`: log p(x) from a file of log-weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

import dohyo
from dohyo.errors import DohyoError, check_seed
from dohyo.files import output_file, replacing
from dohyo.lab.bank import block_width, estimate_bank, load_log_weights
from dohyo.lab.cli.screen import estimator_from, interval, number, say, show_evaluation, show_table
from dohyo.lab.parsing import Parser

_EXAMPLES = """examples:
  dohyo estimate weights.npy --estimator symmetric-sumo --cost 15
  dohyo estimate weights.csv --estimator multilevel-rr --cost 20 --replicates 10 --json
  dohyo estimate weights.npz --key log_w --estimator iwae --cost 100 --plot figure.png

The file holds log-weights log p(x, z) - log q(z; x) that any program made: one row for each datum, i.i.d. along the row.
"""
_PLOT = """IWAE_k against k and every estimator at this cost, as a picture with its numbers as JSON beside it
(default name: estimate.png)"""


@dataclass
class EstimateConfig:
    """How `dohyo estimate` estimates.

    Attributes:
        estimator: elbo, iwae, jvi, sumo, symmetric-sumo, multilevel-rr or multilevel-ss; or a tuned one's .json/.yaml.
        cost: The expected number of log-weights for each estimate, as near as the estimator can come.
        replicates: Estimates for each datum, from disjoint blocks of its row; the law is capped at a block's length.
        confidence: Of the intervals.
        seed: Of the plan and of the shuffling within rows.
        key: The name of the array in a .npz file that holds several.
        out: A .csv file for the estimates of each datum.
    """

    estimator: str = "symmetric-sumo"
    cost: float = 15.0
    replicates: int = 1
    confidence: float = 0.95
    seed: int = 0
    key: str | None = None
    out: Path | None = None


def parser() -> Parser:
    made = Parser(description="Estimate log p(x) from log-weights in a file.", epilog=_EXAMPLES)
    made.add_argument("file", type=Path, help="a .npy, .npz or .csv file")
    made.add_class_arguments(EstimateConfig)
    made.add_json()
    made.add_argument("--plot", nargs="?", const=Path("estimate.png"), type=Path, metavar="FILE", help=_PLOT)
    made.add_config()
    return made


def run(options: Namespace) -> int:
    if not 0 < options.confidence < 1:
        raise DohyoError(f"--confidence is {options.confidence}; it must lie strictly between 0 and 1")
    if options.plot is not None:
        from dohyo.lab.plots.picture import check_picture

        check_picture(options.plot)
    check_seed("--seed", options.seed)
    for path in (options.out, options.plot):
        if path is not None:
            output_file(path)
    log_w = load_log_weights(options.file, options.key)
    width = block_width(log_w.shape[1], options.replicates)
    estimator = estimator_from(options.estimator, options.cost, width)
    result = estimate_bank(log_w, estimator, options.replicates, options.confidence, options.seed)
    report = {
        "file": options.file.name,
        "data": log_w.shape[0],
        "samples": log_w.shape[1],
        "estimator": dohyo.to_dict(estimator),
        "expected_cost": estimator.expected_cost,
        "confidence": options.confidence,
        "seed": options.seed,
        **result.to_dict(),
    }
    if options.out is not None:
        values = enumerate(zip(result.per_datum.tolist(), result.khat.tolist(), strict=True))
        lines = ["datum,log_px,khat", *(f"{i},{value!r},{khat!r}" for i, (value, khat) in values)]
        with replacing(options.out) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.plot is not None:
        from dohyo.lab.plots.bank import plot_bank

        plot_bank(log_w, options.cost, options.replicates, options.seed, options.plot)
    if options.json:
        print(json.dumps(report))
    else:
        _show(report, log_w, options)
    return 0


def _show(report: dict[str, Any], log_w: Any, options: Namespace) -> None:
    """The estimate beside two lower bounds: IWAE at the same cost, and IWAE with all weights."""
    samples = log_w.shape[1]
    shown = {report["estimator"]["name"]: report}
    for k in sorted({min(round(options.cost), samples), samples}):
        bound = estimate_bank(log_w, dohyo.IWAE(k), 1, options.confidence, options.seed)
        shown[f"iwae, k={k}"] = {"expected_cost": k, **bound.to_dict()}
    columns = ["estimator", "expected cost", "mean log p(x)", f"{options.confidence:.0%} interval", "weights used", "kind"]
    rows = []
    for name, one in shown.items():
        mean = "-inf" if one["mean"] is None else f"{one['mean']:.3f} ± {number(one['stderr'])}"
        rows.append([name, f"{one['expected_cost']:.4g}", mean, interval(one), str(one["cost"]), one["kind"]])
    title = f"{options.file.name}: {report['data']} data, {samples} log-weights each"
    show_table(title, columns, rows, words=("estimator", "kind"))
    if report["noise_stderr"] is not None:
        say(f"standard error of the estimator's noise alone: {report['noise_stderr']:.4g}")
    if report["khat"]["median"] is not None:
        say(f"Pareto k-hat: median {report['khat']['median']:.2f}, largest {report['khat']['max']:.2f}")
    show_evaluation(report)
    for path in (options.out, options.plot):
        if path is not None:
            say(f"written: {path}")
