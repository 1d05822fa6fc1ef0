r"""Maximum likelihood: theta climbs an estimate of log p(x), phi makes that estimate better.

Every loss here is linear in the log-weights once its coefficients are known: the gradient of an estimate Y is
:math:`\sum_i (\partial Y / \partial \log w_i)\, \nabla \log w_i`. So the estimator's arithmetic is differentiated on its
own, on a vector of scalars, and the network's backward pass runs on :math:`\sum_i c_i \log w_i` with constant c: one
forward pass, one backward pass for theta, one for phi.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.estimators import Estimator
from dohyo.marginal import Model, one_for_each
from dohyo.names import named
from dohyo.packing import reduce_packed, rows

ENCODERS = {
    "same": "follows the estimator itself; only where that is not unbiased for log p(x)",
    "variance": "minimises the estimator's second moment about a baseline (the paper's SUMO^2)",
    "iwae": "climbs IWAE_n on the same weights",
    "dreg": "climbs IWAE_n on the same weights by the doubly reparameterised gradient",
}


@dataclass(frozen=True)
class Losses:
    """One step's losses, each with the gradient that is wanted and no other meaning.

    Attributes:
        theta, phi: Scalars; differentiate `theta` by the model's parameters and `phi` by the proposal's. The same object
            where one backward pass serves both.
        log_px: (batch,) the estimates.
        iwae: (batch,) IWAE_n of the same weights, a steadier number to watch.
        clipped: The share of data whose own contribution was clipped.
    """

    theta: Tensor
    phi: Tensor
    log_px: Tensor
    iwae: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class MaximumLikelihood:
    """See `maximum_likelihood`."""

    estimator: Estimator
    encoder: str
    shared: bool
    running_baseline: bool
    clip_datum: float

    def __call__(self, model: Model, x: Tensor, generator: torch.Generator | None = None, baseline: float = 0.0) -> Losses:
        """The losses of a batch; their means are over the batch."""
        counts = self.estimator.plan(len(x), generator, shared=self.shared)
        wanted = rows(counts).to(x.device)
        log_w = one_for_each(wanted, self._source(model, x)(wanted))
        if not log_w.requires_grad:
            raise ValueError("log_weights has no gradient: it must be made of the model's parameters, without detach or no_grad")
        leaf = log_w.detach().double().requires_grad_()
        with torch.enable_grad():
            log_px = reduce_packed(self.estimator.reduce, leaf, counts)
            (theta,) = torch.autograd.grad(-log_px.mean(), leaf, retain_graph=True)
            theta, clipped = self._clip(theta, wanted, len(x))
            iwae = reduce_packed(_log_mean, leaf.detach(), counts)
            empty = (iwae == -torch.inf)[wanted]  # all weights of the datum are zero: it asks for nothing
            posterior = (leaf.detach() - (iwae + counts.to(x.device).double().log())[wanted]).exp()  # normalised
            posterior = torch.where(empty, 0.0, posterior)
            if self.encoder == "variance":
                (phi,) = torch.autograd.grad((log_px - baseline).square().mean(), leaf)
            else:
                phi = {"iwae": -posterior, "dreg": -posterior.square(), "same": theta * len(x)}[self.encoder] / len(x)
        theta_loss = (theta.to(log_w.dtype) * log_w).sum()
        phi_loss = theta_loss if self.encoder == "same" else (phi.to(log_w.dtype) * log_w).sum()
        return Losses(theta_loss, phi_loss, log_px.detach(), iwae, clipped)

    def _source(self, model: Any, x: Tensor) -> Any:
        if self.encoder == "dreg":
            return model.bind(x, detach_posterior=True)
        return model.bind(x) if hasattr(model, "bind") else lambda wanted: model.log_weights(x, wanted)

    def _clip(self, theta: Tensor, wanted: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Scale down data whose coefficients are large in sum of absolute values: 1 for IWAE, thousands for a deep SUMO."""
        if self.clip_datum == math.inf:
            return theta, theta.new_zeros(())
        size = theta.new_zeros(batch).index_add(0, wanted, theta.abs()) * batch
        too_large = size > self.clip_datum * (1 + 1e-9)
        return theta * (self.clip_datum / size).clamp(max=1.0)[wanted], too_large.double().mean()


def maximum_likelihood(
    estimator: Estimator,
    encoder: str | None = None,
    *,
    k_draw: str = "batch",
    baseline: str = "zero",
    clip_datum: float | None = None,
) -> MaximumLikelihood:
    """The objective of maximum likelihood: theta follows `estimator`, phi follows `encoder`.

    Args:
        encoder: "same", "variance", "iwae" or "dreg" (`ENCODERS` says what each does). By default "same" for bounds and the
            jackknife and "dreg" for unbiased estimators, which in a prototype's single MNIST runs did better than "variance".
        k_draw: "batch": one K for the whole batch, so that most steps are clean and rare ones are clipped; "datum": one for
            each, so that every batch holds a few huge weights.
        baseline: "zero" as in the paper, or "running": the encoder then minimises the mean of (estimate - c)^2 with c a
            running mean of earlier batches' IWAE_n. Any c that is independent of the batch's own draws leaves the expected
            gradient as it is; a c from the same draws would not.
        clip_datum: The most that the absolute coefficients of one datum's log-weights may sum to (they sum to 1 for IWAE).

    Example:
        >>> import dohyo
        >>> maximum_likelihood(dohyo.SUMO.at_cost(15)).encoder
        'dreg'
    """
    unbiased = estimator.target_terms == math.inf
    encoder = encoder or ("dreg" if unbiased else "same")
    named(ENCODERS, encoder, "encoder objective")
    named({"batch": 0, "datum": 0}, k_draw, "k_draw")
    named({"zero": 0, "running": 0}, baseline, "baseline")
    if encoder == "same" and unbiased:
        raise ValueError(
            f"{type(estimator).__name__} is unbiased whatever the encoder is, so that following it trains the encoder on noise "
            "alone; use encoder 'dreg', 'iwae' or 'variance'"
        )
    if baseline == "running" and encoder != "variance":
        raise ValueError(f"a running baseline is for encoder 'variance', not {encoder!r}")
    if clip_datum is not None and not clip_datum >= 1:
        raise ValueError(f"clip_datum is {clip_datum}; it must be at least 1, what the coefficients of one datum sum to")
    return MaximumLikelihood(
        estimator, encoder, k_draw == "batch", baseline == "running", math.inf if clip_datum is None else clip_datum
    )


def check_model(model: Any, objective: MaximumLikelihood) -> None:
    """A ValueError if the model lacks what the objective's encoder needs."""
    if not hasattr(model, "log_weights"):
        raise ValueError(f"{type(model).__name__} has no log_weights(x, rows); see dohyo.models.LatentVariableModel")
    if objective.encoder != "same" and not (hasattr(model, "encoder_parameters") and hasattr(model, "decoder_parameters")):
        raise ValueError(
            f"encoder {objective.encoder!r} needs {type(model).__name__}.encoder_parameters() and decoder_parameters(); "
            "add them (see dohyo.models.LatentVariableModel), or train with --estimator iwae --encoder same"
        )
    if objective.encoder == "dreg" and not hasattr(model, "bind"):
        raise ValueError(
            f"encoder 'dreg' needs {type(model).__name__}.bind(x, detach_posterior=True); "
            "add it (see dohyo.models.LatentVariableModel), or use encoder 'iwae' or 'variance'"
        )


def _log_mean(log_w: Tensor, counts: Tensor) -> Tensor:
    return log_w.logsumexp(-1) - counts.double().log()
