"""Pictures of a training run: learning curves, images and reconstructions, each with its numbers as JSON beside it."""

import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.plots.picture import SMALL, Array, Records, bulk, dots, mark_beyond, read_curves, span, tidy, write_picture

_KEYS = ("epoch", "train_nll", "valid_nll", "learning_rate", "clipped_decoder", "clipped_encoder")
_TILE = 0.75  # inches, the side of one image


def plot_learning_curves(records: Records, path: Path) -> None:
    """Training and validation NLL against the epoch, beside the share of clipped steps and the learning rate.

    SUMO's training NLL has a heavy tail, and the first epochs are far above the rest. So the NLL axis spans the validation
    curve after the first twentieth of the epochs and the training values near the bulk; a triangle at the edge marks each
    training value beyond it. Values that are None or not finite are left out.

    Args:
        records: One for each epoch, as in metrics.jsonl; clipped_decoder and clipped_encoder are shares of the steps, 0 to 1.
            Where lost_chains begins later than the first, a line is drawn: what is validated by chains is compared with no other.
    """
    curves = read_curves(records, _KEYS)
    epoch, train, valid = curves["epoch"], curves["train_nll"], curves["valid_nll"]
    late = np.arange(len(epoch)) >= len(epoch) // 20
    limits = span(np.concatenate([valid[late], bulk(np.concatenate([train[late], valid[late]]), 1.5)]), 0.06)
    marker = dots(epoch)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplot_mosaic([["nll", "clipped"], ["nll", "rate"]], width_ratios=(1.5, 1))
    axes["nll"].plot(epoch, train, color="tab:blue", alpha=0.7, linewidth=1.2, label="training", **marker)
    axes["nll"].plot(epoch, valid, color="tab:orange", linewidth=1.8, label="validation", **marker)
    beyond = "training, beyond the axis"  # the first epochs are left out: all of them may be
    mark_beyond(axes["nll"], epoch[late], train[late], limits, beyond, color="tab:blue", markersize=5)
    turn = next((place for place, record in enumerate(records) if "lost_chains" in record), 0)
    if turn:
        axes["nll"].axvline(epoch[turn] - 0.5, color="gray", linestyle="--", linewidth=1, label="through chains from here")
    best = turn + int(np.nanargmin(valid[turn:])) if np.isfinite(valid[turn:]).any() else None
    if best is not None:
        label = f"best: {valid[best]:.2f} in epoch {epoch[best]:g}"
        axes["nll"].plot(epoch[best], valid[best], "o", color="tab:orange", markeredgecolor="black", label=label)
    axes["nll"].set(ylim=limits, ylabel="negative log-likelihood, nats")
    axes["nll"].legend(loc="upper right", fontsize=SMALL + 2, framealpha=0.9, edgecolor="none")
    axes["clipped"].plot(epoch, curves["clipped_decoder"], color="tab:green", label="decoder", **marker)
    axes["clipped"].plot(epoch, curves["clipped_encoder"], color="tab:purple", label="encoder", **marker)
    axes["clipped"].set(ylim=(-0.04, 1.04), ylabel="clipped steps", xticklabels=[])
    axes["clipped"].set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes["clipped"].legend(fontsize=SMALL, frameon=False, ncols=2)
    axes["rate"].plot(epoch, curves["learning_rate"], color="black", drawstyle="steps-post", **marker)
    axes["rate"].set(yscale="log", ylabel="learning rate")
    for name, axis in axes.items():
        tidy(axis, whole=6)
        axis.set_xlim(*span(epoch, 0.02))
        if name != "clipped":
            axis.set_xlabel("epoch")
    found = None if best is None else {key: records[best][key] for key in ("epoch", "valid_nll")}
    write_picture(figure, curves | {"best": found, "nll_axis": limits}, path)


def plot_images(images: Tensor, shape: tuple[int, ...], path: Path, title: str | None = None) -> None:
    """A grid of images of a shape (height, width), about square.

    Ones in a longer shape are dropped, and (3, height, width) and (height, width, 3) are colours.

    Args:
        images: (n, *shape) or flat, (n, d), such as `model.sample_mean(64)`.
    """
    values = _values(images, shape, "images")
    width = math.ceil(math.sqrt(len(values)))
    figure = _grid([values[start : start + width] for start in range(0, len(values), width)])
    if title:
        size = figure.get_size_inches()
        figure.set_size_inches(max(size[0], 0.1 * len(title) + 0.2), size[1] + 0.3)
        figure.suptitle(title, fontsize=SMALL + 2 + 1)
    write_picture(figure, {"shape": shape, "columns": width, "images": _array(images)}, path)


def plot_reconstructions(x: Tensor, reconstructions: Tensor, shape: tuple[int, ...], path: Path) -> None:
    """Each datum with its reconstruction under it.

    Args:
        x, reconstructions: (n, *shape) or flat, (n, d).
        shape: As for `plot_images`.
    """
    above, below = _values(x, shape, "x"), _values(reconstructions, shape, "reconstructions")
    if len(above) != len(below):
        raise DohyoError(f"there are {len(above)} data and {len(below)} reconstructions; give one for each")
    width = min(len(above), 10)
    starts = range(0, len(above), width)
    figure = _grid([each[start : start + width] for start in starts for each in (above, below)], ("data", "model"))
    numbers = {"shape": shape, "columns": width, "x": _array(x), "reconstructions": _array(reconstructions)}
    write_picture(figure, numbers, path)


def _array(images: Tensor) -> Array:
    """(n, size of a datum)."""
    return images.detach().cpu().double().flatten(1).numpy()


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether data of this shape are images; others are shown as tables (`dohyo.lab.plots.tables`)."""
    sides = _sides(shape)
    return len(sides) == 2 or (len(sides) == 3 and 3 in (sides[0], sides[2]))


def _sides(shape: tuple[int, ...]) -> list[int]:
    return [side for side in shape if side > 1] if len(shape) > 2 else list(shape)


def _values(images: Tensor, shape: tuple[int, ...], name: str) -> Array:
    """(n, height, width) or (n, height, width, 3), NaN where not finite."""
    if not is_image(shape) or min(shape) < 1:
        raise DohyoError(f"shape is {shape}; it must be (height, width), or that and 3 colours")
    if images.ndim < 2 or len(images) == 0 or images.shape[1:].numel() != math.prod(shape):
        raise DohyoError(
            f"{name} are {tuple(images.shape)}, shape {shape} needs (n, {math.prod(shape)}) or (n, *shape), n at least 1"
        )
    flat, sides = _array(images), _sides(shape)
    flat = np.where(np.isfinite(flat), flat, math.nan)
    return np.moveaxis(flat.reshape(-1, *sides), 1, -1) if len(sides) == 3 and sides[0] == 3 else flat.reshape(-1, *sides)


def _grid(rows: list[Array], labels: tuple[str, ...] = ()) -> Figure:
    """One mosaic of all images, with gaps of white between them: sharp pixels, and fast for any number.

    With labels, that many rows form a group, named at the left.
    """
    finite = np.concatenate([row[np.isfinite(row)] for row in rows])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    height, width, *colour = rows[0][0].shape
    gap = max(1, round(max(height, width) / 14))
    group = len(labels) or 1
    tops = [i * (height + gap) + (i // group) * (2 * gap if labels else 0) for i in range(len(rows))]
    mosaic = np.full((tops[-1] + height, len(rows[0]) * (width + gap) - gap, *colour), math.nan)
    for top, row in zip(tops, rows, strict=True):
        for column, image in enumerate(row):
            left = column * (width + gap)
            mosaic[top : top + height, left : left + width] = image
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    key = not colour and (low, high) != (0.0, 1.0)  # grey needs none in [0, 1], other units do
    if colour:
        mosaic = np.nan_to_num((mosaic - low) / (high - low or 1.0), nan=1.0)
    scale = _TILE / max(height, width)
    margin = (0.6 if labels else 0.0) + (0.7 if key else 0.0)
    size = (mosaic.shape[1] * scale + 0.1 + margin, mosaic.shape[0] * scale + 0.1)
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    grey = matplotlib.colormaps["gray"].with_extremes(bad="white")
    picture = axis.imshow(mosaic, cmap=grey, vmin=low, vmax=high, interpolation="nearest")
    axis.spines[:].set_visible(False)
    axis.set_xticks([])
    centres = [top + height / 2 - 0.5 for top in tops] if labels else []
    axis.set_yticks(centres, [labels[i % group] for i in range(len(centres))], fontsize=SMALL + 1)
    axis.tick_params(length=0)
    if key:
        figure.colorbar(picture, ax=axis, shrink=0.8, aspect=30).ax.tick_params(labelsize=SMALL)
    return figure
