"""Pictures of what a policy earns."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from dohyo.errors import DohyoError
from dohyo.lab.plots.picture import padded, plain_numbers, write_picture

Records = Sequence[dict[str, Any]]
_KEYS = ("step", "seconds", "reward", "best_reward", "entropy")
_SMALL = 8  # points
_FEW = 40  # points of a curve that are still drawn as dots
_RATIO = 20  # of the longest run's seconds or steps to the shortest's: beyond it their axis is logarithmic


def plot_reward_curves(runs: Mapping[str, Records | Sequence[Records]], path: Path, best_known: float | None = None) -> None:
    """Mean reward of a batch and best reward so far, against steps and against seconds, and the policy's entropy.

    Several runs under one name are seeds of the same: their mean is drawn in a band from the lowest to the highest, as far as
    the shortest of them goes. The reward axis leaves out the first twentieth of each run, where rewards may be very low, and
    the entropy's axis what is far from the rest, for estimates have heavy tails.

    Args:
        runs: Records as in metrics.jsonl, with step, seconds, reward, best_reward and entropy, under each name; or a list
            of such, one for each seed.
        best_known: Drawn as a line.
    """
    if not runs:
        raise DohyoError("there are no runs to plot; give at least one, such as {'latent': records}")
    curves = {name: [_read(records, name) for records in _seeds(given)] for name, given in runs.items()}
    figure = Figure(figsize=(13, 4.4 + 0.1 * (len(curves) if len(curves) > 1 else 0)), layout="constrained")
    by_step, by_second, entropy = figure.subplots(1, 3)
    by_second.sharey(by_step)
    for seeds, colour in zip(curves.values(), _colours(len(curves)), strict=True):
        for axis, clock in ((by_step, "step"), (by_second, "seconds")):
            _draw(axis, seeds, clock, "reward", colour, linewidth=1.1)
            _draw(axis, seeds, clock, "best_reward", colour, linewidth=1.8, linestyle="--", drawstyle="steps-post")
        _draw(entropy, seeds, "step", "entropy", colour, linewidth=1.3)
    limits = _limits([one for seeds in curves.values() for one in seeds], best_known)
    for axis in (by_step, by_second):
        if best_known is not None:
            axis.axhline(best_known, color="black", linewidth=1, linestyle=":")
        axis.set(ylim=limits, ylabel="reward")
    entropy.set(ylim=_bulk([one["entropy"] for seeds in curves.values() for one in seeds]), ylabel="entropy, nats")
    for clock, axes in (("seconds", [by_second]), ("step", [by_step, entropy])):
        ends = [float(one[clock][-1]) for seeds in curves.values() for one in seeds]
        if max(ends) > _RATIO * min(ends) > 0:
            for axis in axes:
                axis.set_xscale("log")
    for axis, label in ((by_step, "step"), (by_second, "seconds"), (entropy, "step")):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel(label)
        if axis.get_xscale() == "linear":
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=label == "step", min_n_ticks=1))
            axis.set_xlim(left=0)
    _legend(figure, curves, best_known)
    numbers = {name: [_plain(one) for one in seeds] for name, seeds in curves.items()}
    write_picture(figure, {"best_known": best_known, "runs": numbers, "axis": list(limits)}, path)


def _seeds(given: Records | Sequence[Records]) -> Sequence[Records]:
    """One run, or several of one name."""
    return [given] if not given or isinstance(given[0], dict) else given  # type: ignore[list-item,return-value]


def _read(records: Records, name: str) -> dict[str, NDArray[Any]]:
    if not records:
        raise DohyoError(f"a run of {name} has no records; train it up to the first check at least")
    missing = sorted({key for key in _KEYS for record in records if key not in record})
    if missing:
        raise DohyoError(f"a record of {name} lacks {', '.join(missing)}; each needs {', '.join(_KEYS)}")
    curves = {key: np.array([math.nan if r[key] is None else r[key] for r in records], dtype=np.float64) for key in _KEYS}
    return {key: np.where(np.isfinite(values), values, math.nan) for key, values in curves.items()}


def _draw(axis: Axes, seeds: list[dict[str, NDArray[Any]]], clock: str, key: str, colour: Any, **style: Any) -> None:
    """One run as it is; several as their mean and a band while all of them run, or one by one if they never do."""
    drawstyle = style.get("drawstyle", "default")
    if len(seeds) == 1:
        x, y = seeds[0][clock], seeds[0][key]
        dots: dict[str, Any] = {"marker": ".", "markersize": 4} if len(x) <= _FEW and key != "best_reward" else {}
        axis.plot(x, y, color=colour, **style, **dots)
        if len(x) == 1 and key == "best_reward":
            axis.plot(x, y, "_", color=colour, markersize=8)
        return
    first, last = max(one[clock][0] for one in seeds), min(one[clock][-1] for one in seeds)
    moments = np.unique(np.concatenate([one[clock] for one in seeds]))
    moments = moments[(moments >= first) & (moments <= last)]
    if not len(moments):
        for one in seeds:
            _draw(axis, [one], clock, key, colour, **style)
        return
    at = np.stack([_at(moments, one[clock], one[key], drawstyle) for one in seeds])
    axis.plot(moments, at.mean(0), color=colour, **style)
    step = "post" if drawstyle == "steps-post" else None
    axis.fill_between(moments, at.min(0), at.max(0), step=step, color=colour, alpha=0.15, linewidth=0)  # type: ignore[arg-type]


def _at(moments: NDArray[Any], x: NDArray[Any], y: NDArray[Any], drawstyle: str) -> NDArray[Any]:
    """A curve's values at other moments: between its own, or the last one before."""
    if drawstyle == "steps-post":
        found: NDArray[Any] = y[np.searchsorted(x, moments, side="right") - 1]
    else:
        found = np.interp(moments, x, y)
    return found


def _limits(curves: list[dict[str, NDArray[Any]]], best_known: float | None) -> tuple[float, float]:
    late = [one[key][len(one[key]) // 20 :] for one in curves for key in ("reward", "best_reward")]
    shown = np.concatenate([*late, [] if best_known is None else [best_known]])
    shown = shown[np.isfinite(shown)]
    return padded(float(shown.min()), float(shown.max()), 0.05) if len(shown) else (0.0, 1.0)


def _bulk(curves: list[NDArray[Any]]) -> tuple[float, float]:
    """Limits for all but what is far away: SUMO's estimates have heavy tails."""
    shown = np.concatenate(curves)
    shown = shown[np.isfinite(shown)]
    if not len(shown):
        return 0.0, 1.0
    lower, upper = np.quantile(shown, [0.25, 0.75])
    shown = shown[(shown >= lower - 3 * (upper - lower)) & (shown <= upper + 3 * (upper - lower))]
    return padded(float(shown.min()), float(shown.max()), 0.05)


def _colours(count: int) -> list[Any]:
    return [f"C{i % 10}" for i in range(count)]


def _legend(figure: Figure, curves: Mapping[str, list[Any]], best_known: float | None) -> None:
    grey = "0.35" if len(curves) > 1 else "C0"
    kinds: list[Any] = [
        Line2D([], [], color=grey, linewidth=1.1, label="mean of the batch"),
        Line2D([], [], color=grey, linewidth=1.8, linestyle="--", label="best so far"),
    ]
    if best_known is not None:
        kinds.append(Line2D([], [], color="black", linewidth=1, linestyle=":", label=f"best known: {best_known:.10g}"))
    if any(len(seeds) > 1 for seeds in curves.values()):
        kinds.append(Patch(color=grey, alpha=0.15, linewidth=0, label="lowest to highest of the seeds"))
    names = []
    for (name, seeds), colour in zip(curves.items(), _colours(len(curves)), strict=True):
        label = name if len(seeds) == 1 else f"{name}, {len(seeds)} seeds"
        names.append(Line2D([], [], color=colour, linewidth=2.5, label=label))
    if len(curves) > 1:
        longest = max(len(str(handle.get_label())) for handle in names)
        columns = max(1, min(len(names), 6, 150 // (longest + 6)))  # about 150 letters go into the picture's width
        figure.legend(handles=names, loc="outside upper center", ncols=columns, frameon=False, fontsize=_SMALL + 2)
    else:
        figure.suptitle(str(names[0].get_label()), fontsize=_SMALL + 3)
    figure.legend(handles=kinds, loc="outside lower center", ncols=4, frameon=False, fontsize=_SMALL + 1)


def _plain(curves: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Numbers for JSON: six digits, but the best reward in full."""
    numbers: dict[str, Any] = {key: plain_numbers(values) for key, values in curves.items() if key not in ("best_reward", "step")}
    for key in ("step", "best_reward"):
        numbers[key] = [int(value) if value.is_integer() else value for value in curves[key].tolist()]
    return numbers
