r"""Chains from q(z; x) to p(x, z) whose weight has mean p(x), run in either direction; `Annealed` derives them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from dohyo.annealing.constants import Constants
from dohyo.annealing.whitening import Whitening, noise_size, whiten
from dohyo.contract import offers, one_for_each
from dohyo.errors import DohyoError
from dohyo.packing import take

FARTHEST = 1e6  # widths of q from its mean; a chain that is farther away has exploded


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
