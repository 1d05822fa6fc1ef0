r"""A proposal q(z; x) as a map of noise, z = T(u), so that every model's chains live in the same coordinates.

In them q is spread over about one unit in each dimension. With r(u) the density of the noise and J the Jacobian of T, what q
and the model say of z they say of u as :math:`r(u)` and :math:`p(x, T(u))\, |J(u)|`.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import ComposeTransform, Distribution, Independent, Normal, TransformedDistribution, constraints

from dohyo.errors import DohyoError


class Place(NamedTuple):
    """Where the noise u lies: z = T(u), log |det dz/du| and log r(u), one row each."""

    z: Tensor
    log_jacobian: Tensor
    log_base: Tensor


class Whitening(ABC):
    """The map of the noise u, (rows, size), to z ~ q(z; x), one row for each pair."""

    @abstractmethod
    def sample(self) -> Tensor:
        """u ~ r, so that T(u) ~ q where nothing is widened."""

    @abstractmethod
    def at(self, u: Tensor) -> Place:
        """z = T(u) with its densities."""

    @abstractmethod
    def noise(self, z: Tensor) -> Tensor:
        """The u with T(u) = z."""


def whiten(q: Distribution, widening: Tensor) -> Whitening:
    """The coordinates of `q`, which has one batch dimension, the rows.

    A chain q(a) q(b | a) (attributes `first`, a distribution of a, and `second`, a function of a that returns that of b) and a
    flow (torch's `TransformedDistribution`, or a zuko flow) go through the noise that they are made of; every other q on the
    real line by its mean and standard deviation. `widening`, (size,) or (1,), are factors of the noise: above one T(u) is spread
    more widely than q.
    """
    q = _bare(q)
    widening = widening.expand(noise_size(q))
    if _is_chain(q):
        return _Chained(q, widening)
    flow = _flow(q)
    return _Flowed(*flow, widening) if flow else _Scaled(q, widening)


def noise_size(q: Distribution) -> int:
    """How many numbers of noise one z is made of."""
    bare = _bare(q)
    if _is_chain(bare):
        return noise_size(bare.first) + int(bare.event_shape.numel() - bare.first.event_shape.numel())
    flow = _flow(bare)
    return noise_size(flow[0]) if flow else int((bare.batch_shape + bare.event_shape)[1:].numel())


class _Scaled(Whitening):
    """z = mean + stddev * widening * u."""

    def __init__(self, q: Distribution, widening: Tensor) -> None:
        _check(q)
        self.q, self.shape, self.gaussian = q, q.batch_shape + q.event_shape, isinstance(q, Normal)
        mean, stddev = _flat(q.mean), _flat(q.stddev)
        # Some have no mean or no variance, as Student's t with few degrees of freedom; any numbers in their place will do.
        self.mean = torch.where(mean.isfinite(), mean, 0.0)
        self.stddev = torch.where(stddev.isfinite() & (stddev > 0), stddev, 1.0)
        self.scale = self.stddev * widening

    def sample(self) -> Tensor:
        if self.gaussian:
            return torch.randn_like(self.mean)
        return (_flat(self.q.sample()) - self.mean) / self.stddev

    def at(self, u: Tensor) -> Place:
        z = (self.mean + self.scale * u).view(self.shape)
        if self.gaussian:
            log_base = -(u.square() + math.log(2 * math.pi)).sum(-1) / 2
        else:
            log_q = self.q.log_prob((self.mean + self.stddev * u).view(self.shape))
            log_base = _flat(log_q).sum(-1) + self.stddev.log().sum(-1)
        return Place(z, self.scale.log().sum(-1), log_base)

    def noise(self, z: Tensor) -> Tensor:
        return (_flat(z) - self.mean) / self.scale


class _Flowed(Whitening):
    """z = f(y) with y from whitened noise."""

    def __init__(self, base: Distribution, transform: Any, widening: Tensor) -> None:
        self.base, self.transform = whiten(base, widening), transform

    def sample(self) -> Tensor:
        return self.base.sample()

    def at(self, u: Tensor) -> Place:
        y, log_jacobian, log_base = self.base.at(u)
        z = self.transform(y)
        own = self.transform.log_abs_det_jacobian(y, z)
        return Place(z, log_jacobian + _flat(own).sum(-1), log_base)

    def noise(self, z: Tensor) -> Tensor:
        return self.base.noise(self.transform.inv(z))


class _Chained(Whitening):
    """z = (a, b), where the distribution of b is a function of a."""

    def __init__(self, q: Any, widening: Tensor) -> None:
        self.second, self.size = q.second, q.first.event_shape.numel()
        self.first = whiten(q.first, widening[: noise_size(q.first)])
        self.widening = widening[noise_size(q.first) :]

    def sample(self) -> Tensor:
        u = self.first.sample()
        return torch.cat([u, self._after(self.first.at(u).z).sample()], -1)

    def at(self, u: Tensor) -> Place:
        cut = u.shape[-1] - len(self.widening)
        a = self.first.at(u[:, :cut])
        b = self._after(a.z).at(u[:, cut:])
        return Place(torch.cat([a.z, b.z], -1), a.log_jacobian + b.log_jacobian, a.log_base + b.log_base)

    def noise(self, z: Tensor) -> Tensor:
        a, b = z[:, : self.size], z[:, self.size :]
        return torch.cat([self.first.noise(a), self._after(a).noise(b)], -1)

    def _after(self, a: Tensor) -> Whitening:
        return whiten(self.second(a), self.widening)


def _bare(q: Distribution) -> Any:
    """q without `Independent` around it: all dimensions but the first belong to one z in any case."""
    while isinstance(q, Independent):
        q = q.base_dist
    return q


def _flat(z: Tensor) -> Tensor:
    """One row of numbers for each row."""
    return z.reshape(len(z), -1)


def _is_chain(q: object) -> bool:
    return isinstance(getattr(q, "first", None), Distribution) and callable(getattr(q, "second", None))


def _flow(q: Any) -> tuple[Distribution, Any] | None:
    """The base of a flow and its map to z, if q is one; zuko's transforms lead from z to the base."""
    if isinstance(q, TransformedDistribution):
        return q.base_dist, ComposeTransform(q.transforms)
    base, transform = getattr(q, "base", None), getattr(q, "transform", None)
    return (base, transform.inv) if isinstance(base, Distribution) and transform is not None else None


def _check(q: Distribution) -> None:
    """A DohyoError if z cannot move by small steps under q."""
    name = type(q).__name__
    try:
        support: Any = q.support
    except NotImplementedError:
        support = constraints.real
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    if support.is_discrete:
        raise DohyoError(f"q(z; x) is a {name}, so that z is discrete; chains need a continuous z: anneal with steps=0 here")
    if type(support) is not type(constraints.real):
        raise DohyoError(
            f"q(z; x) is a {name}, and its z fills {support}, not the real line; write q as a TransformedDistribution of a "
            "Normal, so that chains can move in its noise"
        )
    if type(q).log_prob is Distribution.log_prob:
        raise DohyoError(f"q(z; x) is a {name} without log_prob; chains need the density that they start from: write log_prob")
    try:
        _ = q.mean, q.stddev
    except (NotImplementedError, AttributeError):
        raise DohyoError(
            f"q(z; x) is a {name} without mean and stddev, by which chains scale their steps; write both properties, any "
            "rough values will do"
        ) from None
