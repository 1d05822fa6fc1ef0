"""A picture of test NLLs against cost: a panel for each data set, a mark for each training objective."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dohyo.lab.plots.picture import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, padded, plain_numbers, tidy

_STYLES = ((BLACK, "o"), (BLUE, "s"), (SKY, "X"), (GREY, "v"), (RED, "^"), (PINK, "<"), (GREEN, "D"), (ORANGE, "P"))


def plot_table(
    panels: Mapping[str, Mapping[str, Any]],
    labels: Mapping[str, str],
    papers: Mapping[str, Mapping[str, Mapping[int, float]]],
    titles: Mapping[str, str],
) -> tuple[Figure, dict[str, Any]]:
    """Means with bars of one standard deviation over the replicas.

    Args:
        panels: For each data set `epochs`, and for each of its `rows` cost, mean and sd.
        labels: What each row is called, in the order of the marks.
        papers: The paper's NLL by data set, row and cost; open marks where it is near, words where it is not.
        titles: What each data set is called.
    """
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, len(panels), squeeze=False)[0])
    styles = dict(zip(labels, _STYLES, strict=False))
    for axis, (data, panel) in zip(axes, panels.items(), strict=True):
        _panel(axis, panel["rows"], labels, styles, papers.get(data, {}))
        axis.set_title(f"{titles[data]}, epochs: {panel['epochs']}")
    shown = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    order = [label for label in [*labels.values(), "the paper's"] if label in shown]
    handles = [shown[label] for label in order]
    figure.legend(handles, order, loc="outside lower center", ncols=2 * len(panels), frameon=False, fontsize=9)
    numbers = {}
    for data, panel in panels.items():
        paper = {row: {str(cost): value for cost, value in at.items()} for row, at in papers.get(data, {}).items()}
        ours = {row: {key: np.array(v, dtype=np.float64) for key, v in curve.items()} for row, curve in panel["rows"].items()}
        numbers[data] = {"epochs": panel["epochs"], "ours": plain_numbers(ours), "paper": paper}
    return figure, numbers


def _panel(
    axis: Axes,
    rows: Mapping[str, Mapping[str, Any]],
    labels: Mapping[str, str],
    styles: Mapping[str, tuple[str, str]],
    paper: Mapping[str, Mapping[int, float]],
) -> None:
    costs = sorted({cost for curve in rows.values() for cost in curve["cost"]})
    edges = [mean + side * sd for c in rows.values() for mean, sd in zip(c["mean"], c["sd"], strict=True) for side in (-1, 1)]
    reach = max(edges) - min(edges) + 1.0
    theirs = {row: {k: nll for k, nll in at.items() if k in costs} for row, at in paper.items()}
    far = [nll for at in theirs.values() for nll in at.values() if not min(edges) - reach < nll < max(edges) + reach]
    for place, (row, curve) in enumerate(rows.items()):
        shift = 0.7 * ((place + 0.5) / len(rows) - 0.5)
        colour, marker = styles[row]
        at = [costs.index(cost) + shift for cost in curve["cost"]]
        axis.errorbar(at, curve["mean"], yerr=curve["sd"], color=colour, marker=marker, ls="none", capsize=3, label=labels[row])
        near = {k: nll for k, nll in theirs.get(row, {}).items() if nll not in far}
        if near:
            open_: dict[str, Any] = {"marker": marker, "ls": "none", "mfc": "none", "color": colour, "markersize": 9}
            axis.plot([costs.index(k) + shift for k in near], list(near.values()), label="the paper's", **open_)
            edges += near.values()
    axis.set_ylim(*padded(min(edges), max(edges), 0.08))
    if far:
        text = f"the paper's, far longer trained: {min(far):.2f} to {max(far):.2f}"
        axis.annotate(text, (0.98, 0.02), xycoords="axes fraction", ha="right", va="bottom", fontsize=9, color="0.3")
    axis.set_xticks(range(len(costs)), [str(cost) for cost in costs])
    axis.set_xlim(-0.5, len(costs) - 0.5)
    for place in range(1, len(costs)):
        axis.axvline(place - 0.5, color="0.85", lw=1)
    axis.set(xlabel="k: expected log-weights for each image", ylabel="test NLL, nats (lower is better)")
    tidy(axis)
    axis.grid(visible=False, axis="x")
