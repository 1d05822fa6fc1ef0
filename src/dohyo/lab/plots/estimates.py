"""A picture of estimators of one NLL against their cost: mean and spread of many runs beside the truth."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from dohyo.lab.plots.picture import BLACK, BLUE, GREEN, ORANGE, PINK, RED, Array, mark_beyond, near, plain_numbers, span, tidy

_STYLES = {"iwae": (BLACK, "o"), "sumo-harmonic": (BLUE, "s"), "sumo-geometric": (RED, "^"), "sumo-power": (PINK, "v"),
           "symmetric-sumo": (GREEN, "D"), "multilevel-rr": (ORANGE, "P")}  # fmt: skip
_COST = "cost: log-weights for each image"


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
        curves: For each estimator its expected cost, and mean and sd over runs; perhaps every_k, the mean with every K
            counted, and every_k_stderr.
        names: What each is called.
        truth: The NLL, with its standard error.
    """
    arrays = {name: {key: np.array(values, dtype=np.float64) for key, values in curve.items()} for name, curve in curves.items()}
    shown = [name for name in arrays if name != "iwae"]
    panels = len(shown) + 1
    figure = Figure(figsize=(12, 3.9 * -(-panels // 3)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(-(-panels // 3), 3, squeeze=False).ravel())
    core = np.append(arrays["iwae"]["mean"], truth) if "iwae" in arrays else np.array([truth])
    limits = span(near(core, np.concatenate([c["mean"] + side * c["sd"] for c in arrays.values() for side in (-1, 1)])), 0.05)
    for axis, name in zip(axes, shown, strict=False):
        axis.axhline(truth, color="0.35", lw=1.2, ls="--", label=f"truth, {truth:.2f} ± {2 * truth_stderr:.2f}")
        axis.axhspan(truth - 2 * truth_stderr, truth + 2 * truth_stderr, color="0.35", alpha=0.25, lw=0)
        for each in dict.fromkeys(["iwae", name]):
            if each in arrays:
                _band(axis, arrays[each], *_STYLES[each], names[each], runs, limits)
        axis.set(title=names[name], ylim=limits, xlabel=_COST, ylabel="test NLL, nats")
        _finish(axis, arrays[name]["cost"])
    _spreads(axes[len(shown)], arrays, names)
    for axis in axes[panels:]:
        axis.set_axis_off()
    many = f"{runs} runs, each of one estimate for {images} images"
    figure.suptitle(f"{many}: means with two standard errors, bands of one sd of a run")
    numbers: dict[str, Any] = {"truth": truth, "truth_stderr": truth_stderr, "runs": runs, "images": images}
    return figure, numbers | plain_numbers(arrays)


def _band(
    axis: Axes, curve: Mapping[str, Array], colour: str, marker: str, label: str, runs: int, limits: tuple[float, float]
) -> None:
    cost, mean, sd = curve["cost"], curve["mean"], curve["sd"]
    error = 2 * sd / math.sqrt(runs)
    axis.errorbar(cost, mean, yerr=error, color=colour, marker=marker, lw=1.8, markersize=5, capsize=3, label=label)
    axis.fill_between(cost, mean - sd, mean + sd, color=colour, alpha=0.18, lw=0)
    if "every_k" in curve:
        open_: dict[str, Any] = {"color": colour, "marker": marker, "mfc": "white", "markersize": 6, "lw": 1.2, "ls": ":"}
        text = "the same, every K counted"
        axis.errorbar(cost, curve["every_k"], 2 * curve["every_k_stderr"], label=text, capsize=3, zorder=4, **open_)
    mark_beyond(axis, cost, mean, limits, color=colour, markersize=8, zorder=5)


def _spreads(axis: Axes, arrays: Mapping[str, Mapping[str, Array]], names: Mapping[str, str]) -> None:
    for name, curve in arrays.items():
        colour, marker = _STYLES[name]
        axis.plot(curve["cost"], curve["sd"], color=colour, marker=marker, lw=1.5, markersize=5, label=names[name])
    axis.set_yscale("log")
    axis.set_ylim(bottom=axis.get_ylim()[0] / 12)  # room for the legend
    axis.set(title="Spread", xlabel=_COST, ylabel="standard deviation of a run, nats")
    _finish(axis, next(iter(arrays.values()))["cost"], ncols=2)


def _finish(axis: Axes, cost: Array, ncols: int = 1) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator([round(float(c)) for c in cost]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    tidy(axis)
    axis.legend(fontsize=8, frameon=False, ncols=ncols)
