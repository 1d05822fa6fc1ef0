"""Pictures of a divergence in training: the estimate beside the truth, for one run and for many."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

from dohyo.kl import TOLERANCE
from dohyo.lab.plots.picture import SMALL, Array, Records, dots, mark_beyond, near, read_curves, span, tidy, write_picture

WAYS = {"by_encoder": "by the encoder", "by_prior": "by the prior", "above": "from above"}
_KEYS = ("step", "estimate", "estimate_stderr", "objective", "stderr", *WAYS)
_COLOURS = {"by_encoder": "tab:purple", "by_prior": "tab:green", "above": "tab:brown"}
_LINEAR = 0.1  # nats: within these an axis that spans many powers of ten is linear
_LOWEST = 1e9  # nats: how far down an axis goes for runs that diverged


def plot_divergence_curves(records: Records, path: Path, ways: Sequence[str] = tuple(WAYS)) -> None:
    """Training estimate and true reverse KL against steps, beside the gaps between the ways to log p(x).

    A lower bound that is minimised goes to minus infinity, and SUMO's estimate has a heavy tail. So the axis holds the truth
    after the first twentieth of the checks, zero, and at most as much again on either side; a triangle at the edge marks each
    estimate beyond. Where the normaliser is not known, the objective stands for the reverse KL.

    Args:
        records: One for each check, as in metrics.jsonl.
        ways: Those of by_encoder, by_prior and above that mean something; by_prior does not in many dimensions.
    """
    curves, known, diverged = _read(records)
    step, truth, estimate = curves["step"], curves["truth"], curves["estimate"]
    low, high = _limits(truth, curves["stderr"], estimate, known)
    name = "reverse KL" if known else "objective"
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    main, side = figure.subplots(1, 2, width_ratios=(1.6, 1))
    if known and low < 0:
        main.axhspan(low, 0, color="0.93", zorder=0, label="below zero no KL can be")
    error = np.nan_to_num(curves["estimate_stderr"])
    main.fill_between(step, estimate - 2 * error, estimate + 2 * error, color="tab:blue", alpha=0.25, linewidth=0)
    main.plot(step, estimate, color="tab:blue", linewidth=1.2, label=_last("training estimate", estimate, error), **dots(step))
    for way in ways:
        differs = np.abs(curves[way] - truth) > np.maximum(_LINEAR, 2 * np.nan_to_num(curves["stderr"]))
        values = np.where(differs, curves[way], math.nan)
        if ((values > low) & (values < high)).any():
            main.plot(step, values, ":.", color=_COLOURS[way], linewidth=1, markersize=4, label=f"log p(x) {WAYS[way]}")
    error = np.nan_to_num(curves["stderr"])
    label = _last(f"true {name}", truth, error)
    main.errorbar(step, truth, 2 * error, color="tab:orange", linewidth=1.8, elinewidth=1, label=label, **dots(step))
    beyond = "estimate beyond the axis, to {}"
    mark_beyond(main, step, estimate, (low, high), beyond, color="tab:blue", markersize=5, zorder=5)
    if diverged.any():
        y = np.where(np.isfinite(truth), truth, high)[diverged]
        main.plot(step[diverged], y, "x", color="tab:red", markersize=7, zorder=4, label="found to have diverged")
    main.set(ylim=(low, high), ylabel=f"{name}, nats ± two standard errors")
    main.legend(fontsize=SMALL + 1, framealpha=0.9, edgecolor="none")
    _gaps(side, curves, ways)
    for axis in (main, side):
        tidy(axis, whole=5)
        axis.set(xlabel="step", xlim=span(step, 0.02))
    numbers = {"diverged": diverged.tolist(), "normalised": known, "axis": [low, high]}
    write_picture(figure, curves | numbers, path)


def plot_reverse_kl_curves(curves: Mapping[tuple[str, int], Sequence[Records]]) -> tuple[Figure, dict[str, Any]]:
    """The training estimate (above) and the true reverse KL (below) against steps: a column for each cost, a colour for each
    label. The axes are linear within 0.1 nats, below within 0.01, and logarithmic beyond. They hold runs that did not diverge,
    and of others the estimates down to -10^9; a triangle marks what is beyond, a cross the first check that found divergence.

    Args:
        curves: By label and cost the records of each run; they differ in the seed alone.
    """
    costs = sorted({cost for _, cost in curves})
    labels = list(dict.fromkeys(label for label, _ in curves))
    figure = Figure(figsize=(1.2 + 3.6 * len(costs), 6.2), layout="constrained")
    panels = figure.subplots(2, len(costs), squeeze=False, sharex=True, sharey="row")
    runs = [(*key, *_read(records)) for key, own in curves.items() for records in own]
    rows = (("estimate", "estimate_stderr", _LINEAR), ("truth", "stderr", _LINEAR / 10))
    limits = [
        _sound_limits([(values[key], bool(diverged.any())) for *_, values, _, diverged in runs], linear)
        for key, _, linear in rows
    ]
    if all(known for *_, known, _ in runs):
        limits[1] = (max(limits[1][0], -_LINEAR), limits[1][1])  # below zero a divergence is noise
    for row, own_limits, (*_, linear) in zip(panels, limits, rows, strict=True):
        for axis in row:
            _symmetric_log(axis, linear)
            axis.set_ylim(own_limits)
    numbers, seen, normalised = [], set(), True
    for label, cost, values, known, diverged in runs:
        normalised = normalised and known
        column, colour = costs.index(cost), f"C{labels.index(label) % 10}"
        first = int(diverged.argmax()) if diverged.any() else None
        for row, (key, error, _) in enumerate(rows):
            axis, y, spread = panels[row][column], values[key], 2 * np.nan_to_num(values[error])
            shown = None if label in seen else label
            seen.add(label)
            axis.plot(values["step"], y, color=colour, linewidth=1.3, label=shown, **dots(values["step"]))
            axis.fill_between(values["step"], y - spread, y + spread, color=colour, alpha=0.1, linewidth=0)
            if first is not None:
                at = np.clip(y[first], *limits[row])
                axis.plot(values["step"][first], at, "x", color=colour, markersize=8, markeredgewidth=2, clip_on=False)
            mark_beyond(axis, values["step"], y, limits[row], color=colour, markersize=5, zorder=5)
        numbers.append({"label": label, "cost": cost, "normalised": known, "diverged": diverged.tolist()} | values)
    panels[0][0].set_ylabel("training estimate, nats")
    panels[1][0].set_ylabel("true reverse KL, nats" if normalised else "true objective, nats")
    for axis in panels.flat:
        tidy(axis, whole=5)
    for column, cost in enumerate(costs):
        panels[0][column].set_title(f"cost {cost:g}")
        panels[1][column].set_xlabel("step")
    figure.legend(loc="outside lower center", ncols=min(len(labels), 2 + 2 * len(costs)), frameon=False)
    return figure, {"curves": numbers}


def _read(records: Records) -> tuple[dict[str, Array], bool, Array]:
    """The curves, NaN where not finite; whether the normaliser is known; which checks found divergence.

    Each way is moved by the normaliser, as the estimate has been; `truth` is the reverse KL, or else the objective.
    """
    curves = read_curves(records, (*_KEYS, "reverse_kl", "diverged"))
    kl, diverged = curves.pop("reverse_kl"), curves.pop("diverged") == 1
    known = bool(np.isfinite(kl).any())
    shift = float(np.nanmedian(kl - curves["objective"])) if known else 0.0
    for key in ("objective", *WAYS):
        curves[key] = curves[key] + shift
    curves["truth"] = curves.pop("objective")
    return curves, known, diverged


def _limits(truth: Array, stderr: Array, estimate: Array, known: bool) -> tuple[float, float]:
    """Limits that hold the later truth, zero for a KL, and whatever else is near these."""
    late = len(truth) // 20
    error = 2 * np.nan_to_num(stderr)
    bars = np.stack([truth - error, truth + error], 1)
    shown, others = bars[late:].ravel(), np.concatenate([bars[:late].ravel(), estimate])
    shown, others = shown[np.isfinite(shown)], others[np.isfinite(others)]
    if not len(shown):
        shown = np.quantile(others, [0.25, 0.75]) if len(others) else np.array([0.0, 1.0])
    return span(near(np.append(shown, 0.0) if known else shown, others), 0.06)


def _sound_limits(runs: Sequence[tuple[Array, bool]], linear: float) -> tuple[float, float]:
    """Limits that hold ten times what runs that did not diverge have, and the others down to -10^9."""
    finite = [(values[np.isfinite(values)], lost) for values, lost in runs]
    every = np.concatenate([[-linear, linear], *(values for values, _ in finite)])
    sound = np.concatenate([[-linear, linear], *(values for values, lost in finite if not lost)])
    return max(-_LOWEST, min(10 * sound.min(), every.min())), 10 * sound.max()


def _gaps(axis: Axes, curves: dict[str, Array], ways: Sequence[str]) -> None:
    """How far the other ways to log p(x) are from the encoder's."""
    _symmetric_log(axis)
    for way in ways:
        if way != "by_encoder":
            gap = curves[way] - curves["by_encoder"]
            style = "--" if way == "above" else "-"
            axis.plot(curves["step"], gap, style, color=_COLOURS[way], label=WAYS[way], **dots(curves["step"]))
    axis.axhline(TOLERANCE, color="tab:red", linewidth=0.8, linestyle="--", label="the encoder is lost above")
    axis.set_title("log p(x) less that by the encoder, nats", fontsize=SMALL + 2)
    axis.legend(fontsize=SMALL, frameon=False)


def _symmetric_log(axis: Axes, linear: float = _LINEAR) -> None:
    """Called before anything is plotted, so that the margins are right. Few ticks, however many powers of ten there are."""
    axis.set_yscale("symlog", linthresh=linear, linscale=0.6)
    locator = SymmetricalLogLocator(base=10, linthresh=linear)
    locator.set_params(numticks=7)
    axis.yaxis.set_major_locator(locator)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.axhline(0, color="black", linewidth=0.8)


def _last(name: str, values: Array, error: Array) -> str:
    return f"{name}: {values[-1]:.3g} ± {error[-1]:.1g} at the end" if np.isfinite(values[-1]) else name
