r"""What every objective gives the loop, and the coefficients it is made of.

An estimate Y of log p(x) moves with the parameters through its log-weights:
:math:`\nabla Y = \sum_i (\partial Y / \partial \log w_i)\, \nabla \log w_i`. So the estimator's arithmetic is differentiated
on its own, on a vector of scalars, and the network's backward pass runs on :math:`\sum_i c_i \log w_i` with constant c.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dohyo.estimators import Estimator
from dohyo.marginal import one_for_each
from dohyo.names import named
from dohyo.packing import reduce_packed, rows

ENCODERS = {
    "same": "follows the estimator itself; only where that is not unbiased for log p(x)",
    "variance": "minimises the estimator's second moment about a baseline (the paper's SUMO^2)",
    "iwae": "climbs IWAE_n on the same weights",
    "dreg": "climbs IWAE_n on the same weights by the doubly reparameterised gradient",
}
DRAWN_ENCODERS = ENCODERS | {"sleep": "learns q(z; x) from the z that each x was drawn from, as the sleep phase of wake-sleep"}


@dataclass(frozen=True)
class Losses:
    """One step's losses, each with the gradient that is wanted and no other meaning.

    Attributes:
        theta, phi: Scalars; differentiate `theta` by the model's parameters and `phi` by the proposal's. The same object
            where one backward pass serves both.
        level: (batch,) a running baseline is the mean of these over earlier steps.
        numbers: What to record, each (batch,).
    """

    theta: Tensor
    phi: Tensor
    level: Tensor
    numbers: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighed:
    """Estimates of log p(x) for a batch with the coefficients of their gradients.

    Attributes:
        log_w: (rows,) in the network's graph.
        rows: (rows,) the datum of each.
        value: (rows,) dY / dlog w: the estimate's own gradient.
        phi: (rows,) the gradient of the encoder's loss, summed over data; None for encoder "same".
        log_px: (batch,) the estimates Y.
        iwae: (batch,) IWAE_n of the same weights, a steadier number to watch.
    """

    log_w: Tensor
    rows: Tensor
    value: Tensor
    phi: Tensor | None
    log_px: Tensor
    iwae: Tensor

    def dot(self, coefficients: Tensor) -> Tensor:
        """The sum of c_i log w_i."""
        return (coefficients.to(self.log_w.dtype) * self.log_w).sum()


def weigh(
    source: Callable[[Tensor], Tensor],
    x: Tensor,
    estimator: Estimator,
    encoder: str,
    generator: torch.Generator | None,
    shared: bool,
    baseline: float | Tensor = 0.0,
) -> Weighed:
    """Draw a plan and its log-weights for the data x, estimate log p(x), and find the coefficients."""
    counts = estimator.plan(len(x), generator, shared=shared)
    wanted = rows(counts).to(x.device)
    log_w = one_for_each(wanted, source(wanted))
    if not log_w.requires_grad:
        raise ValueError("log_weights has no gradient: it must be made of the model's parameters, without detach or no_grad")
    leaf = log_w.detach().double().requires_grad_()
    with torch.enable_grad():
        log_px = reduce_packed(estimator.reduce, leaf, counts)
        (value,) = torch.autograd.grad(log_px.sum(), leaf, retain_graph=True)
        iwae = reduce_packed(_log_mean, leaf.detach(), counts)
        phi = None
        if encoder == "variance":
            (phi,) = torch.autograd.grad((log_px - baseline).square().sum(), leaf)
        elif encoder != "same":
            empty = (iwae == -torch.inf)[wanted]  # all weights of the datum are zero: it asks for nothing
            posterior = (leaf.detach() - (iwae + counts.to(x.device).double().log())[wanted]).exp()  # normalised
            posterior = torch.where(empty, 0.0, posterior)
            phi = -posterior if encoder == "iwae" else -posterior.square()
    return Weighed(log_w, wanted, value, phi, log_px.detach(), iwae)


def source_of(model: Any, x: Tensor, encoder: str) -> Callable[[Tensor], Tensor]:
    """rows -> log-weights, as the encoder's loss wants them."""
    if encoder == "dreg":
        return model.bind(x, detach_posterior=True)  # type: ignore[no-any-return]
    return model.bind(x) if hasattr(model, "bind") else lambda wanted: model.log_weights(x, wanted)


def sleep_loss(model: Any, z: Tensor, x: Tensor) -> Tensor:
    """How badly the proposal knows the z that each x was drawn from: -log q(z; x), whose mean is least at the posterior."""
    log_q: Tensor = model.posterior(model.encode(x.detach())).log_prob(z.detach())
    return -log_q.mean()


def check_choices(estimator: Estimator, encoder: str | None, k_draw: str, encoders: Mapping[str, str] = ENCODERS) -> str:
    """The encoder's loss, by default "same" for bounds and "dreg" for unbiased estimators; or a ValueError."""
    unbiased = estimator.target_terms == math.inf
    encoder = encoder or ("dreg" if unbiased else "same")
    named(encoders, encoder, "encoder objective")
    named({"batch": 0, "datum": 0}, k_draw, "k_draw")
    if encoder == "same" and unbiased:
        raise ValueError(
            f"{type(estimator).__name__} is unbiased whatever the encoder is, so that following it trains the encoder on noise "
            f"alone; use encoder {', '.join(repr(name) for name in encoders if name != 'same')}"
        )
    return encoder


def _log_mean(log_w: Tensor, counts: Tensor) -> Tensor:
    return log_w.logsumexp(-1) - counts.double().log()
