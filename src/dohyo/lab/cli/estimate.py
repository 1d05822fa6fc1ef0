"""`dohyo estimate`: log p(x) from a file of log-weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

import dohyo
from dohyo.errors import DohyoError
from dohyo.lab.cli.parsing import Parser, console, estimator_from

_EXAMPLES = """examples:
  dohyo estimate weights.npy --estimator symmetric-sumo --cost 15
  dohyo estimate weights.csv --estimator multilevel-rr --cost 20 --replicates 10 --json
  dohyo estimate weights.npz --key log_w --estimator iwae --cost 100 --plot figure.png

The file holds log-weights log p(x, z) - log q(z; x) that any program made: one row for each datum, i.i.d. along the row.
"""


@dataclass
class EstimateConfig:
    """How `dohyo estimate` estimates.

    Attributes:
        estimator: elbo, iwae, jvi, sumo, symmetric-sumo, multilevel-rr or multilevel-ss; or a tuned one's .json/.yaml.
        cost: The expected number of log-weights for each estimate.
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
    """The command's options."""
    estimate = Parser(description="Estimate log p(x) from log-weights in a file.", epilog=_EXAMPLES)
    estimate.add_argument("file", type=Path, help="a .npy, .npz or .csv file")
    estimate.add_class_arguments(EstimateConfig)
    estimate.add_json()
    estimate.add_argument(
        "--plot",
        nargs="?",
        const=Path("estimate.png"),
        type=Path,
        metavar="FILE",
        help="IWAE_k against k and every estimator at this cost, as a picture with its numbers as JSON beside it "
        "(default name: estimate.png)",
    )
    estimate.add_config()
    return estimate


def run(config: Namespace) -> int:
    from dohyo.lab.bank import block_width, estimate_bank, load_log_weights

    if not 0 < config.confidence < 1:
        raise DohyoError(f"--confidence is {config.confidence}; it must lie strictly between 0 and 1")
    if config.plot is not None:
        from dohyo.lab.plots.picture import check_picture

        check_picture(config.plot)
    log_w = load_log_weights(config.file, config.key)
    width = block_width(log_w.shape[1], config.replicates)
    estimator = estimator_from(config.estimator, config.cost, width)
    result = estimate_bank(log_w, estimator, config.replicates, config.confidence, config.seed)
    report = {
        "file": config.file.name,
        "data": log_w.shape[0],
        "samples": log_w.shape[1],
        "estimator": dohyo.to_dict(estimator),
        "expected_cost": estimator.expected_cost,
        "confidence": config.confidence,
        "seed": config.seed,
        **result.to_dict(),
    }
    if config.out is not None:
        _write_per_datum(config.out, result)
    if config.plot is not None:
        from dohyo.lab.plots.bank import plot_bank

        plot_bank(log_w, config.cost, config.replicates, config.seed, config.plot)
    if config.json:
        print(json.dumps(report))
    else:
        _print_estimate(report, log_w, config)
    return 0


def _write_per_datum(path: Path, result: dohyo.Evaluation) -> None:
    from dohyo.files import replacing

    lines = ["datum,log_px,khat"]
    lines += [f"{i},{v!r},{k!r}" for i, (v, k) in enumerate(zip(result.per_datum.tolist(), result.khat.tolist(), strict=True))]
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _print_estimate(report: dict[str, Any], log_w: Any, config: Namespace) -> None:
    """The estimate between the two lower bounds that frame it: IWAE at the same cost and IWAE of all weights."""
    from rich.table import Table

    from dohyo.lab.bank import estimate_bank

    screen = console()
    samples = log_w.shape[1]
    table = Table(title=f"{config.file.name}: {report['data']} data, {samples} log-weights each")
    for heading in ("estimator", "mean log p(x)", f"{config.confidence:.0%} interval", "weights used", "kind"):
        table.add_column(heading, justify="left" if heading in ("estimator", "kind") else "right")
    table.add_row(*_cells(report["estimator"]["name"], report), style="bold")
    for k in sorted({min(round(config.cost), samples), samples}):
        reference = estimate_bank(log_w, dohyo.IWAE(k), 1, config.confidence, config.seed).to_dict()
        table.add_row(*_cells(f"iwae, k={k}", reference))
    screen.print(table)
    if report["noise_stderr"] is not None:
        screen.print(f"standard error of the estimator's noise alone: {report['noise_stderr']:.4g}")
    if report["robust_interval"] is not None:
        low, high = report["robust_interval"]
        screen.print(f"median of means: {report['robust_mean']:.4f} in [{low:.4f}, {high:.4f}]", markup=False)
    if report["khat"]["median"] is not None:
        screen.print(f"Pareto k-hat: median {report['khat']['median']:.2f}, largest {report['khat']['max']:.2f}")
    for warning in report["warnings"]:
        screen.print(f"[yellow]warning:[/] {warning}")
    for path in (config.out, config.plot):
        if path is not None:
            screen.print(f"written: {path}", markup=False, highlight=False)


def _cells(name: str, report: dict[str, Any]) -> list[str]:
    mean, stderr, (low, high) = report["mean"], report["stderr"], report["interval"]
    return [
        name,
        "-inf" if mean is None else f"{mean:.3f} ± {'?' if stderr is None else f'{stderr:.3f}'}",
        "unknown" if low is None else f"{low:.3f} to {high:.3f}",
        str(report["cost"]),
        report["kind"],
    ]
