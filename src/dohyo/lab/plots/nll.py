"""Pictures of a test NLL against what it depends on: the training objective, the estimator, the clip norm, the time.

Each returns the figure and its numbers.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from dohyo.lab.plots.picture import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, SMALL, Array, mark_beyond, near, span, tidy

_ROW_STYLES = ((BLACK, "o"), (BLUE, "s"), (SKY, "X"), (GREY, "v"), (RED, "^"), (PINK, "<"), (GREEN, "D"), (ORANGE, "P"),
               (ORANGE, "d"), (BLUE, "*"), (RED, "h"), (GREEN, ">"), (PINK, "*"), (SKY, "p"))  # fmt: skip
_STYLES = {"iwae": (BLACK, "o"), "sumo-harmonic": (BLUE, "s"), "sumo-geometric": (RED, "^"), "sumo-power": (PINK, "v"),
           "symmetric-sumo": (GREEN, "D"), "multilevel-rr": (ORANGE, "P")}  # fmt: skip
_COST = "cost: log-weights for each image"
_TIME_STYLES = ((BLACK, "o"), (GREEN, "s"), (ORANGE, "D"), (PINK, "^"), (BLUE, "v"), (RED, "P"))
_NLL = "test NLL, nats (lower is better)"
Paper = Mapping[str, Mapping[int, float]]  # the paper's NLL by row and cost


def plot_table(
    panels: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str], papers: Mapping[str, Paper], titles: Mapping[str, str]
) -> tuple[Figure, dict[str, Any]]:
    """Means with bars of one standard deviation over the replicas.

    Args:
        panels: For each data set `epochs`, and for each of its `rows` cost, mean and sd.
        labels: What each row is called, in the order of the marks.
        papers: The paper's NLL by data set; open marks where it is near, words where it is not.
        titles: What each data set is called.
    """
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, len(panels), squeeze=False)[0])
    looks = {row: (label, *style) for (row, label), style in zip(labels.items(), _ROW_STYLES, strict=True)}
    for axis, (data, panel) in zip(axes, panels.items(), strict=True):
        _panel(axis, panel["rows"], looks, papers.get(data, {}))
        axis.set_title(f"{titles[data]}, epochs: {panel['epochs']}")
    shown = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    order = [label for label in [*labels.values(), "the paper's"] if label in shown]
    handles = [shown[label] for label in order]
    figure.legend(handles, order, loc="outside lower center", ncols=2 * len(panels), frameon=False, fontsize=9)
    return figure, {
        data: {"epochs": panel["epochs"], "ours": _arrays(panel["rows"]), "paper": papers.get(data, {})}
        for data, panel in panels.items()
    }


def _panel(axis: Axes, rows: Mapping[str, Any], looks: Mapping[str, tuple[str, str, str]], paper: Paper) -> None:
    costs = sorted({cost for curve in rows.values() for cost in curve["cost"]})
    edges = [mean + side * sd for c in rows.values() for mean, sd in zip(c["mean"], c["sd"], strict=True) for side in (-1, 1)]
    reach = max(edges) - min(edges) + 1.0
    theirs = {row: {k: nll for k, nll in at.items() if k in costs} for row, at in paper.items()}
    far = [nll for at in theirs.values() for nll in at.values() if not min(edges) - reach < nll < max(edges) + reach]
    for place, (row, curve) in enumerate(rows.items()):
        shift = 0.7 * ((place + 0.5) / len(rows) - 0.5)
        label, colour, marker = looks[row]
        at = [costs.index(cost) + shift for cost in curve["cost"]]
        axis.errorbar(at, curve["mean"], yerr=curve["sd"], color=colour, marker=marker, ls="none", capsize=3, label=label)
        near = {k: nll for k, nll in theirs.get(row, {}).items() if nll not in far}
        if near:
            open_: dict[str, Any] = {"marker": marker, "ls": "none", "mfc": "none", "color": colour, "markersize": 9}
            axis.plot([costs.index(k) + shift for k in near], list(near.values()), label="the paper's", **open_)
            edges += near.values()
    axis.set_ylim(*span(np.array(edges), 0.08))
    if far:
        text = f"the paper's, far longer trained: {min(far):.2f} to {max(far):.2f}"
        axis.annotate(text, (0.98, 0.02), xycoords="axes fraction", ha="right", va="bottom", fontsize=9, color="0.3")
    axis.set_xticks(range(len(costs)), [str(cost) for cost in costs])
    axis.set_xlim(-0.5, len(costs) - 0.5)
    for place in range(1, len(costs)):
        axis.axvline(place - 0.5, color="0.85", lw=1)
    axis.set(xlabel="k: expected log-weights for each image", ylabel=_NLL)
    tidy(axis)
    axis.grid(visible=False, axis="x")


def plot_estimates(
    curves: Mapping[str, Mapping[str, Any]], names: Mapping[str, str], truth: tuple[float, float], runs: int, images: int
) -> tuple[Figure, dict[str, Any]]:
    """A panel for each unbiased estimator with IWAE and the truth in it, and one of all spreads.

    Args:
        curves: For each estimator its expected cost, and mean and sd over runs; perhaps every_k, the mean with every K
            counted, and every_k_stderr.
        names: What each is called.
        truth: The NLL, with its standard error.
    """
    arrays, (nll, stderr) = _arrays(curves), truth
    shown = [name for name in arrays if name != "iwae"]
    panels = len(shown) + 1
    figure = Figure(figsize=(12, 3.9 * -(-panels // 3)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(-(-panels // 3), 3, squeeze=False).ravel())
    core = np.append(arrays["iwae"]["mean"], nll) if "iwae" in arrays else np.array([nll])
    limits = span(near(core, np.concatenate([c["mean"] + side * c["sd"] for c in arrays.values() for side in (-1, 1)])), 0.05)
    for axis, name in zip(axes, shown, strict=False):
        axis.axhline(nll, color="0.35", lw=1.2, ls="--", label=f"truth, {nll:.2f} ± {2 * stderr:.2f}")
        axis.axhspan(nll - 2 * stderr, nll + 2 * stderr, color="0.35", alpha=0.25, lw=0)
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
    return figure, {"truth": nll, "truth_stderr": stderr, "runs": runs, "images": images, **arrays}


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


def plot_clipping(curve: Mapping[str, Sequence[Any]], iwae: tuple[float, float] | None) -> tuple[Figure, dict[str, Any]]:
    """Means with bars of one standard deviation over the replicas.

    Args:
        curve: For each clip norm, None for no clipping, the mean and sd of the NLL and the share of clipped steps.
        iwae: Mean and sd of IWAE's NLL, if it is known.
    """
    arrays = _arrays(curve)
    labels = ["none" if norm is None else f"{norm:g}" for norm in curve["norm"]]
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    at, share = np.arange(len(labels)), 100 * arrays["share"]
    for axis, x, label in ((left, at, "clip norm of theta's gradient"), (right, share, "share of steps clipped, %")):
        if iwae is not None:
            axis.axhspan(iwae[0] - iwae[1], iwae[0] + iwae[1], color=RED, alpha=0.2, lw=0)
            axis.axhline(iwae[0], color=RED, lw=1.2, ls="--", label="IWAE at the same cost")
        axis.errorbar(x, arrays["mean"], arrays["sd"], color=BLUE, marker="o", capsize=3, label="SUMO")
        axis.set_xlabel(label)
        tidy(axis)
    left.set_xticks(at, labels)
    left.set_ylabel(_NLL)
    for x, y, label in zip(share, arrays["mean"], labels, strict=True):
        right.annotate(label, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=SMALL, color="0.3")
    right.legend(frameon=False, fontsize=9)
    return figure, arrays | {"iwae": None if iwae is None else {"mean": iwae[0], "sd": iwae[1]}}


def plot_times(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> tuple[Figure, dict[str, Any]]:
    """By data set and label: after some seconds the mean NLL, with bars of one standard deviation (sd) over the replicas."""
    most = max(len(rows) for rows in panels.values())
    figure = Figure(figsize=(6.5 * len(panels), 1.6 + 0.4 * most), layout="constrained")
    for axis, (data, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        times = next(iter(rows.values()))["seconds"]
        for i, (seconds, (colour, marker)) in enumerate(zip(times, cycle(_TIME_STYLES), strict=False)):
            at = np.arange(len(rows)) + 0.5 * ((i + 0.5) / len(times) - 0.5)
            mean, sd = ([curve[key][i] for curve in rows.values()] for key in ("mean", "sd"))
            axis.errorbar(mean, at, xerr=sd, color=colour, marker=marker, ls="none", capsize=3, label=f"{seconds:g} s")
        axis.set_yticks(range(len(rows)), list(rows))
        axis.invert_yaxis()
        axis.set(title=data, xlabel="test NLL by annealed weights, nats (lower is better)")
        tidy(axis)
        axis.legend(title="training", frameon=False, fontsize=9)
    return figure, _arrays(panels)


def _arrays(values: Any) -> Any:
    """Lists of numbers, in dicts of any depth, as arrays."""
    return {key: _arrays(each) for key, each in values.items()} if isinstance(values, Mapping) else np.array(values, np.float64)
