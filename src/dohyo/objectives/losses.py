r"""What every objective gives the loop, and the coefficients it is made of.

An estimate Y of log p(x) moves with the parameters through its log-weights:
:math:`\nabla Y = \sum_i (\partial Y / \partial \log w_i)\, \nabla \log w_i`. So the estimator's arithmetic is differentiated
on its own, on a vector of scalars, and the network's backward pass runs on :math:`\sum_i c_i \log w_i` with constant c.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.marginal import one_for_each
from dohyo.names import named
from dohyo.packing import Plan, through_tables

ENCODERS = {
    "same": "follows the estimator itself; only where that is not unbiased for log p(x)",
    "variance": "minimises the estimator's second moment about a baseline (the paper's SUMO^2)",
    "iwae": "climbs IWAE_n on the same weights",
    "dreg": "climbs IWAE_n on the same weights by the doubly reparameterised gradient",
}
DRAWN_ENCODERS = ENCODERS | {"sleep": "learns q(z; x) from the z that each x was drawn from, as the sleep phase of wake-sleep"}


@dataclass(frozen=True)
class Term:
    """What is differentiated: a scalar, or sum_i c_i y_i with constant c."""

    output: Tensor
    coefficients: Tensor | None = None

    @property
    def value(self) -> Tensor:
        return self.output if self.coefficients is None else (self.coefficients * self.output).sum()


@dataclass(frozen=True)
class Losses:
    """One step's losses, each with the gradient that is wanted and no other meaning.

    Attributes:
        for_theta, for_phi: Differentiate the one by the model's parameters and the other by the proposal's. The same object
            where one backward pass serves both.
        level: (batch,) a running baseline, if there is one, is the mean of these over earlier steps.
        numbers: What to record, each (batch,).
        apart: Whether `for_theta` has no gradient in phi, nor `for_phi` in theta, so that one backward pass of both serves both.
    """

    for_theta: Term
    for_phi: Term
    level: Tensor | None
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    apart: bool = False

    @property
    def theta(self) -> Tensor:
        """The model's loss, a scalar."""
        return self.for_theta.value

    @property
    def phi(self) -> Tensor:
        """The proposal's loss, a scalar."""
        return self.for_phi.value


@dataclass(frozen=True)
class Weights:
    """Log-weights of a batch.

    Attributes:
        log_w: (rows,) in the network's graph.
        log_w_phi: The same numbers for phi's loss; another tensor where theta's and phi's graphs are apart.
        rows: (rows,) the datum of each.
        counts: (batch,) how many each datum has.
    """

    log_w: Tensor
    log_w_phi: Tensor
    rows: Tensor
    counts: Tensor

    def dot(self, coefficients: Tensor) -> Tensor:
        """The sum of c_i log w_i."""
        return (coefficients.to(self.log_w.dtype) * self.log_w).sum()


def draw_weights(
    source: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]],
    x: Tensor,
    estimator: Estimator,
    depth: torch.Generator | Plan | None,
    shared: bool,
) -> Weights:
    """Log-weights for the data x.

    Args:
        source: rows -> log-weights, or the same log-weights twice, for theta's gradient alone and for phi's alone.
        depth: What draws the plan, or the plan itself.
    """
    plan = depth if isinstance(depth, Plan) else Plan.of(estimator.plan(len(x), depth, shared=shared), x.device)
    found = source(plan.rows)
    log_w, log_w_phi = found if isinstance(found, tuple) else (found, found)
    one_for_each(plan.rows, log_w)
    if not log_w.requires_grad:
        raise DohyoError("log_weights has no gradient: it must be made of the model's parameters, without detach or no_grad")
    return Weights(log_w, log_w_phi, plan.rows, plan.counts)


def coefficients(
    log_w: Tensor, counts: Tensor, baseline: Tensor | None = None, *, estimator: Estimator, encoder: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The estimates and the coefficients of their gradients, from a table of log-weights: never waits for the host.

    Args:
        log_w: (batch, width); row i holds counts[i] log-weights, then anything.
        baseline: (batch,), for encoder "variance"; zero if None.

    Returns:
        value: (batch, width) dY / dlog w, the estimate's own gradient.
        phi: (batch, width) the gradient of the encoder's loss; `value` again for encoder "same".
        log_px: (batch,) the estimates Y.
        iwae: (batch,) IWAE_n of the same weights, a steadier number to watch.
    """
    leaf = log_w.detach().double().requires_grad_()
    with torch.enable_grad():
        log_px = estimator.reduce(leaf, counts)
        (value,) = torch.autograd.grad(log_px.sum(), leaf)
    log_px, leaf, phi = log_px.detach(), leaf.detach(), value
    own = torch.arange(leaf.shape[1], device=leaf.device) < counts[:, None]
    log_sum = torch.where(own, leaf, -torch.inf).logsumexp(-1)
    if encoder == "variance":
        about = log_px if baseline is None else log_px - baseline
        phi = torch.where(value == 0, 0.0, 2 * about[:, None] * value)  # an estimate of -inf has gradient zero
    elif encoder != "same":
        empty = log_sum[:, None] == -torch.inf  # a datum of zero weights asks for nothing
        posterior = torch.where(empty, 0.0, (leaf - log_sum[:, None]).exp())
        phi = -posterior if encoder == "iwae" else -posterior.square()
    return value, phi, log_px, log_sum - counts.double().log()


@dataclass(frozen=True)
class Weighed(Weights):
    """Log-weights with what `coefficients` makes of them: `value` and `phi` (rows,), `log_px` and `iwae` (batch,)."""

    value: Tensor
    phi: Tensor
    log_px: Tensor
    iwae: Tensor


def weigh(
    source: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]],
    x: Tensor,
    estimator: Estimator,
    encoder: str,
    depth: torch.Generator | Plan | None,
    shared: bool,
    baseline: float | Tensor = 0.0,
) -> Weighed:
    """Log-weights for the data x, the estimates of log p(x) that they give, and the coefficients of their gradients."""
    drawn = draw_weights(source, x, estimator, depth, shared)
    function = partial(coefficients, estimator=estimator, encoder=encoder)
    found = through_tables(function, drawn.log_w.detach(), drawn.counts, *of_each(baseline, x, encoder))
    return Weighed(drawn.log_w, drawn.log_w_phi, drawn.rows, drawn.counts, *found)


def of_each(baseline: float | Tensor, x: Tensor, encoder: str) -> list[Tensor]:
    """The baseline of each datum, (batch,) float64, if the encoder has one that is not zero. Never a copy from the host."""
    if encoder != "variance" or (isinstance(baseline, float) and baseline == 0):
        return []
    whole = baseline if isinstance(baseline, Tensor) else torch.full((), baseline, dtype=torch.float64, device=x.device)
    return [whole.double().expand(len(x))]


def bind_options(encoder: str) -> dict[str, bool]:
    """What the encoder's loss asks of a model's `bind`: nothing that a model need not know, unless it must."""
    return {"detach_posterior": True} if encoder == "dreg" else {}


def source_of(model: Any, x: Tensor, encoder: str) -> Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]:
    """rows -> log-weights, as the encoder's loss wants them; apart for theta and phi where the model can and that is wanted."""
    options = bind_options(encoder)
    if hasattr(model, "bind_apart") and encoder != "same":
        return model.bind_apart(x, **options)  # type: ignore[no-any-return]
    return model.bind(x, **options) if options or hasattr(model, "bind") else lambda wanted: model.log_weights(x, wanted)


def sleep_loss(model: Any, z: Tensor, x: Tensor) -> Tensor:
    """How badly the proposal knows the z that each x was drawn from: -log q(z; x), whose mean is least at the posterior."""
    log_q: Tensor = model.posterior(model.encode(x.detach())).log_prob(z.detach())
    return -log_q.mean()


def check_choices(estimator: Estimator, encoder: str | None, k_draw: str, encoders: Mapping[str, str] = ENCODERS) -> str:
    """The encoder's loss, by default "same" for a fixed number of terms and "dreg" for a random one; or a ValueError."""
    unbiased = estimator.target_terms == math.inf
    encoder = encoder or ("dreg" if estimator.depth_law.cap > 0 else "same")
    named(encoders, encoder, "encoder objective")
    named({"batch": 0, "datum": 0}, k_draw, "k_draw")
    if encoder == "same" and unbiased:
        raise DohyoError(
            f"{type(estimator).__name__} is unbiased whatever the encoder is, so that following it trains the encoder on noise "
            f"alone; use encoder {', '.join(repr(name) for name in encoders if name != 'same')}"
        )
    return encoder
