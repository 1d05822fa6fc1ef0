"""A picture of the test NLL against the time of training, for models trained by samples of the encoder and through chains."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dohyo.lab.plots.picture import BLACK, BLUE, GREEN, ORANGE, PINK, RED, plain_numbers, tidy

_COLOURS, _MARKERS = (BLACK, GREEN, ORANGE, PINK, BLUE, RED), "osD^vP"


def plot_times(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> tuple[Figure, dict[str, Any]]:
    """For each data set, means with bars of one standard deviation over the replicas.

    Args:
        panels: By data set and label: seconds, and the mean and sd of the NLL there.
    """
    figure = Figure(figsize=(5.5 * len(panels) + 1, 4.4), layout="constrained")
    for axis, (data, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for number, (label, curve) in enumerate(rows.items()):
            style = {"color": _COLOURS[number % 6], "marker": _MARKERS[number % 6], "ls": "--" if "chains" in label else "-"}
            axis.errorbar(curve["seconds"], curve["mean"], curve["sd"], capsize=3, label=label, **style)
        axis.set_title(data)
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("test NLL by annealed weights, nats (lower is better)")
        tidy(axis)
        axis.legend(frameon=False, fontsize=9)
    arrays = {data: {label: {k: np.array(v) for k, v in curve.items()} for label, curve in rows.items()}
              for data, rows in panels.items()}  # fmt: skip
    return figure, {data: {label: plain_numbers(curve) for label, curve in rows.items()} for data, rows in arrays.items()}
