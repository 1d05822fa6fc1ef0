"""A picture of the test NLL against the clip norm, and against the share of clipped steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dohyo.lab.plots.picture import BLUE, RED, SMALL, plain_numbers, tidy


def plot_clipping(curve: Mapping[str, Sequence[Any]], iwae: tuple[float, float] | None) -> tuple[Figure, dict[str, Any]]:
    """Means with bars of one standard deviation over the replicas.

    Args:
        curve: For each clip norm, None for no clipping, the mean and sd of the NLL and the share of clipped steps.
        iwae: Mean and sd of IWAE's NLL, if it is known.
    """
    arrays = {key: np.array(curve[key], dtype=np.float64) for key in ("norm", "mean", "sd", "share")}
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
    left.set_ylabel("test NLL, nats (lower is better)")
    for x, y, label in zip(share, arrays["mean"], labels, strict=True):
        right.annotate(label, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=SMALL, color="0.3")
    right.legend(frameon=False, fontsize=9)
    return figure, plain_numbers(arrays) | {"iwae": None if iwae is None else {"mean": iwae[0], "sd": iwae[1]}}
