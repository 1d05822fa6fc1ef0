"""Pictures of densities: a model beside the target it was fitted to."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from dohyo.evaluation import isolated
from dohyo.kl import Draws
from dohyo.lab.folder import DENSITY, LEARNING_CURVES, MARGINALS
from dohyo.lab.plots.divergence import WAYS, plot_divergence_curves
from dohyo.lab.plots.picture import SMALL, Array, Records, heights, legend_above, padded, write_picture

_KINDS = {"model": "model", "weighted": "importance-weighted", "exact": "exact draws"}
_GRID, _TERMS, _SHOWN = 100, 4_000, 400  # points along each axis, z of the prior in the model's density, draws
_LEVELS = (0.1, 0.5, 1, 2, 3, 4.5, 6, 8, 10, 13, 16)  # nats below the highest density of the target
_PANELS = 20  # quantities in a picture at most


def plot_density_run(target: Any, draws: Draws, records: Records, model: Any, folder: Path) -> None:
    """The pictures of a run's folder: the learning curves, and the density in two dimensions or else the marginals."""
    ways = [way for way in WAYS if way != "by_prior" or target.dimension <= 2]
    plot_divergence_curves(records, folder / LEARNING_CURVES, ways)
    if target.dimension == 2:
        write_picture(*plot_density_comparison(target, {"model": model}), folder / DENSITY)
    else:
        plot_marginals(target, draws, folder / MARGINALS)


def plot_density_comparison(target: Any, models: Mapping[str, Any], seed: int = 0) -> tuple[Figure, dict[str, Any]]:
    """The target's contours in two dimensions, and beside them those of each model, with draws of each as dots.

    All panels have the same levels. A model's density is the mean of p(x | z) over many z of its prior; a target of unknown
    normaliser is normalised over the window, which is the target's own or holds nearly all draws of the models.

    Args:
        models: Titles and what has them, such as {"IWAE": a, "SUMO": b}.
    """
    drawn, components = {}, {}
    for name, model in models.items():
        with isolated(model, seed):
            drawn[name] = model.sample(4 * _SHOWN).detach().cpu().double()
            components[name] = model.likelihood(model.prior().sample((_TERMS,)))
    window = target.window or _window(torch.cat(list(drawn.values())))
    axes = [torch.linspace(low, high, _GRID, dtype=torch.float64) for low, high in window]
    points = torch.cartesian_prod(*axes)
    with torch.no_grad():
        found = {"target": target(points.float()).double()}
        for name, mixture in components.items():
            like = next(models[name].parameters())
            parts = [mixture.log_prob(part[:, None]).logsumexp(1) for part in points.to(like).split(100)]
            found[name] = torch.cat(parts).double().cpu() - math.log(_TERMS)
    if target.log_normaliser is not None:
        found["target"] -= target.log_normaliser
    else:
        cell = math.prod((high - low) / (_GRID - 1) for low, high in window)
        found["target"] -= found["target"].nan_to_num(-torch.inf).logsumexp(0) + math.log(cell)
    exact = target.sample(4 * _SHOWN, torch.Generator().manual_seed(seed))
    drawn = {"target": exact} | drawn if exact is not None else drawn
    return _plot_densities(found, drawn, window, axes)


def _plot_densities(
    found: Mapping[str, Tensor], drawn: Mapping[str, Tensor], window: Any, axes: Sequence[Tensor]
) -> tuple[Figure, dict[str, Any]]:
    finite = found["target"][found["target"].isfinite()]
    top = float(finite.max()) if len(finite) else 0.0
    levels = [top - below for below in reversed(_LEVELS)]
    figure = Figure(figsize=(3.4 * len(found) + 0.8, 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False, sharex=True, sharey=True)[0]
    x, y = (axis.numpy() for axis in axes)
    shown: dict[str, Any] = {}
    outside: dict[str, float] = {}
    for panel, (name, log_p) in zip(panels, found.items(), strict=True):
        values = log_p.clamp(min=levels[0] - 1e3).nan_to_num(levels[0] - 1e3).view(_GRID, _GRID).T.numpy()
        colours = panel.contourf(x, y, values, levels, cmap="Blues", extend="max")
        panel.contour(x, y, values, levels, colors="tab:blue", linewidths=0.4, linestyles="solid")
        if name in drawn:
            low, high = drawn[name].new_tensor(window).T
            inside = ((drawn[name] >= low) & (drawn[name] <= high)).all(1)
            outside[name] = 1 - float(inside.double().mean())
            if outside[name] > 0.02:
                text = f"{outside[name]:.0%} of the draws outside"
                panel.text(0.02, 0.98, text, transform=panel.transAxes, va="top", fontsize=SMALL)
            inside = drawn[name][inside][:_SHOWN]
            panel.plot(*inside.T.numpy(), ".", color="black", markersize=3, alpha=0.6, markeredgewidth=0)
            shown[name] = inside.numpy()
        panel.set(title=name, xlabel="x1", xlim=window[0], ylim=window[1])
        panel.tick_params(labelsize=SMALL)
    panels[0].set_ylabel("x2")
    key = figure.colorbar(colours, ax=panels, ticks=levels[::2], pad=0.01)
    key.ax.set_yticklabels([f"{level - top:.3g}" for level in levels[::2]])
    key.set_label("log-density less the target's highest", fontsize=SMALL)
    key.ax.tick_params(labelsize=SMALL)
    numbers = {"window": window, "levels": levels, "x1": x.tolist(), "x2": y.tolist(), "draws": shown, "outside": outside}
    grids = {name: log_p.view(_GRID, _GRID).T.numpy() for name, log_p in found.items()}
    return figure, numbers | {"log_density": grids}


def plot_marginals(target: Any, draws: Draws, path: Path) -> None:
    """Histograms of the target's quantities: draws of the model, the same by importance weights, and exact draws if known.

    A dotted line is the exact mean, where it is known.
    """
    raw = _quantities(target, draws.x)
    weight = (draws.log_target - draws.log_px).softmax(0).numpy()
    exact = target.sample(20_000, torch.Generator().manual_seed(0))
    known = {} if exact is None else _quantities(target, exact)
    reference = target.reference() or {}
    names = list(raw)[:_PANELS]
    columns = min(len(names), 5)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(2.3 * columns, 5.0), 1.9 * rows + 0.7), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    numbers: dict[str, Any] = {}
    for panel, name in zip(panels, names, strict=False):
        edges = _edges(np.concatenate([raw[name], known.get(name, raw[name])]))
        found = {"model": heights(raw[name], edges), "weighted": heights(raw[name], edges, weight)}
        if name in known:
            found["exact"] = heights(known[name], edges)
        for (kind, height), colour in zip(found.items(), ("tab:blue", "tab:orange", "black"), strict=False):
            style: dict[str, Any] = {"fill": True, "alpha": 0.3} if kind == "model" else {"fill": False, "alpha": 1}
            panel.stairs(height, edges, color=colour, label=_KINDS[kind], **style)
        numbers[name] = {"edges": edges, **found}
        if name in reference:
            panel.axvline(reference[name][0], color="black", linestyle=":", linewidth=1, label="exact mean")
            numbers[name]["exact_mean"] = reference[name][0]
        panel.set(xlabel=name, yticks=[], xlim=(edges[0], edges[-1]))
        panel.tick_params(labelsize=SMALL)
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.spines[["top", "right", "left"]].set_visible(False)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    legend_above(figure, panels[0], len(names), len(raw), "quantities")
    write_picture(figure, {"quantities": numbers}, path)


def _quantities(target: Any, x: Tensor) -> dict[str, Array]:
    return {name: values.detach().cpu().double().numpy() for name, values in target.quantities(x).items()}


def _edges(values: Array) -> Array:
    """The edges of bins that hold all but a few in a thousand."""
    finite = values[np.isfinite(values)]
    low, high = np.quantile(finite, [0.003, 0.997]) if len(finite) else (0.0, 1.0)
    return np.linspace(*padded(float(low), float(high), 0.02), 41)


def _window(x: Tensor) -> tuple[tuple[float, float], ...]:
    """A window that holds nearly all draws in each dimension, and a quarter more."""
    kept = x[x.isfinite().all(1)]
    ends = torch.quantile(kept, torch.tensor([0.005, 0.995], dtype=x.dtype), 0) if len(kept) else x.new_tensor([[-1, -1], [1, 1]])
    return tuple(padded(float(low), float(high), 0.25) for low, high in ends.T)
