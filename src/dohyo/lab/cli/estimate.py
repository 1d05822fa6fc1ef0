"""`dohyo estimate`: log p(x) from a file of log-weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

import dohyo
from dohyo.errors import DohyoError
from dohyo.files import output_file, plain, replacing
from dohyo.lab.bank import block_width, estimate_bank, load_log_weights, log_mean
from dohyo.lab.cli.screen import answer, estimator_from, interval, measured, say, show_evaluation, show_table
from dohyo.lab.parsing import Parser
from dohyo.lab.training.config import Options, option

_EXAMPLES = """examples:
  dohyo estimate weights.npy
  dohyo estimate weights.csv --estimator multilevel-rr --cost 20 --replicates 10 --json
  dohyo estimate weights.npz --key log_w --estimator iwae --cost 100 --plot figure.png

The file holds log-weights log p(x, z) - log q(z; x) that any program made: one row for each datum, i.i.d. along the row.
The log-mean of all of them comes first, then the estimator that was chosen.
"""
_PLOT = "plot IWAE_k against k and every estimator at this cost, to estimate.png or this file; the numbers go beside it as JSON"


@dataclass
class EstimateConfig(Options):
    """How `dohyo estimate` estimates."""

    estimator: str = option("multilevel-rr", "What estimates log p(x); or the .json or .yaml file of a tuned estimator.")
    cost: float | None = option(
        None, "The expected log-weights for each estimate, as near as the estimator can come; null for a quarter of a block."
    )
    replicates: int | None = option(
        None, "Estimates for each datum, from disjoint blocks of its row; the law is capped at a block's length. null for 1, or "
        "up to 8 where the file has one row only, which needs them for an error bar.",
    )  # fmt: skip
    confidence: float = option(0.95, "The confidence level of the intervals.")
    seed: int = option(0, "The seed of K and of the shuffling within rows.")
    key: str | None = option(None, "The name of the array in a .npz file that holds several.")
    out: Path | None = option(None, "A .csv file for the estimates of each datum.")


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
    if options.out is not None:
        output_file(options.out)
    log_w = load_log_weights(options.file, options.key)
    data, samples = log_w.shape
    replicates = options.replicates
    if replicates is None:
        replicates = 1 if data > 1 else max(1, min(8, samples // 8))
    width = block_width(samples, replicates)
    cost = max(min(2, width), width / 4) if options.cost is None else options.cost
    estimator = estimator_from(options.estimator, cost, width)
    result = estimate_bank(log_w, estimator, replicates, options.confidence, options.seed)
    whole, bias = log_mean(log_w, options.confidence)
    report = {
        "file": options.file.name,
        "data": data,
        "samples": samples,
        "log_mean": {**whole.to_dict(), **plain({"bias": float(bias.mean())})},
        "estimator": dohyo.to_dict(estimator),
        "expected_cost": estimator.expected_cost,
        "confidence": options.confidence,
        "seed": options.seed,
        **result.to_dict(),
    }
    if samples == 1 < data:
        report["warnings"].append(
            f"there is one log-weight for each of {data} data; if all of them belong to one datum, write them in one row"
        )
    if options.out is not None:
        values = enumerate(zip(result.per_datum.tolist(), result.khat.tolist(), strict=True))
        lines = ["datum,log_px,khat", *(f"{i},{value!r},{khat!r}" for i, (value, khat) in values)]
        with replacing(options.out) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.plot is not None:
        from dohyo.lab.plots.bank import plot_bank

        plot_bank(log_w, cost, replicates, options.seed, options.plot)
    answer(report, options.json, lambda: _show(report, options))
    return 0


def _show(report: dict[str, Any], options: Namespace) -> None:
    """The log-mean of all weights, then the estimate."""
    whole, samples = report["log_mean"], report["samples"]
    sized = f"{report['data']} data, {samples} log-weights each" if report["data"] > 1 else f"1 datum, {samples} log-weights"
    rows = []
    for name, one in ((f"log-mean of all {samples}", whole), (report["estimator"]["name"], report)):
        mean = "-inf" if one["mean"] is None else measured(one["mean"], one["stderr"])
        noise = "" if one["noise_stderr"] is None else f"{one['noise_stderr']:.2g}"
        rows.append([name, mean, noise, interval(one), str(one["cost"]), one["kind"]])
    columns = ["estimate", "mean log p(x)", "noise", f"{options.confidence:.0%} interval", "weights", "kind"]
    show_table(f"{options.file.name}: {sized}", columns, rows, words=("estimate", "kind"))
    if whole["bias"] is not None and whole["mean"] is not None:
        without = measured(whole["mean"] - whole["bias"], whole["stderr"]).split()[0]
        say(f"bias of the log-mean by the jackknife: {whole['bias']:.2g}; {without} without it")
    if report["khat"]["median"] is not None:
        say(f"Pareto k-hat: median {report['khat']['median']:.2f}, largest {report['khat']['max']:.2f}")
    show_evaluation(whole, "log-mean: ")
    show_evaluation(report, f"{report['estimator']['name']}: ")
    for path in (options.out, options.plot):
        if path is not None:
            say(f"written: {path}")
