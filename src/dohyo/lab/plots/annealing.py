"""A picture of log p(x) against what it costs: IWAE by the encoder's weights, and by those of chains."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from dohyo.lab.plots.bank import iwae_curve
from dohyo.lab.plots.picture import BLUE, RED, span, tidy, write_picture

FROM = 10  # evaluations from which on the axis holds the curves: the first few are far below


def plot_approach(encoder: Tensor, chains: Tensor, evaluations: int, steps: int, path: Path) -> None:
    """IWAE_k against evaluations of p(x, z) for each datum, by both kinds of weights of the same data.

    The band is the value by all chains with two standard errors of its noise, to first order.

    Args:
        encoder, chains: (data, weights) log-weights.
        evaluations: For one weight of a chain.
    """
    numbers: dict[str, Any] = {"data": len(encoder), "steps": steps, "evaluations_per_weight": evaluations}
    curves = {"encoder": (encoder, 1), "chains": (chains, evaluations)}
    for name, (log_w, each) in curves.items():
        curve = iwae_curve(log_w, seed=0)
        numbers[name] = {"evaluations": [each * k for k in curve["k"]], "terms": curve["k"], "log_px": curve["mean"]}
    value, error = _log_mean(chains)
    numbers |= {"log_px": value, "stderr": error}
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    axis.axhspan(value - 2 * error, value + 2 * error, color=RED, alpha=0.18, lw=0)
    axis.axhline(value, color=RED, lw=1, ls="--")
    short, most = numbers["encoder"]["log_px"][-1] - value, numbers["encoder"]["evaluations"][-1]
    labels = {
        "encoder": f"IWAE by the encoder's weights: {short:+.2f} nats at {most:,}",
        "chains": f"IWAE by chains of {steps} leapfrogs, {evaluations} evaluations each",
    }
    for name, colour, marker in (("encoder", BLUE, "o"), ("chains", RED, "s")):
        axis.plot(numbers[name]["evaluations"], numbers[name]["log_px"], color=colour, marker=marker, ms=4, label=labels[name])
    axis.set(xscale="log", xlabel="evaluations of p(x, z) for each datum (a gradient counts as 3)", ylabel="mean log p(x), nats",
             title=f"log p(x) of {len(encoder)} data: {value:.2f} ± {error:.2g} by annealed weights")  # fmt: skip
    seen = [y for name in curves for x, y in zip(numbers[name]["evaluations"], numbers[name]["log_px"], strict=True) if x >= FROM]
    if seen:
        axis.set_xlim(left=FROM / 2)
        axis.set_ylim(span(np.array([*seen, value - 2 * error, value + 2 * error]), 0.05))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    tidy(axis)
    figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=9)
    write_picture(figure, numbers, path)


def _log_mean(log_w: Tensor) -> tuple[float, float]:
    """The mean over the data of the log-mean of their weights, and the standard error of its noise, to first order."""
    n = log_w.shape[1]
    log_px = log_w.logsumexp(-1) - math.log(n)
    variance = (log_w - log_px[:, None]).exp().var(-1) / n
    return float(log_px.mean()), float(variance.sum().sqrt() / len(log_w))
