"""Pictures of a table and of a model's samples beside it: each column, and the first few in pairs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.plots.picture import BLUE, GREY, SMALL, Array, bulk, heights, legend_above, padded, write_picture

_MOST = 24  # columns that are shown
_PAIRED = 4  # columns that are paired
_DOTS = 400  # of the data and of the samples in each panel of the pairs
_LABEL = 22  # characters of a column's name
_DATA: dict[str, Any] = {"color": GREY, "alpha": 0.55}
_MODEL: dict[str, Any] = {"color": BLUE}


def plot_columns(data: Tensor, samples: Tensor, columns: Sequence[str], path: Path) -> None:
    """A histogram of each column: the data as an area, the model's samples as a line. The axis is the data's.

    Args:
        data, samples: (rows, columns), of test data and of the model.
        columns: Their names; empty for x1, x2, ...
    """
    x, y, names = _arrays(data, samples, columns)
    shown = min(len(names), _MOST)
    across = min(shown, 6 if shown > 12 else 4)
    down = -(-shown // across)
    figure = Figure(figsize=(max(2.1 * across, 4.2), 1.65 * down + 0.6), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    numbers = [_histogram(panel, x[:, i], y[:, i], names[i]) for i, panel in enumerate(panels[:shown])]
    for panel in panels[shown:]:
        panel.set_axis_off()
    legend_above(figure, panels[0], shown, len(names), "columns")
    write_picture(figure, {"columns": numbers, "of": len(names), "rows": len(x), "samples": len(y)}, path)


def plot_pairs(data: Tensor, samples: Tensor, columns: Sequence[str], path: Path) -> None:
    """The first columns in pairs, data and samples as dots of two colours, and each column's histogram on the diagonal."""
    x, y, names = _arrays(data, samples, columns)
    count = min(len(names), _PAIRED)
    few = max(50, min(_DOTS, len(x)))  # no more samples than data, or they would cover them
    figure = Figure(figsize=(1.9 * count + 0.6, 1.8 * count + 0.6), layout="constrained")
    panels = figure.subplots(count, count, squeeze=False)
    numbers = [_histogram(panels[i][i], x[:, i], y[:, i], names[i]) for i in range(count)]
    limits = [(each["edges"][0], each["edges"][-1]) for each in numbers]
    for row in range(count):
        for column in range(count):
            panel = panels[row][column]
            if column > row:
                panel.set_axis_off()
            elif column < row:
                panel.plot(y[:few, column], y[:few, row], ".", markersize=3, markeredgewidth=0, alpha=0.6, **_MODEL)
                panel.plot(x[:_DOTS, column], x[:_DOTS, row], ".", markersize=4, markeredgewidth=0, alpha=0.7, color="0.3")
                panel.set(xlim=limits[column], ylim=limits[row])
                _small(panel)
                panel.yaxis.set_major_locator(MaxNLocator(4))
            panel.set_xlabel(_label(names[column]) if row == count - 1 else "", fontsize=SMALL)
            if column == 0 and row > 0:
                panel.set_ylabel(_label(names[row]), fontsize=SMALL)
    legend_above(figure, panels[0][0], count, len(names), "columns")
    dots = {"data": x[:_DOTS, :count], "samples": y[:few, :count]}
    write_picture(figure, {"columns": numbers, "of": len(names), "dots": dots}, path)


def _arrays(data: Tensor, samples: Tensor, columns: Sequence[str]) -> tuple[Array, Array, list[str]]:
    x, y = (each.detach().cpu().double().flatten(1).numpy() for each in (data, samples))
    names = list(columns) or [f"x{i}" for i in range(1, x.shape[1] + 1)]
    if not x.shape[1] == y.shape[1] == len(names) or min(len(x), len(y)) == 0:
        raise DohyoError(
            f"the data are {x.shape}, the samples {y.shape} and there are {len(names)} names; the columns must agree"
        )
    return x, y, names


def _histogram(panel: Axes, x: Array, y: Array, name: str) -> dict[str, Any]:
    """Both histograms on the data's axis, and their numbers."""
    edges = _edges(x)
    found = {"data": heights(x, edges), "samples": heights(y, edges)}
    panel.stairs(found["data"], edges, fill=True, label="data", **_DATA)
    panel.stairs(found["samples"], edges, linewidth=1.3, label="model", **_MODEL)
    beyond = {
        name: float(1 - ((values >= edges[0]) & (values <= edges[-1])).mean()) for name, values in (("data", x), ("model", y))
    }
    if max(beyond.values()) > 0.02:
        text = "off the axis: " + ", ".join(f"{share:.0%} of the {who}" for who, share in beyond.items())
        panel.set_title(text, fontsize=SMALL - 2, loc="right")
    panel.set(yticks=[], xlim=(edges[0], edges[-1]))
    panel.set_xlabel(_label(name), fontsize=SMALL)
    _small(panel)
    panel.xaxis.set_major_locator(MaxNLocator(4, integer=_few_whole(x)))
    panel.spines["left"].set_visible(False)
    return {"name": name, "edges": edges.tolist(), **found, "beyond": beyond}


def _edges(x: Array) -> Array:
    """Bins for the bulk of the data, one for each value where they are a few whole numbers."""
    x = x[np.isfinite(x)]
    if _few_whole(x):
        return np.arange(x.min() - 0.5, x.max() + 1)
    near = bulk(x, 5.0)
    low, high = np.quantile(x if len(near) < len(x) / 2 or np.ptp(near) == 0 else near, [0.002, 0.998]) if len(x) else (0.0, 1.0)
    return np.linspace(*padded(float(low), float(high), 0.05), int(min(40, max(10, len(x) ** 0.5))) + 1)


def _few_whole(x: Array) -> bool:
    return bool(len(x) and np.ptp(x) <= 30 and (x == np.round(x)).all())


def _small(panel: Axes) -> None:
    panel.tick_params(labelsize=SMALL - 1)
    panel.xaxis.set_major_locator(MaxNLocator(4))
    panel.spines[["top", "right"]].set_visible(False)


def _label(name: str) -> str:
    """A name from a file, short, and with the signs that begin mathematics in Matplotlib shown as they are."""
    name = name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…"
    return name.replace("$", r"\$")
