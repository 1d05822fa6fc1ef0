"""A picture of estimators of one NLL against their cost: mean and spread of many runs beside the truth."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from numpy.typing import NDArray

from dohyo.lab.plots.picture import padded, plain_numbers

# Okabe and Ito's colours, which all people can tell apart; the markers tell them apart in grey.
_STYLES = {
    "iwae": ("#000000", "o"),
    "sumo-harmonic": ("#0072B2", "s"),
    "sumo-geometric": ("#D55E00", "^"),
    "sumo-power": ("#CC79A7", "v"),
    "symmetric-sumo": ("#009E73", "D"),
    "multilevel-rr": ("#E69F00", "P"),
}


def plot_estimates(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    names: Mapping[str, str],
    truth: float,
    truth_stderr: float,
    runs: int,
    images: int,
) -> tuple[Figure, dict[str, Any]]:
    """A panel for each unbiased estimator with IWAE and the truth in it, and one of all spreads.

    Args:
        curves: For each estimator cost, and mean and sd over runs; perhaps every_k, the mean with every K counted, and
            every_k_stderr.
        names: What each is called.
        truth: The NLL, with its standard error.
    """
    arrays = {name: {key: np.array(values, dtype=np.float64) for key, values in curve.items()} for name, curve in curves.items()}
    shown = [name for name in arrays if name != "iwae"]
    panels = len(shown) + 1
    figure = Figure(figsize=(12, 3.9 * -(-panels // 3)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(-(-panels // 3), 3, squeeze=False).ravel())
    low, high = _limits(arrays, truth)
    for axis, name in zip(axes, shown, strict=False):
        axis.axhline(truth, color="0.35", lw=1.2, ls="--", label=f"truth, {truth:.2f} ± {2 * truth_stderr:.2f}")
        axis.axhspan(truth - 2 * truth_stderr, truth + 2 * truth_stderr, color="0.35", alpha=0.25, lw=0)
        for each in dict.fromkeys(["iwae", name]):
            if each in arrays:
                _band(axis, arrays[each], *_STYLES[each], names[each], runs, low, high)
        axis.set(title=names[name], ylim=(low, high), xlabel="cost: log-weights for each image", ylabel="test NLL, nats")
        _finish(axis, arrays[name]["cost"])
    _spreads(axes[len(shown)], arrays, names)
    for axis in axes[panels:]:
        axis.set_axis_off()
    figure.suptitle(
        f"{runs} runs, each of one estimate for {images} images: means with two standard errors, bands of one sd of a run"
    )
    numbers: dict[str, Any] = {"truth": truth, "truth_stderr": truth_stderr, "runs": runs, "images": images}
    return figure, numbers | {name: {key: plain_numbers(v) for key, v in each.items()} for name, each in arrays.items()}


def _limits(arrays: Mapping[str, Mapping[str, NDArray[Any]]], truth: float) -> tuple[float, float]:
    """What holds the truth, IWAE's means, and the bands that reach no further from these than they are apart."""
    core = np.append(arrays["iwae"]["mean"], truth) if "iwae" in arrays else np.array([truth])
    reach = max(0.1, float(np.ptp(core)))
    edges = np.concatenate([c["mean"] + side * c["sd"] for c in arrays.values() for side in (-1, 1)])
    inside = edges[(edges > core.min() - reach) & (edges < core.max() + reach)]
    core = np.concatenate([core, inside])
    return padded(float(core.min()), float(core.max()), 0.05)


def _band(
    axis: Axes, curve: Mapping[str, NDArray[Any]], colour: str, marker: str, label: str, runs: int, low: float, high: float
) -> None:
    cost, mean, sd = curve["cost"], curve["mean"], curve["sd"]
    error = 2 * sd / math.sqrt(runs)
    axis.errorbar(cost, mean, yerr=error, color=colour, marker=marker, lw=1.8, markersize=5, capsize=3, label=label)
    axis.fill_between(cost, mean - sd, mean + sd, color=colour, alpha=0.18, lw=0)
    if "every_k" in curve:
        open_: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "mfc": "white",
            "markersize": 6,
            "lw": 1.2,
            "ls": ":",
            "capsize": 3,
            "zorder": 4,
        }
        axis.errorbar(cost, curve["every_k"], yerr=2 * curve["every_k_stderr"], label="the same, every K counted", **open_)
    for where, edge, arrow in ((mean > high, high, "^"), (mean < low, low, "v")):
        if where.any():
            axis.plot(cost[where], np.full(where.sum(), edge), arrow, color=colour, markersize=8, clip_on=False, zorder=5)


def _spreads(axis: Axes, arrays: Mapping[str, Mapping[str, NDArray[Any]]], names: Mapping[str, str]) -> None:
    for name, curve in arrays.items():
        colour, marker = _STYLES[name]
        axis.plot(curve["cost"], curve["sd"], color=colour, marker=marker, lw=1.5, markersize=5, label=names[name])
    axis.set_yscale("log")
    axis.set_ylim(bottom=axis.get_ylim()[0] / 12)  # room for the legend
    axis.set(title="Spread", xlabel="cost: log-weights for each image", ylabel="standard deviation of a run, nats")
    _finish(axis, next(iter(arrays.values()))["cost"], ncols=2)


def _finish(axis: Axes, cost: NDArray[Any], ncols: int = 1) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator([round(float(c)) for c in cost]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=ncols)
