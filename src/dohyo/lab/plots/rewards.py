"""Pictures of what a policy earns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dohyo.lab.plots.picture import SMALL, Array, Records, bulk, dots, plain_numbers, read_curves, span, tidy

_KEYS = ("step", "seconds", "reward", "best_reward", "entropy")
_RATIO = 20  # of the longest run's seconds or steps to the shortest's: beyond it their axis is logarithmic


def plot_reward_curves(runs: Mapping[str, Sequence[Records]], best_known: float | None = None) -> tuple[Figure, dict[str, Any]]:
    """Mean reward of a batch and best reward so far, against steps and against seconds, and the policy's entropy.

    Several runs under one name differ in the seed: their mean is shown in a band from the lowest to the highest, as far as the
    shortest of them goes. The reward axis leaves out the first twentieth of each run, where rewards may be very low, and
    the entropy's axis what is far from the rest, for estimates have heavy tails.

    Args:
        runs: Under each name the runs, one for each seed: records as in metrics.jsonl, with step, seconds, reward, best_reward
            and entropy.
        best_known: Shown as a line.
    """
    curves = {name: [read_curves(records, _KEYS, name) for records in given] for name, given in runs.items()}
    figure = Figure(figsize=(13, 4.4 + 0.1 * (len(curves) if len(curves) > 1 else 0)), layout="constrained")
    by_step, by_second, entropy = figure.subplots(1, 3)
    by_second.sharey(by_step)
    for number, seeds in enumerate(curves.values()):
        colour = f"C{number}"
        for axis, clock in ((by_step, "step"), (by_second, "seconds")):
            _plot(axis, seeds, clock, "reward", colour, linewidth=1.1)
            _plot(axis, seeds, clock, "best_reward", colour, linewidth=1.8, linestyle="--", drawstyle="steps-post")
        _plot(entropy, seeds, "step", "entropy", colour, linewidth=1.3)
    every = [one for seeds in curves.values() for one in seeds]
    late = [one[key][len(one[key]) // 20 :] for one in every for key in ("reward", "best_reward")]
    limits = span(np.concatenate([*late, [] if best_known is None else [best_known]]), 0.05)
    for axis in (by_step, by_second):
        if best_known is not None:
            axis.axhline(best_known, color="black", linewidth=1, linestyle=":")
        axis.set(ylim=limits, ylabel="reward")
    most = bulk(np.concatenate([one["entropy"] for one in every]), 3)  # SUMO's estimates have heavy tails
    entropy.set(ylim=span(most, 0.05), ylabel="entropy, nats")
    for axis, clock in ((by_step, "step"), (by_second, "seconds"), (entropy, "step")):
        ends = [float(one[clock][-1]) for one in every]
        tidy(axis)
        axis.set_xlabel(clock)
        if max(ends) > _RATIO * min(ends) > 0:
            axis.set_xscale("log")
        else:
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=clock == "step", min_n_ticks=1))
            axis.set_xlim(left=0)
    _legend(figure, curves, best_known)
    numbers = {name: [_plain(one) for one in seeds] for name, seeds in curves.items()}
    return figure, {"best_known": best_known, "runs": numbers, "axis": list(limits)}


def _plot(axis: Axes, seeds: list[dict[str, Array]], clock: str, key: str, colour: Any, **style: Any) -> None:
    """One run as it is; several as their mean in a band while all of them run, or one by one if they never overlap."""
    stepped = style.get("drawstyle") == "steps-post"
    if len(seeds) == 1:
        x, y = seeds[0][clock], seeds[0][key]
        axis.plot(x, y, color=colour, **style, **(dots(x, 4) if key != "best_reward" else {}))
        if len(x) == 1 and key == "best_reward":
            axis.plot(x, y, "_", color=colour, markersize=8)
        return
    first, last = max(one[clock][0] for one in seeds), min(one[clock][-1] for one in seeds)
    moments = np.unique(np.concatenate([one[clock] for one in seeds]))
    moments = moments[(moments >= first) & (moments <= last)]
    if not len(moments):
        for one in seeds:
            _plot(axis, [one], clock, key, colour, **style)
        return
    if stepped:  # the last value before each moment, else between two
        at = np.stack([one[key][np.searchsorted(one[clock], moments, side="right") - 1] for one in seeds])
    else:
        at = np.stack([np.interp(moments, one[clock], one[key]) for one in seeds])
    axis.plot(moments, at.mean(0), color=colour, **style)
    step = "post" if stepped else None
    axis.fill_between(moments, at.min(0), at.max(0), step=step, color=colour, alpha=0.15, linewidth=0)  # type: ignore[arg-type]


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
    labels = [name if len(seeds) == 1 else f"{name}, {len(seeds)} seeds" for name, seeds in curves.items()]
    if len(curves) > 1:
        names = [Line2D([], [], color=f"C{number}", linewidth=2.5, label=label) for number, label in enumerate(labels)]
        columns = max(1, min(len(names), 6, 150 // (max(map(len, labels)) + 6)))  # about 150 letters go into the picture's width
        figure.legend(handles=names, loc="outside upper center", ncols=columns, frameon=False, fontsize=SMALL + 2)
    else:
        figure.suptitle(labels[0], fontsize=SMALL + 3)
    figure.legend(handles=kinds, loc="outside lower center", ncols=4, frameon=False, fontsize=SMALL + 1)


def _plain(curves: dict[str, Array]) -> dict[str, Any]:
    """Numbers for JSON: six digits, but step and best reward in full."""
    exact = {key: [int(v) if v.is_integer() else v for v in curves[key].tolist()] for key in ("step", "best_reward")}
    return plain_numbers(curves) | exact  # type: ignore[no-any-return]
