r"""Chains from q(z; x) to p(x, z) whose weight has mean p(x), run in either direction; `Annealed` derives them.

What a chain is made of besides the model are its `Constants`. Any values leave E[w] = p(x).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributions import Distribution

from dohyo.annealing.whitening import Whitening, noise_size, whiten
from dohyo.contract import offers, one_for_each
from dohyo.errors import DohyoError
from dohyo.packing import take

FARTHEST = 1e6  # widths of q from its mean; a chain that is farther away has exploded


@dataclass(frozen=True)
class Constants:
    """The constants of chains of T leapfrogs for z of size d; where the size is 1 all dimensions share a value.

    Attributes:
        step: (T, d or 1), the step size of each leapfrog, in units of q's own spread.
        bridge: (T,) in [0, 1]: how much of p(x, z), and how little of q, each leapfrog feels.
        persistence: () in [0, 1]: the share of the momentum that is kept from one leapfrog to the next.
        widening: (d or 1,): how many times as wide as q the law is from which chains start.
        mixing: (d, d), the matrix M between momentum and movement, or None for the identity.
    """

    step: Tensor
    bridge: Tensor
    persistence: Tensor
    widening: Tensor
    mixing: Tensor | None = None

    @classmethod
    def plain(cls, steps: int, scale: float = 1.0) -> Self:
        """Those of a chain that was never tuned: what tuning finds for VAEs, roughly."""
        bridge = torch.arange(1, steps + 1, dtype=torch.float64) / (steps + 4)
        persistence, widening = torch.tensor(0.98, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        return cls(torch.full((steps, 1), 0.4 * scale, dtype=torch.float64), bridge, persistence, widening)

    @property
    def steps(self) -> int:
        """T, the number of leapfrogs."""
        return len(self.step)

    @property
    def size(self) -> int | None:
        """d, or None where all dimensions share a value."""
        sizes = self._sizes()
        return sizes.pop() if sizes else None

    def like(self, x: Tensor) -> Self:
        """The same where x lives, in its precision."""
        return self._map(lambda value: value.to(x))

    def of_size(self, size: int) -> Self:
        """The same with a value for each of `size` dimensions."""
        return replace(self, step=self.step.repeat(1, size // self.step.shape[-1]), widening=self.widening.expand(size).clone())

    def frozen(self) -> Self:
        """The same, detached, on the CPU."""
        return self._map(lambda value: value.detach().cpu())

    def to_dict(self) -> dict[str, Any]:
        """Plain lists of numbers for JSON."""
        return {name: None if value is None else value.tolist() for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, checked."""
        names = [field.name for field in fields(cls)]
        if not isinstance(plain, Mapping) or set(plain) | {"mixing"} != set(names):
            came = sorted(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
            raise DohyoError(f"the constants of a chain came as {came}; they must be a mapping of {', '.join(names)}")
        given = {name: value for name, value in plain.items() if name != "mixing" or value is not None}
        try:
            found = {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}
        except (TypeError, ValueError) as error:
            raise DohyoError(f"the constants of a chain hold something other than numbers: {error}") from error
        if found["step"].numel() == 0:
            found["step"] = found["step"].view(0, 1)
        constants = cls(**found)
        constants.check()
        return constants

    def check(self) -> None:
        """A DohyoError that names the first constant with a shape or value it cannot have."""
        limits: dict[str, tuple[int, float, float, str]] = {
            "step": (2, 0.0, math.inf, "positive"),
            "bridge": (1, -1e-30, 1.0, "in [0, 1]"),
            "persistence": (0, -1e-30, 1.0, "in [0, 1]"),
            "widening": (1, 0.0, math.inf, "positive"),
            "mixing": (2, -math.inf, math.inf, "real"),
        }
        for name, (ndim, low, high, bounds) in limits.items():
            value = getattr(self, name)
            if value is not None and (value.ndim != ndim or not bool((value.isfinite() & (value > low) & (value <= high)).all())):
                raise DohyoError(f"{name} of a chain must have {ndim} dimensions and be finite and {bounds}; it is {value}")
        sizes, square = self._sizes(), self.mixing is None or self.mixing.shape[0] == self.mixing.shape[1]
        if len(self.bridge) != self.steps or len(sizes) > 1 or 0 in sizes or not square:
            mixing = None if self.mixing is None else tuple(self.mixing.shape)
            raise DohyoError(
                f"step is {tuple(self.step.shape)}, bridge {tuple(self.bridge.shape)}, widening {tuple(self.widening.shape)}, "
                f"mixing {mixing}; they must be (T, d), (T,), (d,) and (d, d) or None, where d may be 1 in step and widening"
            )

    def _sizes(self) -> set[int]:
        """Every d that some constant says, 1 aside; they should agree."""
        mixed = set() if self.mixing is None else set(self.mixing.shape)
        return ({self.step.shape[-1], len(self.widening)} - {1}) | mixed

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        # Written out, because the compiler cannot follow `vars`.
        mixing = None if self.mixing is None else change(self.mixing)
        return type(self)(change(self.step), change(self.bridge), change(self.persistence), change(self.widening), mixing)


class Ends(NamedTuple):
    """Where chains ended, one row each."""

    z: Tensor  # at the end that is p's
    log_ratio: Tensor  # log w less log p(x, z)
    alive: Tensor  # False where a chain met something that is not finite, or exploded; its weight is zero


class State(NamedTuple):
    """Chains on their way: noise, momentum, whether they are alive, and the logarithm of the weight so far."""

    u: Tensor
    v: Tensor
    alive: Tensor
    log_ratio: Tensor


@dataclass(frozen=True)
class Bridge:
    r"""The densities between q and p(x, z) at noise u, :math:`\pi_t(u) = r(u)^{1 - \beta_t} (p(x, T(u)) |J(u)|)^{\beta_t}`."""

    log_joint: Callable[[Tensor], Tensor]  # z -> log p(x, z), one row each
    whitening: Whitening
    constants: Constants
    learning: bool = False  # keep the graph, so that weights can be differentiated by the constants
    functional: bool = False  # take gradients by `torch.func`, which vmap and the compiler need; slower otherwise

    def forwards(self) -> Ends:
        """Chains from z ~ q on, widened if so; E[w] = p(x)."""
        state = self.start()
        for t in range(self.constants.steps):
            state = self.leap(t, state, refresh=t > 0)
        return self.end(state)

    def start(self) -> State:
        u = self.whitening.sample()
        v = torch.randn_like(u)
        return State(u, v, torch.ones(len(u), dtype=torch.bool, device=u.device), -self.whitening.at(u).log_base)

    def leap(self, t: int, state: State, refresh: bool) -> State:
        """One leapfrog, after a partial refresh of the momentum if asked."""
        before = self._refreshed(state.v) if refresh else state.v
        u, v, alive = self._leapfrog(t, state.u, before, state.alive, 1)
        return State(u, v, alive, state.log_ratio + momentum_ratio(before, v))

    def end(self, state: State) -> Ends:
        end = self.whitening.at(state.u)
        return Ends(end.z, state.log_ratio + end.log_jacobian, state.alive)

    def backwards(self, z: Tensor) -> Ends:
        """The same chains run the other way from z ~ p(z | x), each step undone in turn; E[1 / w] = 1 / p(x)."""
        u = self.whitening.noise(z)
        v = torch.randn_like(u)
        alive = torch.ones(len(u), dtype=torch.bool, device=u.device)
        log_ratio = self.whitening.at(u).log_jacobian
        for t in reversed(range(self.constants.steps)):
            after = v
            u, v, alive = self._leapfrog(t, u, after, alive, -1)
            log_ratio = log_ratio + momentum_ratio(v, after)
            v = v if t == 0 else self._refreshed(v)
        return Ends(z, log_ratio - self.whitening.at(u).log_base, alive)

    def _leapfrog(self, t: int, u: Tensor, v: Tensor, alive: Tensor, sign: int) -> tuple[Tensor, Tensor, Tensor]:
        """Drift, kick, drift: it keeps volumes, and with the sign turned it is undone."""
        step, mixing = sign * self.constants.step[t], self.constants.mixing
        u = u + step / 2 * (v if mixing is None else v @ mixing)
        force = self._force(t, u)
        kick = step * force
        v = v + (kick if mixing is None else kick @ mixing.T)
        u = u + step / 2 * (v if mixing is None else v @ mixing)
        # What is lost is set back to the middle of q, or a NaN would reach distributions that refuse it.
        alive = alive & (force.isfinite() & (u.abs() < FARTHEST)).all(-1)
        kept = alive[:, None]
        return torch.where(kept, u, 0.0), torch.where(kept, v, 0.0), alive

    def _force(self, t: int, u: Tensor) -> Tensor:
        """The gradient of log pi_t."""
        if self.functional:
            return torch.func.grad(lambda u: self._log_pi(t, u).sum())(u)  # type: ignore[no-any-return]
        with torch.enable_grad():
            if not self.learning:
                u = u.detach().requires_grad_()
            return torch.autograd.grad(self._log_pi(t, u).sum(), u, create_graph=self.learning)[0]

    def _log_pi(self, t: int, u: Tensor) -> Tensor:
        place = self.whitening.at(u)
        log_joint = self.log_joint(place.z)
        if not log_joint.requires_grad and not self.functional:
            raise DohyoError("log_joint(x, z) has no gradient in z; write it in torch, without detach or no_grad")
        beta = self.constants.bridge[t]
        return (1 - beta) * place.log_base + beta * (log_joint + place.log_jacobian)

    def _refreshed(self, v: Tensor) -> Tensor:
        keep = self.constants.persistence
        return keep * v + (1 - keep.square()).sqrt() * torch.randn_like(v)


def momentum_ratio(before: Tensor, after: Tensor) -> Tensor:
    """log N(after; 0, I) - log N(before; 0, I) of the momenta before and after a leapfrog."""
    return (before.square() - after.square()).sum(-1) / 2


class Source:
    """rows -> the bridge between q and p of x[rows], encoding x once."""

    def __init__(
        self, model: Any, x: Tensor, constants: Constants, learning: bool = False, functional: bool = False, code: Any = None
    ) -> None:
        self.model, self.x, self.learning, self.functional = model, x, learning, functional
        with torch.no_grad():
            self.code = code if code is not None else model.encode(x) if hasattr(model, "encode") else x
        self.constants = constants.like(_first(self.code))

    def __call__(self, rows: Tensor) -> Bridge:
        with torch.no_grad():
            q = self.model.posterior(take(self.code, rows))
        self._check(q, len(rows))
        whitening, x = whiten(q, self.constants.widening), self.x[rows]
        log_joint = lambda z: one_for_each(rows, self.model.log_joint(x, z))  # noqa: E731
        return Bridge(log_joint, whitening, self.constants, self.learning, self.functional)

    @property
    def size(self) -> int:
        """How many numbers of noise one z is made of; a DohyoError if chains cannot move it."""
        with torch.no_grad():
            q = self.model.posterior(self.code)
            whiten(q, self.constants.widening[:1])
        return noise_size(q)

    def _check(self, q: Distribution, rows: int) -> None:
        if q.batch_shape != (rows,):
            raise DohyoError(
                f"posterior gave a distribution of batch shape {tuple(q.batch_shape)} for {rows} rows; it must be ({rows},): "
                "wrap factors in torch.distributions.Independent"
            )
        size = self.constants.size
        if size is not None and size != noise_size(q):
            raise DohyoError(f"the constants are for z of size {size}, but z has {noise_size(q)}; tune them for this model")


def check_density(model: object) -> None:
    """A DohyoError if a model does not offer what chains need."""
    needed = {"log_joint(x, z)": "the log-density that chains follow", "posterior(code)": "q(z; x), where they start"}
    for name, what in needed.items():
        if not offers(model, name.partition("(")[0]):
            own = type(model).__name__
            raise DohyoError(f"{own} has no {name}, {what}; write it, or derive from dohyo.models.LatentVariableModel")


def _first(code: Any) -> Tensor:
    """The first tensor of a code."""
    while isinstance(code, tuple):
        code = code[0]
    return torch.as_tensor(code)
