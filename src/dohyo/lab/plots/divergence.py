"""Pictures of a divergence in training: the estimate beside the truth, for one run and for many."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, SymmetricalLogLocator
from numpy.typing import NDArray

from dohyo.errors import DohyoError
from dohyo.kl import TOLERANCE
from dohyo.lab.plots.picture import padded, plain_numbers, write_picture

WAYS = {"by_encoder": "by the encoder", "by_prior": "by the prior", "above": "from above"}
_KEYS = ("step", "estimate", "estimate_stderr", "objective", "stderr", *WAYS)
_STYLES = {"by_encoder": ":", "by_prior": "-", "above": "--"}
_COLOURS = {"by_encoder": "tab:purple", "by_prior": "tab:green", "above": "tab:brown"}
_SMALL = 8  # points
_LINEAR = 0.1  # nats: within these an axis that spans many powers of ten is linear


@dataclass(frozen=True)
class Curve:
    """One run among others in `plot_reverse_kl_curves`; runs that differ by the seed alone have the same label and cost."""

    label: str
    cost: float
    records: Sequence[dict[str, Any]]


def plot_divergence_curves(records: Sequence[dict[str, Any]], path: Path, ways: Sequence[str] = tuple(WAYS)) -> None:
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
    main.plot(step, estimate, color="tab:blue", linewidth=1.2, label=_last("training estimate", estimate, error), **_dots(step))
    for way in ways:
        differs = np.abs(curves[way] - truth) > np.maximum(_LINEAR, 2 * np.nan_to_num(curves["stderr"]))
        values = np.where(differs, curves[way], math.nan)
        if ((values > low) & (values < high)).any():
            main.plot(step, values, ":.", color=_COLOURS[way], linewidth=1, markersize=4, label=f"log p(x) {WAYS[way]}")
    error = np.nan_to_num(curves["stderr"])
    label = _last(f"true {name}", truth, error)
    main.errorbar(step, truth, 2 * error, color="tab:orange", linewidth=1.8, elinewidth=1, label=label, **_dots(step))
    _mark_beyond(main, step, estimate, low, high)
    if diverged.any():
        y = np.where(np.isfinite(truth), truth, high)[diverged]
        main.plot(step[diverged], y, "x", color="tab:red", markersize=7, zorder=4, label="found to have diverged")
    main.set(ylim=(low, high), ylabel=f"{name}, nats ± two standard errors")
    main.legend(fontsize=_SMALL + 1, framealpha=0.9, edgecolor="none")
    _gaps(side, curves, ways)
    for axis in (main, side):
        _finish(axis, step)
    numbers: dict[str, Any] = {key: plain_numbers(values) for key, values in curves.items()}
    numbers |= {"diverged": diverged.tolist(), "normalised": known, "axis": [low, high]}
    write_picture(figure, numbers, path)


def plot_reverse_kl_curves(curves: Sequence[Curve], path: Path) -> None:
    """The training estimate (above) and the true reverse KL (below) against steps: a column for each cost, a colour for each
    label. The axes are linear within 0.1 nats and logarithmic beyond; a cross marks the first check that found divergence."""
    if not curves:
        raise DohyoError("there are no curves to plot; give at least one Curve(label, cost, records)")
    costs = sorted({curve.cost for curve in curves})
    labels = list(dict.fromkeys(curve.label for curve in curves))
    figure = Figure(figsize=(1.2 + 3.6 * len(costs), 6.2), layout="constrained")
    panels = figure.subplots(2, len(costs), squeeze=False, sharex=True, sharey="row")
    for axis in panels.flat:
        _symmetric_log(axis)
    numbers, seen, normalised = [], set(), True
    for curve in curves:
        values, known, diverged = _read(curve.records)
        normalised = normalised and known
        column, colour = costs.index(curve.cost), f"C{labels.index(curve.label) % 10}"
        first = int(diverged.argmax()) if diverged.any() else None
        for row, key, error in ((0, "estimate", "estimate_stderr"), (1, "truth", "stderr")):
            axis, y, spread = panels[row][column], values[key], 2 * np.nan_to_num(values[error])
            label = None if curve.label in seen else curve.label
            seen.add(curve.label)
            axis.plot(values["step"], y, color=colour, linewidth=1.3, label=label, **_dots(values["step"]))
            axis.fill_between(values["step"], y - spread, y + spread, color=colour, alpha=0.1, linewidth=0)
            if first is not None:
                axis.plot(values["step"][first], y[first], "x", color=colour, markersize=8, markeredgewidth=2)
        entry = {key: plain_numbers(value) for key, value in values.items()}
        numbers.append({"label": curve.label, "cost": curve.cost, "normalised": known, "diverged": diverged.tolist(), **entry})
    truth = "true reverse KL, nats" if normalised else "true objective, nats"
    for row, name in ((0, "training estimate, nats"), (1, truth)):
        panels[row][0].set_ylabel(name)
        for axis in panels[row]:
            _finish(axis, None, label=row == 1)
    for column, cost in enumerate(costs):
        panels[0][column].set_title(f"cost {cost:g}")
    figure.legend(loc="outside lower center", ncols=min(len(labels), 2 + 2 * len(costs)), frameon=False)
    write_picture(figure, {"curves": numbers}, path)


def _read(records: Sequence[dict[str, Any]]) -> tuple[dict[str, NDArray[Any]], bool, NDArray[Any]]:
    """The curves, NaN where not finite; whether the normaliser is known; which checks found divergence.

    Each way is moved by the normaliser, as the estimate has been; `truth` is the reverse KL, or else the objective.
    """
    if not records:
        raise DohyoError("there are no records to plot; train up to the first check at least")
    missing = sorted({key for key in (*_KEYS, "reverse_kl", "diverged") for record in records if key not in record})
    if missing:
        raise DohyoError(f"a record lacks {', '.join(missing)}; each needs {', '.join(_KEYS)}, reverse_kl and diverged")
    curves = {key: np.array([math.nan if r[key] is None else r[key] for r in records], dtype=np.float64) for key in _KEYS}
    kl = np.array([math.nan if r["reverse_kl"] is None else r["reverse_kl"] for r in records], dtype=np.float64)
    known = bool(np.isfinite(kl).any())
    shift = float(np.nanmedian(kl - curves["objective"])) if known else 0.0
    curves = {key: np.where(np.isfinite(values), values, math.nan) for key, values in curves.items()}
    for key in ("objective", *WAYS):
        curves[key] = curves[key] + shift
    curves["truth"] = curves.pop("objective")
    return curves, known, np.array([bool(r["diverged"]) for r in records])


def _limits(truth: NDArray[Any], stderr: NDArray[Any], estimate: NDArray[Any], known: bool) -> tuple[float, float]:
    """Limits that hold the later truth, zero for a KL, and what else is no further from these than they are apart."""
    late = len(truth) // 20
    error = 2 * np.nan_to_num(stderr)
    bars = np.stack([truth - error, truth + error], 1)
    shown, others = bars[late:].ravel(), np.concatenate([bars[:late].ravel(), estimate])
    shown, others = shown[np.isfinite(shown)], others[np.isfinite(others)]
    if not len(shown):
        shown = np.quantile(others, [0.25, 0.75]) if len(others) else np.array([0.0, 1.0])
    if known:
        shown = np.append(shown, 0.0)
    reach = max(0.1, float(np.ptp(shown)))
    shown = np.concatenate([shown, others[(others > shown.min() - reach) & (others < shown.max() + reach)]])
    return padded(float(shown.min()), float(shown.max()), 0.06)


def _mark_beyond(axis: Axes, step: NDArray[Any], estimate: NDArray[Any], low: float, high: float) -> None:
    """A triangle at the edge for each estimate beyond it."""
    for where, edge, marker in ((estimate > high, high, "^"), (estimate < low, low, "v")):
        if where.any():
            furthest = estimate[where].max() if marker == "^" else estimate[where].min()
            label, at = f"estimate beyond the axis, to {furthest:.3g}", np.full(where.sum(), edge)
            (line,) = axis.plot(step[where], at, marker, color="tab:blue", markersize=5, clip_on=False, label=label, zorder=5)
            line.set_in_layout(False)  # else the unclipped marks widen the margins


def _gaps(axis: Axes, curves: dict[str, NDArray[Any]], ways: Sequence[str]) -> None:
    """How far the other ways to log p(x) are from the encoder's."""
    _symmetric_log(axis)
    for way in ways:
        if way != "by_encoder":
            gap = curves[way] - curves["by_encoder"]
            axis.plot(curves["step"], gap, _STYLES[way], color=_COLOURS[way], label=WAYS[way], **_dots(curves["step"]))
    axis.axhline(TOLERANCE, color="tab:red", linewidth=0.8, linestyle="--", label="the encoder is lost above")
    axis.set_title("log p(x) less that by the encoder, nats", fontsize=_SMALL + 2)
    axis.legend(fontsize=_SMALL, frameon=False)


def _symmetric_log(axis: Axes) -> None:
    """Before anything is plotted, so that the margins are right. Few ticks, however many powers of ten there are."""
    axis.set_yscale("symlog", linthresh=_LINEAR, linscale=0.6)
    locator = SymmetricalLogLocator(base=10, linthresh=_LINEAR)
    locator.set_params(numticks=7)
    axis.yaxis.set_major_locator(locator)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.axhline(0, color="black", linewidth=0.8)


def _finish(axis: Axes, step: NDArray[Any] | None, label: bool = True) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    if step is not None:
        axis.set_xlim(*padded(float(np.nanmin(step)), float(np.nanmax(step)), 0.02))
    if label:
        axis.set_xlabel("step")


def _last(name: str, values: NDArray[Any], error: NDArray[Any]) -> str:
    return f"{name}: {values[-1]:.3g} ± {error[-1]:.1g} at the end" if np.isfinite(values[-1]) else name


def _dots(step: NDArray[Any]) -> dict[str, Any]:
    return {"marker": ".", "markersize": 5} if len(step) <= 40 else {}
