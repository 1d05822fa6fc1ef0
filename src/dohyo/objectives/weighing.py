r"""What every objective returns, and the coefficients of the log-weights in its loss.

An estimate Y of log p(x) depends on the parameters through its log-weights:
:math:`\nabla Y = \sum_i (\partial Y / \partial \log w_i)\, \nabla \log w_i`. So the estimator's arithmetic is differentiated
separately, on a vector of scalars, and the network's backward pass runs on :math:`\sum_i c_i \log w_i` with constant c.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dohyo.contract import Mark, bound, check_marks, marking, offers, one_for_each, require, steered
from dohyo.errors import DohyoError
from dohyo.estimators import IWAE, Estimator
from dohyo.names import check_choice
from dohyo.packing import Plan, through_tables

Encoder = Literal["same", "variance", "iwae", "dreg"]
SamplingEncoder = Literal["same", "variance", "iwae", "dreg", "sleep"]
KDraw = Literal["batch", "datum", "stratified"]
ENCODERS: dict[str, str] = {
    "same": "follows the estimator itself; only where that is not unbiased for log p(x)",
    "variance": "minimises the estimator's second moment about a baseline (the paper's SUMO^2)",
    "iwae": "climbs IWAE_n on the same weights",
    "dreg": "climbs IWAE_n on the same weights by the doubly reparameterised gradient",
    "sleep": "learns q(z; x) from the z that each sample x came from, as the sleep phase of wake-sleep",
}
_LEAST = 1e-20  # replaces a coefficient of zero, to avoid dividing by zero; it vanishes in any sum of coefficients


@dataclass(frozen=True)
class Outcome:
    """One step's loss, and what to log.

    Attributes:
        loss: A scalar. `loss.backward()` puts the model's gradient into theta and the proposal's into phi; its value is that
            of theta's loss.
        log_px: (batch,) the estimates of log p(x).
        iwae: (batch,) IWAE_n of the same weights, a less noisy number to watch; equal to `log_px` if there are no weights.
        level: (batch,) the numbers whose mean over earlier steps is the running baseline, if there is one.
        numbers: What the training loop records, each (batch,).
    """

    loss: Tensor
    log_px: Tensor
    iwae: Tensor
    level: Tensor
    numbers: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighed:
    """Log-weights of a batch with the estimates they give, and the coefficients of the estimates' gradients."""

    log_w: Tensor  # (rows,) with the network's graph
    marks: list[Mark]  # where the proposal ends and the model begins
    rows: Tensor  # (rows,) the datum of each log-weight
    value: Tensor  # (rows,) dY / dlog w, the estimate's own gradient, float64
    phi: Tensor  # (rows,) the same for the encoder's loss
    log_px: Tensor  # (batch,) the estimates Y
    iwae: Tensor  # (batch,) IWAE_n

    def loss(self, theta: Tensor, phi: Tensor | None) -> Tensor:
        """A zero whose gradient is that of sum c_i log w_i in theta, and of sum c'_i log w_i in phi (None: the same)."""
        if phi is None:
            loss = dot(theta, self.log_w)
            return loss - loss.detach()
        theta, ratio = safe_ratio(theta, phi)
        return steered(dot(theta, self.log_w), self.log_w.new_zeros(()), ratio.to(self.log_w.dtype), self.marks)

    def proposals_loss(self, gradients: list[Tensor]) -> Tensor:
        """phi's loss if theta's does not pass through the log-weights: the gradients at the marks, each row times its ratio."""
        _, ratio = safe_ratio(self.value, self.phi)
        parts = []
        for mark, gradient in zip(self.marks, gradients, strict=True):
            factor = ratio.to(gradient.dtype).reshape(-1, *(1,) * (gradient.ndim - 1))
            parts.append((gradient * factor * mark.inside).sum())
        return torch.stack(parts).sum()


def dot(coefficients: Tensor, log_w: Tensor) -> Tensor:
    """The sum of c_i log w_i, where a weight of zero has coefficient zero."""
    return (coefficients.to(log_w.dtype) * log_w.masked_fill(coefficients == 0, 0.0)).sum()


def draw_weights(model: Any, x: Tensor, encoder: str, rows: Tensor, **options: bool) -> tuple[Tensor, list[Mark]]:
    """The log-weights of x[rows], with a gradient, and the marks that the model made."""
    source = bound(model, x, detach_posterior=encoder == "dreg", **options)
    marks: list[Mark] = []
    if encoder == "same":
        log_w = source(rows)
    else:
        with marking() as marks:
            log_w = source(rows)
    one_for_each(rows, log_w)
    if not log_w.requires_grad:
        raise DohyoError("log_weights has no gradient: it must be made of the model's parameters, without detach or no_grad")
    if encoder != "same":
        check_marks(model, log_w, marks, len(rows), x)
    return log_w, marks


def weigh(
    model: Any,
    x: Tensor,
    estimator: Estimator,
    encoder: str,
    generator: torch.Generator | None,
    k_draw: KDraw,
    baseline: float | Tensor = 0.0,
    **options: bool,
) -> Weighed:
    """Log-weights for the data x, the estimates of log p(x) that they give, and the coefficients of their gradients."""
    plan = Plan.of(estimator.plan(len(x), generator, k_draw == "batch", k_draw == "stratified"), x.device)
    log_w, marks = draw_weights(model, x, encoder, plan.rows, **options)
    function = partial(coefficients, estimator=estimator, encoder=encoder)
    found = through_tables(function, log_w.detach(), plan.counts, *baselines(baseline, x, encoder))
    return Weighed(log_w, marks, plan.rows, *found)


def coefficients(
    log_w: Tensor, counts: Tensor, baseline: Tensor | None = None, *, estimator: Estimator, encoder: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The estimates and the coefficients of their gradients, from a table of log-weights. It never waits for the host.

    Args:
        log_w: (batch, width); row i holds counts[i] log-weights, then arbitrary padding.
        baseline: (batch,), for encoder "variance"; zero if None.

    Returns:
        value: (batch, width) dY / dlog w, the estimate's own gradient.
        phi: (batch, width) the gradient of the encoder's loss; equal to `value` for "same", zero for "sleep".
        log_px: (batch,) the estimates Y.
        iwae: (batch,) IWAE_n of the same weights.
    """
    leaf = log_w.detach().double()
    log_px, value = estimator.slopes(leaf, counts)
    phi = value
    if isinstance(estimator, IWAE):
        iwae, posterior = log_px, value  # its slopes are the normalised weights
    else:
        own = torch.arange(leaf.shape[1], device=leaf.device) < counts[:, None]
        log_sum = torch.where(own, leaf, -torch.inf).logsumexp(-1)
        empty = log_sum[:, None] == -torch.inf  # a datum whose weights are all zero has no gradient
        iwae, posterior = log_sum - counts.double().log(), torch.where(empty, 0.0, (leaf - log_sum[:, None]).exp())
    if encoder == "variance":
        about = log_px if baseline is None else log_px - baseline
        phi = torch.where(value == 0, 0.0, 2 * about[:, None] * value)  # an estimate of -inf has gradient zero
    elif encoder == "sleep":
        phi = torch.zeros_like(value)
    elif encoder != "same":
        phi = -posterior if encoder == "iwae" else -posterior.square()
    return value, phi, log_px, iwae


def safe_ratio(theta: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """theta's coefficients, and phi's divided by them; a zero is replaced by a number too small to matter."""
    theta = torch.where((theta.abs() < _LEAST) & (phi != 0), _LEAST, theta)
    return theta, torch.where(phi == 0, 0.0, phi / theta)


def require_sampler(model: object, what: str, *methods: str) -> None:
    """Raise a DohyoError if `what`, an objective on the model's own samples, cannot train this model."""
    if offers(model, "bind_encoder"):
        raise DohyoError(f"{what} cannot train through annealed chains, only maximum likelihood can; give it the model itself")
    require(model, what, *methods)


def bind_options(encoder: str) -> dict[str, bool]:
    """The options of a model's `bind` that the encoder's loss needs."""
    return {"detach_posterior": True} if encoder == "dreg" else {}


def baselines(baseline: float | Tensor, x: Tensor, encoder: str) -> list[Tensor]:
    """The baseline of each datum, (batch,) float64, if the encoder has one that is not zero. Nothing is copied from the host."""
    if encoder != "variance" or (isinstance(baseline, float) and baseline == 0):
        return []
    whole = baseline if isinstance(baseline, Tensor) else torch.full((), baseline, dtype=torch.float64, device=x.device)
    return [whole.double().expand(len(x))]


def sleep_loss(model: Any, z: Tensor, x: Tensor) -> Tensor:
    """-log q(z; x) at the z that each x came from; its mean is smallest if q is the posterior."""
    require(model, "encoder 'sleep'", "encode", "posterior")
    log_q: Tensor = model.posterior(model.encode(x.detach())).log_prob(z.detach())
    return -log_q.mean()


def check_encoder(estimator: Estimator, encoder: str, kind: Any) -> None:
    """Raise a DohyoError if there is no such encoder objective, or if it would train on noise."""
    check_choice(encoder, kind, "encoder objective")
    if encoder == "same" and estimator.target_terms == math.inf:
        others = ", ".join(repr(name) for name in ENCODERS if name != "same" and (name != "sleep" or kind is SamplingEncoder))
        raise DohyoError(
            f"{type(estimator).__name__} is unbiased whatever the encoder is, so that following it trains the encoder on noise "
            f"alone; use encoder {others}"
        )
