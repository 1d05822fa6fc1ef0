"""A guide of Pyro as one distribution of all its latents, and the model's density beside it: what annealed chains need.

Each site is taken to the real line (`biject_to` of its support), so that z can move by small steps, and all sites of a datum
are one row of numbers. Both densities are of these numbers, so that their ratio is that of the sites.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints
from torch.distributions.transforms import identity_transform

from dohyo.errors import DohyoError
from dohyo.integrations import pyro_traces as traced
from dohyo.integrations.pyro_traces import poutine

_SUPPORTS = (constraints.real, constraints.positive, constraints.nonnegative, constraints.unit_interval)


class Latent(NamedTuple):
    """A site: its name, where the data lie in its values, their shape without that, and the map from the real line."""

    name: str
    data_dim: int
    shape: torch.Size
    transform: Any

    def row(self, value: Tensor) -> Tensor:
        """(rows, size) on the real line."""
        return self.flat(self.transform.inv(value))

    def value(self, row: Tensor) -> Tensor:
        """What the site draws."""
        return self.transform(self._unflat(row))  # type: ignore[no-any-return]

    def log_jacobian(self, row: Tensor) -> Tensor:
        """(rows,) of `value`."""
        real = self._unflat(row)
        return self.flat(self.transform.log_abs_det_jacobian(real, self.transform(real))).sum(-1)

    def flat(self, value: Tensor) -> Tensor:
        """(rows, size)."""
        return value.movedim(self.data_dim, 0).reshape(value.shape[self.data_dim], -1)

    def _unflat(self, row: Tensor) -> Tensor:
        return row.reshape(len(row), *self.shape).movedim(0, self.data_dim)


def latents_of(trace: Any, plate: str) -> list[Latent]:
    """The sites that the guide draws, or a DohyoError if chains cannot move them."""
    found = []
    for site in traced.sites(trace):
        if site["is_observed"]:
            continue
        support = site["fn"].support
        while hasattr(support, "base_constraint"):
            support = support.base_constraint
        known = [each for each in _SUPPORTS if str(each) == str(support)]
        auxiliary = site["infer"].get("is_auxiliary")
        if not known or auxiliary:
            why = "is auxiliary" if auxiliary else f"fills {support}"
            raise DohyoError(
                f"site {site['name']!r} of the guide {why}; chains need latents on the real line, above zero or between 0 and 1, "
                "that the guide draws itself: anneal with steps=0 here"
            )
        (frame,) = [frame for frame in site["cond_indep_stack"] if frame.name == plate]
        data_dim = frame.dim - site["fn"].event_dim
        found.append(Latent(site["name"], data_dim, site["value"].movedim(data_dim, 0).shape[1:], biject_to(known[0])))
    return found


def replayed(latents: list[Latent], z: Tensor) -> tuple[Any, Tensor]:
    """A trace of the sites' values for z (rows, size), and the logarithm of the Jacobian."""
    z = z.reshape(len(z), -1)
    trace, log_jacobian = poutine.Trace(), z.new_zeros(len(z))
    for latent, row in zip(latents, z.split([latent.shape.numel() for latent in latents], 1), strict=True):
        trace.add_node(latent.name, name=latent.name, type="sample", value=latent.value(row), is_observed=False, infer={})
        log_jacobian = log_jacobian + latent.log_jacobian(row)
    return trace, log_jacobian


def posterior(guide: Any, x: Tensor, plate: str) -> tuple[Distribution, list[Latent]]:
    """q(z; x), one row for each datum, and its sites; the distribution of the site itself where there is one on the real line."""
    trace = poutine.trace(guide).get_trace(x)
    latents = latents_of(trace, plate)
    fn = trace.nodes[latents[0].name]["fn"]
    if len(latents) == 1 and fn.batch_shape == (len(x),) and latents[0].transform is identity_transform:
        return fn, latents
    return GuidePosterior(guide, x, plate, trace, latents), latents


class GuidePosterior(Distribution):
    """q(z; x) of a guide for the data x, one row each.

    `mean` and `stddev`, by which chains scale their steps, are those of the sites' distributions in one run of the guide, taken
    to the real line: rough where a site's distribution depends on another's value.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 1)

    def __init__(self, guide: Any, x: Tensor, plate: str, trace: Any, latents: list[Latent]) -> None:
        self.guide, self.x, self.plate, self.latents = guide, x, plate, latents
        moments = [_moments(trace.nodes[latent.name], latent) for latent in latents]
        self._mean, self._stddev = (torch.cat(parts, -1) for parts in zip(*moments, strict=True))
        super().__init__(torch.Size([len(x)]), self._mean.shape[1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def stddev(self) -> Tensor:
        return self._stddev

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        with torch.no_grad():
            trace = poutine.trace(self.guide).get_trace(self.x)
            return torch.cat([latent.row(trace.nodes[latent.name]["value"]) for latent in self.latents], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        trace, log_jacobian = replayed(self.latents, value)
        found = traced.replay(self.guide, trace, (self.x,), {}, None)
        return log_density(found, self.plate) + log_jacobian


def log_density(trace: Any, plate: str) -> Tensor:
    """For each datum of the plate."""
    frame = traced.frames_of(traced.Traces(trace, trace))[plate]
    return traced.log_density(trace, [frame])


def _moments(site: Any, latent: Latent) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation on the real line, the latter by the slope of the map at the former."""
    shape = site["value"].shape
    mean, stddev = site["fn"].mean.expand(shape), site["fn"].stddev.expand(shape)
    real = latent.transform.inv(mean)
    slope = latent.transform.log_abs_det_jacobian(real, mean).exp()
    return latent.row(mean), latent.flat(stddev / slope)
