"""What all pictures share: how they are written, whole and with their numbers beside them, their axes and colours."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from dohyo.errors import DohyoError
from dohyo.files import output_file, plain, replacing

SMALL = 8  # points
FEW = 40  # points of a curve that are still shown as dots
# Okabe and Ito's colours, which everybody can tell apart; in grey the markers tell them apart.
BLACK, BLUE, RED, GREEN, PINK = "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, GREY = "#E69F00", "#56B4E9", "#999999"

Array = NDArray[Any]
Records = Sequence[dict[str, Any]]


def check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise DohyoError(f"{path}: the ending of a picture must be .png, .pdf or .svg")
    for each in (path, path.with_suffix(".json")):
        output_file(each)


def write_picture(figure: Figure, numbers: dict[str, Any], path: Path) -> None:
    """The picture, and its numbers as JSON: both are written in full before either takes its place."""
    path = Path(path)
    check_picture(path)
    with replacing(path.with_suffix(".json")) as text, replacing(path) as picture:
        text.write_text(json.dumps(plain(plain_numbers(numbers)), allow_nan=False) + "\n", encoding="utf-8")
        figure.savefig(picture, dpi=150)


def read_curves(records: Records, keys: Sequence[str], whose: str = "the run") -> dict[str, Array]:
    """The numbers of each key over the records, NaN where they are missing or not finite."""
    if not records:
        raise DohyoError(f"{whose} has no records to plot; train it at least up to the first one")
    missing = sorted({key for key in keys for record in records if key not in record})
    if missing:
        raise DohyoError(f"a record of {whose} lacks {', '.join(missing)}; each needs {', '.join(keys)}")
    curves = {key: np.array([math.nan if r[key] is None else r[key] for r in records], dtype=np.float64) for key in keys}
    return {key: np.where(np.isfinite(values), values, math.nan) for key, values in curves.items()}


def tidy(axis: Axes, whole: int = 0) -> None:
    """A light grid and no frame; if `whole` is positive, about this many ticks at whole numbers of x."""
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if whole:
        axis.xaxis.set_major_locator(MaxNLocator(whole, integer=True, min_n_ticks=1))


def dots(x: Array, size: int = 5) -> dict[str, Any]:
    """The marker of a curve with few points."""
    return {"marker": ".", "markersize": size} if len(x) <= FEW else {}


def mark_beyond(axis: Axes, x: Array, y: Array, limits: tuple[float, float], label: str | None = None, **style: Any) -> None:
    """A triangle at the edge of the axis for each value beyond it; in the label, {} becomes the furthest value."""
    low, high = limits
    for where, edge, marker, furthest in ((y > high, high, "^", np.nanmax), (y < low, low, "v", np.nanmin)):
        if where.any():
            text = label and label.format(f"{furthest(y[where]):.3g}")
            marks = axis.plot(x[where], np.full(where.sum(), edge), marker, clip_on=False, label=text, **style)
            marks[0].set_in_layout(False)  # else the unclipped marks widen the margins
            label = label if label and "{}" in label else None


def near(core: Array, others: Array) -> Array:
    """The core, and the other values that are no further from it than its own width, or 0.1."""
    reach = max(0.1, float(np.ptp(core)))
    return np.concatenate([core, others[(others > core.min() - reach) & (others < core.max() + reach)]])


def bulk(values: Array, reach: float) -> Array:
    """The finite values within this many interquartile ranges of the quartiles (Tukey's fences)."""
    values = values[np.isfinite(values)]
    if not len(values):
        return values
    lower, upper = np.quantile(values, [0.25, 0.75])
    kept: Array = values[(values >= lower - reach * (upper - lower)) & (values <= upper + reach * (upper - lower))]
    return kept


def heights(values: Array, edges: Array, weight: Array | None = None) -> Array:
    """The density in each bin of a histogram, relative to all values and not only those within the edges."""
    use = np.isfinite(values)
    counts = np.histogram(values[use], edges, weights=None if weight is None else np.nan_to_num(weight)[use])[0]
    return counts / (len(values) if weight is None else 1) / np.diff(edges)


def legend_above(figure: Figure, panel: Axes, shown: int, of: int, what: str) -> None:
    """The legend of one panel for all, and a word if there was no room for everything."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=SMALL + 1)
    if shown < of:
        figure.supxlabel(f"the first {shown} of {of} {what}", fontsize=SMALL + 1)


def span(values: Array, share: float) -> tuple[float, float]:
    """Limits of an axis that hold the finite values, with a margin."""
    values = values[np.isfinite(values)]
    return padded(float(values.min()), float(values.max()), share) if len(values) else (0.0, 1.0)


def padded(low: float, high: float, share: float) -> tuple[float, float]:
    """Limits of an axis: a share of the span more on either side, or half a unit where there is no span."""
    pad = share * (high - low) if high > low else 0.5
    return low - pad, high + pad


def plain_numbers(values: Any) -> Any:
    """Arrays, also those in lists and dicts, as JSON can hold them: six digits, whole ones as integers, null if not finite."""
    if isinstance(values, dict):
        return {key: plain_numbers(each) for key, each in values.items()}
    if isinstance(values, list | tuple) or np.ndim(values) > 1:
        return [plain_numbers(each) for each in values]
    if not isinstance(values, np.ndarray):
        return values
    rounded = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
    return [int(value) if value is not None and value.is_integer() else value for value in rounded]
