"""What the guide and the model of Pyro say of each datum: log p and log q of every row, without the plates' scale.

A site's own `log_prob` is scaled by the size of the plate over that of the subsample, and its `unscaled_log_prob` forgets the
masks; neither is a log-density of one datum. Here the scale is checked to be the plates' own and then set to one.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.integrations import missing

try:
    import pyro as pyro
    from pyro import distributions
    from pyro import poutine as poutine
    from pyro.infer import ELBO as ELBO
    from pyro.infer.autoguide import AutoGuide
    from pyro.ops.contract import contract_to_tensor
    from pyro.ops.rings import LogRing
    from pyro.poutine.messenger import Messenger as Messenger
    from pyro.poutine.subsample_messenger import _Subsample
    from pyro.poutine.util import prune_subsample_sites
    from pyro.util import check_site_shape
except ModuleNotFoundError as error:
    raise missing(error, "pyro") from None

PARTICLES = "_dohyo_particles"


class Traces(NamedTuple):
    """One run of the guide, and of the model on what the guide drew."""

    guide: Any
    model: Any


class Pointed(Messenger):  # type: ignore[misc]
    """Points the plates named in `rows` at the data given for each, and notes how large every plate is."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        super().__init__()
        self.rows = rows
        self.plates: dict[str, list[tuple[int, int | None]]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if not isinstance(msg["fn"], _Subsample):
            return
        name, fixed = msg["name"], msg["fn"].subsample_size
        self.plates.setdefault(name, []).append((msg["fn"].size, fixed))
        if name in self.rows:
            if msg["value"] is not None and not msg["done"]:  # else it was replayed
                raise DohyoError(
                    f"plate {name!r} is given its own subsample, so that it cannot be pointed at other data; "
                    "leave subsample out and index the data by what the plate returns"
                )
            msg["value"], msg["done"] = self.rows[name], True


def run(
    model: Callable[..., Any], guide: Callable[..., Any], args: Any, kwargs: Any, first_dim: int | None, alone: bool = False
) -> Traces:
    """The two traces.

    Args:
        first_dim: Discrete sites that only the model has, and that ask for it, are enumerated in dimensions from here to the
            left; None: they are sampled, which is enough to see the plates.
        alone: The model draws from its own prior, not from the guide.
    """
    guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    return Traces(guide_trace, replay(model, poutine.Trace() if alone else guide_trace, args, kwargs, first_dim))


def replay(fn: Callable[..., Any], trace: Any, args: Any, kwargs: Any, first_dim: int | None) -> Any:
    """The trace of `fn` with the values that `trace` has."""
    if first_dim is not None:
        fn = poutine.enum(fn, first_available_dim=first_dim)
    return poutine.trace(poutine.replay(fn, trace=trace)).get_trace(*args, **kwargs)


@contextmanager
def unseen() -> Iterator[None]:
    """For a run that only shows what there is: no gradients, and torch's generators are left as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.no_grad(), poutine.block():
        yield


def with_values(trace: Any, change: Callable[[Any], Tensor]) -> Any:
    """The trace with `change(site)` in place of each value that was drawn."""
    changed = trace.copy()
    for name, site in trace.iter_stochastic_nodes():
        if not isinstance(site["fn"], _Subsample):
            changed.nodes[name] = {**site, "value": change(site)}
    return changed


def in_particles(fn: Callable[..., Any], count: int, depth: int) -> Callable[..., Any]:
    """`fn` inside an outermost plate of `count` particles, left of the `depth` dimensions of its own plates."""
    return pyro.plate(PARTICLES, count, dim=-1 - depth)(fn)  # type: ignore[no-any-return]


def plate_depth(traces: Traces) -> int:
    """How many dimensions the plates take, counted from the right."""
    dims = [frame.dim for trace in traces for site in sites(trace) for frame in site["cond_indep_stack"] if frame.vectorized]
    return -min(dims, default=0)


def sites(trace: Any) -> list[Any]:
    """The sites that have a density: no plates, and nothing that is determined by other sites."""
    found = prune_subsample_sites(trace).nodes.values()
    return [site for site in found if site["type"] == "sample" and not site["infer"].get("_deterministic")]


def check(traces: Traces, plate: str | None) -> None:
    """A DohyoError where p(x, z) / q(z; x) cannot be had from the traces, for each datum of the plate if one is named."""
    drawn = {site["name"]: site for site in sites(traces.guide) if not site["is_observed"]}
    auxiliary = {name for name, site in drawn.items() if site["infer"].get("is_auxiliary")}
    latent = {site["name"]: site for site in sites(traces.model) if not site["is_observed"]}
    for name, site in latent.items():
        if name not in drawn and "_enumerate_dim" not in site["infer"]:
            raise DohyoError(
                f"the guide has no site {name!r}, which the model samples; add it to the guide, or have a discrete site "
                "summed out by infer={'enumerate': 'parallel'} in the model"
            )
        if site["infer"].get("num_samples") and name not in drawn:
            raise DohyoError(f"site {name!r} is enumerated by num_samples, not in full; leave num_samples out")
    for name in drawn:
        if name not in latent and name not in auxiliary:
            raise DohyoError(f"the guide samples {name!r}, which is no latent site of the model; take it out of the guide")
    deltas = [name for name, site in drawn.items() if isinstance(_bare(site["fn"]), distributions.Delta)]
    if bool(deltas) != bool(auxiliary):
        raise DohyoError(
            f"the guide's {(deltas or sorted(auxiliary))[0]!r} has no density: a Delta needs an auxiliary site that it is made "
            "of (as AutoNormal has, and AutoDelta has not), and an auxiliary site a Delta; use a guide with a density"
        )
    for trace in traces:
        for site in sites(trace):
            _check_scale(site, plate)


def _check_scale(site: Any, plate: str | None) -> None:
    name, frames = site["name"], site["cond_indep_stack"]
    if plate is not None and not any(frame.name == plate and frame.vectorized for frame in frames):
        raise DohyoError(
            f"site {name!r} lies outside plate {plate!r}, so that it belongs to no one datum; put it inside, or for the "
            "log evidence of all data, global latents included, name no plate: from_pyro(model, guide, args=(data,))"
        )
    own = math.prod((frame.full_size or frame.size) / frame.size for frame in frames if frame.size > 0)
    scale = torch.as_tensor(site["scale"], dtype=torch.float64)
    if not bool(((scale / own - 1).abs() < 1e-6).all()):
        raise DohyoError(
            f"site {name!r} is scaled by {site['scale']}, and its plates by {own:g}: p(x, z) is then no density; "
            "take poutine.scale out of the model and the guide"
        )
    for frame in frames:
        if frame.name != plate and frame.full_size not in (None, frame.size):
            raise DohyoError(
                f"plate {frame.name!r} holds {frame.size} of its {frame.full_size}; only the data's plate may be subsampled, "
                "since log p(x, z) needs all of the others: leave its subsample_size out"
            )


def log_density(trace: Any, plates: list[Any]) -> Tensor:
    """The log-density of all sites in the trace, for each element of `plates`, which are frames from left to right."""
    found = sites(trace)
    for site in found:
        site["scale"] = 1.0
        for key in ("log_prob", "log_prob_sum", "unscaled_log_prob"):
            site.pop(key, None)
    names = {site["name"] for site in found}
    trace.compute_log_prob(lambda name, _: name in names)
    if any("_enumerate_dim" in site["infer"] for site in found):
        return _summed_out(trace, found, plates)
    kept, total = {frame.dim for frame in plates}, torch.zeros(())
    for site in found:
        check_site_shape(site, math.inf)
        log_prob = site["log_prob"]
        rest = [dim for dim in range(-log_prob.ndim, 0) if dim not in kept]
        total = total + (log_prob.sum(rest) if rest else log_prob)
    return total


def _summed_out(trace: Any, found: list[Any], plates: list[Any]) -> Tensor:
    """The same with the enumerated sites summed over their values, by Pyro's own contraction."""
    pruned = prune_subsample_sites(trace)
    for name in set(pruned.nodes) - {site["name"] for site in found}:
        pruned.remove_node(name)
    pruned.pack_tensors()
    tree, summed = OrderedDict[Any, list[Any]](), set()
    for site in found:
        symbols = frozenset(pruned.plate_to_symbol[frame.name] for frame in site["cond_indep_stack"] if frame.vectorized)
        enumerated = "_enumerate_dim" in site["infer"]
        if enumerated:
            summed.add(site["infer"]["_enumerate_symbol"])
        # A mask takes away what depends on the site, not the site's own probabilities, which must go on to sum to one.
        tree.setdefault(symbols, []).append(site["packed"]["unscaled_log_prob" if enumerated else "log_prob"])
    sizes = {pruned.plate_to_symbol[frame.name]: frame.size for frame in plates}
    term = contract_to_tensor(tree, summed, target_ordinal=frozenset(sizes), ring=LogRing(dim_to_size=sizes))
    return term.permute([term._pyro_dims.index(symbol) for symbol in sizes])  # type: ignore[no-any-return]


def frames_of(traces: Traces) -> dict[str, Any]:
    """The frame of each vectorised plate, by name."""
    every = [frame for trace in traces for site in sites(trace) for frame in site["cond_indep_stack"]]
    return {frame.name: frame for frame in every if frame.vectorized}


def common_plate(traces: Traces, wanted: str | None) -> str | None:
    """The plate that every site lies in, the data's: the one `wanted`, where there may be several; None if there is none."""
    every = [{frame.name for frame in site["cond_indep_stack"] if frame.vectorized} for t in traces for site in sites(t)]
    shared = sorted(set.intersection(*every) - {PARTICLES}) if every else []
    if wanted is not None:
        if wanted not in frames_of(traces):
            raise DohyoError(f"there is no plate {wanted!r}; the plates are {', '.join(sorted(frames_of(traces))) or 'none'}")
        return wanted
    if len(shared) > 1:
        raise DohyoError(f"every site lies in the plates {' and '.join(shared)}; say which is the data's: plate={shared[0]!r}")
    return shared[0] if shared else None


def subsampled(traces: Traces) -> str | None:
    """A plate that holds a part of its data, if there is one."""
    return next((name for name, frame in frames_of(traces).items() if frame.full_size not in (None, frame.size)), None)


def subsamples(trace: Any) -> dict[str, Tensor]:
    """The data that each plate drew at random."""
    plates = {name: site for name, site in trace.iter_stochastic_nodes() if isinstance(site["fn"], _Subsample)}
    return {name: site["value"] for name, site in plates.items() if len(site["value"]) < site["fn"].size}


def auto_guide(guide: Any) -> Any:
    """The guide itself if it is one of Pyro's automatic ones, which keep the size that their plates had at first."""
    return guide if isinstance(guide, AutoGuide) else None


def _bare(fn: Any) -> Any:
    while hasattr(fn, "base_dist") and isinstance(fn, distributions.Independent | distributions.MaskedDistribution):
        fn = fn.base_dist
    return fn
