"""Pictures of reverse KL: the model beside the density it was fitted to, and the training estimate beside the truth."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, SymmetricalLogLocator
from numpy.typing import NDArray
from torch import Tensor

from dohyo.divergence import TOLERANCE, Draws
from dohyo.evaluation import apart
from dohyo.plots.picture import write_picture
from dohyo.plots.runs import _padded as padded
from dohyo.plots.runs import _plain as plain_numbers

_KEYS = ("step", "estimate", "estimate_stderr", "objective", "stderr", "by_encoder", "by_prior", "above")
_WAYS = {"by_encoder": "by the encoder", "by_prior": "by the prior", "above": "from above"}
_STYLES = {"by_encoder": ":", "by_prior": "-", "above": "--"}
_COLOURS = {"by_encoder": "tab:purple", "by_prior": "tab:green", "above": "tab:brown"}
_KINDS = {"model": "model", "weighted": "importance-weighted", "exact": "exact draws"}
_SMALL = 8  # points
_GRID, _TERMS, _SHOWN = 100, 4_000, 400  # points along each axis, z of the prior in the model's density, draws
_LEVELS = (0.1, 0.5, 1, 2, 3, 4.5, 6, 8, 10, 13, 16)  # nats below the highest density of the target
_PANELS = 20  # quantities in a picture at most
_LINEAR = 0.1  # nats: within these an axis that spans many powers of ten is linear


@dataclass(frozen=True)
class Curve:
    """One run among others in `plot_reverse_kl_curves`; runs that differ by the seed alone have the same label and cost."""

    label: str
    cost: float
    records: Sequence[dict[str, Any]]


def plot_density_run(target: Any, draws: Draws, records: Sequence[dict[str, Any]], model: Any, folder: Path) -> None:
    """The pictures of a run's folder: learning_curves.png, and density.png in two dimensions or else marginals.png."""
    ways = [way for way in _WAYS if way != "by_prior" or target.dimension <= 2]
    plot_divergence_curves(records, folder / "learning_curves.png", ways)
    if target.dimension == 2:
        plot_density_comparison(target, {"model": model}, folder / "density.png")
    else:
        plot_marginals(target, draws, folder / "marginals.png")


def plot_density_comparison(target: Any, models: Mapping[str, Any], path: Path, seed: int = 0) -> None:
    """The target's contours in two dimensions, and beside them those of each model, with draws of each as dots.

    All panels have the same levels. A model's density is the mean of p(x | z) over many z of its prior; a target of unknown
    normaliser is normalised over the window, which is the target's own or holds nearly all draws of the models.

    Args:
        models: Titles and what has them, such as {"IWAE": a, "SUMO": b}.
    """
    if target.dimension != 2 or not models:
        raise ValueError(f"the target has {target.dimension} dimensions and there are {len(models)} models; 2 and 1 are needed")
    if "target" in models:
        raise ValueError("a model is titled 'target'; choose another title")
    drawn, components = {}, {}
    for name, model in models.items():
        with apart(model, seed):
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
    _draw_densities(found, drawn, window, axes, path)


def _draw_densities(
    found: Mapping[str, Tensor], drawn: Mapping[str, Tensor], window: Any, axes: Sequence[Tensor], path: Path
) -> None:
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
                panel.text(
                    0.02, 0.98, f"{outside[name]:.0%} of the draws outside", transform=panel.transAxes, va="top", fontsize=_SMALL
                )
            inside = drawn[name][inside][:_SHOWN]
            panel.plot(*inside.T.numpy(), ".", color="black", markersize=3, alpha=0.6, markeredgewidth=0)
            shown[name] = [plain_numbers(row) for row in inside.numpy()]
        panel.set(title=name, xlabel="x1", xlim=window[0], ylim=window[1])
        panel.tick_params(labelsize=_SMALL)
    panels[0].set_ylabel("x2")
    key = figure.colorbar(colours, ax=panels, ticks=levels[::2], pad=0.01)
    key.ax.set_yticklabels([f"{level - top:.3g}" for level in levels[::2]])
    key.set_label("log-density less the target's highest", fontsize=_SMALL)
    key.ax.tick_params(labelsize=_SMALL)
    numbers = {"window": window, "levels": levels, "x1": x.tolist(), "x2": y.tolist(), "draws": shown, "outside": outside}
    grids = {name: [plain_numbers(row) for row in log_p.view(_GRID, _GRID).T.numpy()] for name, log_p in found.items()}
    write_picture(figure, numbers | {"log_density": grids}, path)


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
        heights = {"model": _heights(raw[name], edges), "weighted": _heights(raw[name], edges, weight)}
        if name in known:
            heights["exact"] = _heights(known[name], edges)
        for (kind, height), colour in zip(heights.items(), ("tab:blue", "tab:orange", "black"), strict=False):
            panel.stairs(
                height, edges, color=colour, label=_KINDS[kind], fill=kind == "model", alpha=0.3 if kind == "model" else 1
            )
        numbers[name] = {"edges": plain_numbers(edges)} | {kind: plain_numbers(height) for kind, height in heights.items()}
        if name in reference:
            panel.axvline(reference[name][0], color="black", linestyle=":", linewidth=1, label="exact mean")
            numbers[name]["exact_mean"] = reference[name][0]
        panel.set(xlabel=name, yticks=[], xlim=(edges[0], edges[-1]))
        panel.tick_params(labelsize=_SMALL)
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.spines[["top", "right", "left"]].set_visible(False)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=_SMALL + 1)
    if len(names) < len(raw):
        figure.supxlabel(f"the first {len(names)} of {len(raw)} quantities", fontsize=_SMALL + 1)
    write_picture(figure, {"quantities": numbers}, path)


def _quantities(target: Any, x: Tensor) -> dict[str, NDArray[Any]]:
    return {name: values.detach().cpu().double().numpy() for name, values in target.quantities(x).items()}


def _edges(values: NDArray[Any]) -> NDArray[Any]:
    """Of bins that hold all but a few in a thousand."""
    finite = values[np.isfinite(values)]
    low, high = np.quantile(finite, [0.003, 0.997]) if len(finite) else (0.0, 1.0)
    return np.linspace(*padded(float(low), float(high), 0.02), 41)


def _heights(values: NDArray[Any], edges: NDArray[Any], weight: NDArray[Any] | None = None) -> NDArray[Any]:
    """Densities, of all the values and not of those within the edges alone."""
    weight = np.full(len(values), 1 / len(values)) if weight is None else np.nan_to_num(weight)
    use = np.isfinite(values)
    return np.histogram(values[use], edges, weights=weight[use])[0] / np.diff(edges)


def _window(x: Tensor) -> tuple[tuple[float, float], ...]:
    """What holds nearly all of the draws in each dimension, and a quarter more."""
    kept = x[x.isfinite().all(1)]
    ends = torch.quantile(kept, torch.tensor([0.005, 0.995], dtype=x.dtype), 0) if len(kept) else x.new_tensor([[-1, -1], [1, 1]])
    return tuple(padded(float(low), float(high), 0.25) for low, high in ends.T)


def plot_divergence_curves(records: Sequence[dict[str, Any]], path: Path, ways: Sequence[str] = tuple(_WAYS)) -> None:
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
            main.plot(step, values, ":.", color=_COLOURS[way], linewidth=1, markersize=4, label=f"log p(x) {_WAYS[way]}")
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
        raise ValueError("there are no curves to plot; give at least one Curve(label, cost, records)")
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
        raise ValueError("there are no records to plot; train up to the first check at least")
    missing = sorted({key for key in (*_KEYS, "reverse_kl", "diverged") for record in records if key not in record})
    if missing:
        raise ValueError(f"a record lacks {', '.join(missing)}; each needs {', '.join(_KEYS)}, reverse_kl and diverged")
    curves = {key: np.array([math.nan if r[key] is None else r[key] for r in records], dtype=np.float64) for key in _KEYS}
    kl = np.array([math.nan if r["reverse_kl"] is None else r["reverse_kl"] for r in records], dtype=np.float64)
    known = bool(np.isfinite(kl).any())
    shift = float(np.nanmedian(kl - curves["objective"])) if known else 0.0
    curves = {key: np.where(np.isfinite(values), values, math.nan) for key, values in curves.items()}
    for key in ("objective", *_WAYS):
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
            axis.plot(curves["step"], gap, _STYLES[way], color=_COLOURS[way], label=_WAYS[way], **_dots(curves["step"]))
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
