"""Pictures of how fast the terms of a series fall, and of their cross terms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from dohyo.lab.plots.picture import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, tidy

_STYLES = ((BLUE, "o"), (RED, "s"), (GREEN, "^"))
_SCALES = {"multilevel": 1}  # the cross terms are multiplied by (i j) to this power, else by (i j)^2


def plot_rates(
    ks: Mapping[str, Sequence[int]],
    curves: Mapping[str, Mapping[str, Tensor]],
    rates: Mapping[str, Mapping[str, Sequence[str]]],
    series: Mapping[str, str],
    fit_from: int,
) -> tuple[Figure, dict[str, Any]]:
    """Second moments of values (left) and gradients (right) against k, a row for each model, with reference rates.

    Args:
        curves: For each model and series the moments of values and of gradients, (2, trials, ks).
        rates: For each model and series the slopes of both, fitted from the k `fit_from` on, as text.
    """
    figure = Figure(figsize=(10.5, 4.3 * len(curves) + 0.3), layout="constrained")
    axes = figure.subplots(len(curves), 2, squeeze=False)
    numbers: dict[str, Any] = {"fit_from": fit_from}
    for row, (model, by_series) in zip(axes, curves.items(), strict=True):
        k = np.array(ks[model], dtype=np.float64)
        numbers[model] = {"k": list(ks[model])}
        for column, (axis, symbol) in enumerate(zip(row, ("value: E[d²]", "gradient: E‖∇d‖²"), strict=True)):
            for (name, both), (colour, marker) in zip(by_series.items(), _STYLES, strict=False):
                trials = both[column].numpy()
                mean, error = trials.mean(0), trials.std(0, ddof=1) / math.sqrt(len(trials))
                label = f"{series[name]}, slope {rates[model][name][column]}"
                down = np.minimum(2 * error, 0.9 * mean)  # a logarithmic axis has no room below zero
                style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "capsize": 2, "lw": 1.3}
                axis.errorbar(k, mean, yerr=[down, 2 * error], label=label, **style)
                what = {"mean": mean, "stderr": error, "slope": rates[model][name][column]}
                numbers[model].setdefault(name, {})[("value", "gradient")[column]] = what
            top = float(max(both[column].mean(0)[0] for both in by_series.values()))
            _references(axis, k, top)
            axis.set(title=f"{model}, {symbol}", xlabel="k", ylabel="second moment")
            _finish(axis)
    figure.suptitle(f"Terms d_k of each series; bars are two standard errors over trials, slopes are fitted from k = {fit_from}")
    return figure, numbers


def plot_cross_terms(ks: Sequence[int], tables: Mapping[str, Tensor], series: Mapping[str, str]) -> tuple[Figure, dict[str, Any]]:
    """E[d_i d_j] times a power of i j against j, a line for each i and a panel for each series: level where the rate is right.

    Args:
        tables: For each series (trials, ks, ks), with the terms where i < j; a series may have fewer ks.
    """
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    k = np.array(ks, dtype=np.float64)
    numbers: dict[str, Any] = {"k": list(ks)}
    colours = (BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY)
    for axis, (name, trials) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True):
        power, count = _SCALES.get(name, 2), trials.shape[-1]
        scaled = trials.numpy() * (k[:count, None] * k[:count]) ** power
        mean, error = scaled.mean(0), scaled.std(0, ddof=1) / math.sqrt(len(scaled))
        for i in range(count - 1):
            style = {"color": colours[i % len(colours)], "marker": "os^Dv<>"[i % 7], "markersize": 5, "capsize": 2, "lw": 1.2}
            axis.errorbar(k[i + 1 : count] * 1.03**i, mean[i, i + 1 :], yerr=2 * error[i, i + 1 :], label=f"i = {ks[i]}", **style)
        raised = f"(i j){'²' if power == 2 else ''}"
        axis.axhline(0, color="black", lw=0.8)
        axis.set(title=f"{series[name]}: {raised} E[d_i d_j]", xlabel="j", ylim=(min(0.0, axis.get_ylim()[0]), None))
        axis.set_xscale("log", base=2)
        axis.set_xticks(k[1:], [str(v) for v in ks[1:]])
        axis.minorticks_off()
        tidy(axis)
        numbers[name] = {"power": power, "mean": mean, "stderr": error}
    figure.axes[0].legend(fontsize=8, frameon=False, ncols=2)
    figure.suptitle("Cross terms, multiplied by their rate: the lines become level; bars are two standard errors")
    return figure, numbers


def _references(axis: Axes, k: Any, top: float) -> None:
    """Lines of k^-2 and k^-4 through the first point, behind everything."""
    for power, style in ((2, "--"), (4, ":")):
        line = 2 * top * k**-power
        axis.plot(k, line, style, color="0.45", lw=1.2, zorder=0)
        label = f"k⁻{'²' if power == 2 else '⁴'}"
        axis.annotate(label, (k[-1], line[-1]), (3, 0), textcoords="offset points", va="center", color="0.35")


def _finish(axis: Axes) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axis.set_yscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(low, high * 1.25)
    tidy(axis)
    axis.legend(fontsize=8.5, frameon=False, loc="lower left")
