"""Pictures of log-weights: every estimator at one cost, and chains beside the encoder."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.estimators import ESTIMATORS
from dohyo.lab.bank import block_width, estimate_bank
from dohyo.lab.plots.picture import BLUE, RED, span, tidy, write_picture

FROM = 10  # evaluations from which on the axis holds the curves: the first few are far below


def plot_bank(log_w: Tensor, cost: float, replicates: int, seed: int, path: Path) -> None:
    """IWAE_k against k beside every estimator at the same cost; the numbers go to `path` with the ending .json.

    On the right the error bars are those of the difference from IWAE_n of all weights of the same data, so that the
    spread of the data themselves, the same for all, does not hide the estimators' noise.
    """
    curve = iwae_curve(log_w, seed)
    width = block_width(log_w.shape[1], replicates)
    points = _at_cost(log_w, cost, width, replicates, seed)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2), sharey=True)
    left.plot(curve["k"], curve["mean"], marker=".", color="tab:blue")
    left.set(xscale="log", xlabel="k", ylabel="mean log p(x), nats", title="Lower bounds IWAE_k")
    left.grid(alpha=0.3)
    for position, point in enumerate(points):
        colour = {"lower bound": "tab:orange", "neither a bound nor unbiased": "tab:gray"}.get(point["kind"], "tab:green")
        right.errorbar(position, point["mean"], yerr=1.96 * point["stderr"], fmt="o", capsize=4, color=colour)
    right.axhline(curve["mean"][-1], color="tab:blue", linestyle="--", label=f"IWAE_{curve['k'][-1]}, all weights")
    labels = [f"{point['estimator'].replace('-', chr(10))}\n{point['expected_cost']:.3g}" for point in points]
    right.set_xticks(range(len(points)), labels, fontsize=8)
    right.set_title(f"Every estimator at a cost near {cost:g} (green: unbiased for IWAE_n)")
    right.set_xlabel("estimator and its expected cost")
    right.grid(alpha=0.3, axis="y")
    right.legend()
    write_picture(figure, {"iwae": curve, "at_cost": points}, path)


def iwae_curve(log_w: Tensor, seed: int) -> dict[str, list[Any]]:
    """The mean over data of IWAE_k for k on a logarithmic grid, each averaged over all disjoint blocks of k."""
    samples = log_w.shape[1]
    order = torch.rand(log_w.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    shuffled = log_w.gather(1, order)
    ks = sorted({min(samples, round(10 ** (i / 8))) for i in range(int(8 * math.log10(samples)) + 2)})
    means = []
    for k in ks:
        blocks = shuffled[:, : samples // k * k].reshape(-1, k)
        means.append(float((blocks.logsumexp(-1) - math.log(k)).mean()))
    return {"k": ks, "mean": means}


def _at_cost(log_w: Tensor, cost: float, width: int, replicates: int, seed: int) -> list[dict[str, Any]]:
    whole = log_w.double().logsumexp(-1) - math.log(log_w.shape[1])
    points = []
    for name, cls in ESTIMATORS.items():
        try:
            estimator = cls.at_cost(cost, width)
        except DohyoError:  # this one cannot have this cost
            continue
        result = estimate_bank(log_w, estimator, replicates, seed=seed)
        delta = result.per_datum - whole
        stderr = float(delta.std() / math.sqrt(len(delta))) if len(delta) > 1 else (result.noise_stderr or 0.0)
        found = {"estimator": name, "mean": result.mean, "stderr": stderr, "kind": result.kind}
        points.append({**found, "expected_cost": estimator.expected_cost})
    return points


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
