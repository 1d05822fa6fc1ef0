"""Maximum likelihood: theta climbs an estimate of log p(x), phi makes that estimate better."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.marginal import Model
from dohyo.names import named
from dohyo.objectives.losses import Losses, Term, check_choices, coefficients, draw_weights, of_each, source_of
from dohyo.packing import Plan, through_tables


@dataclass(frozen=True)
class MaximumLikelihood:
    """See `maximum_likelihood`."""

    estimator: Estimator
    encoder: str
    shared: bool
    running_baseline: bool
    clip_datum: float

    # For replicas in one program: how their arithmetic is run, and how many there are, whose losses are added.
    tables: Callable[..., tuple[Tensor, ...]] = field(default=through_tables, repr=False, compare=False)
    runs: int = field(default=1, repr=False, compare=False)

    def __call__(
        self, model: Model, x: Tensor, depth: torch.Generator | Plan | None = None, baseline: float | Tensor = 0.0
    ) -> Losses:
        """The losses of a batch; their means are over the batch. `depth` draws K, or is the plan itself."""
        drawn = draw_weights(source_of(model, x, self.encoder), x, self.estimator, depth, self.shared)
        function = partial(self._coefficients, batch=len(x) // self.runs, dtype=drawn.log_w.dtype)
        nll, iwae_nll, clipped, theta, *phi = self.tables(
            function, drawn.log_w.detach(), drawn.counts, *of_each(baseline, x, self.encoder)
        )
        for_theta = Term(drawn.log_w, theta)
        for_phi = Term(drawn.log_w_phi, *phi) if phi else for_theta
        numbers = {"train_nll": nll, "train_iwae_nll": iwae_nll, "clipped_data": clipped}
        level = -iwae_nll if self.running_baseline else None
        return Losses(for_theta, for_phi, level, numbers, apart=drawn.log_w_phi is not drawn.log_w)

    def skip(self, generator: torch.Generator) -> None:
        self.estimator.plan(1, generator, shared=True)

    def _coefficients(
        self, log_w: Tensor, counts: Tensor, baseline: Tensor | None = None, *, batch: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """The numbers to record, the coefficients of theta's loss, and of phi's if it has its own, from a table of log-weights.

        Data whose coefficients are large in sum of absolute values, 1 for IWAE and thousands for a deep SUMO, are scaled down.
        """
        value, phi, log_px, iwae = coefficients(log_w, counts, baseline, estimator=self.estimator, encoder=self.encoder)
        clipped = torch.zeros_like(log_px)
        if self.clip_datum < math.inf:
            size = value.abs().sum(-1)
            clipped = (size > self.clip_datum * (1 + 1e-9)).double()
            value = value * (self.clip_datum / size).clamp(max=1.0)[:, None]
        theirs = [-value] if self.encoder == "same" else [-value, phi]
        return -log_px, -iwae, clipped, *((part / batch).to(dtype) for part in theirs)


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
    encoder = check_choices(estimator, encoder, k_draw)
    named({"zero": 0, "running": 0}, baseline, "baseline")
    if baseline == "running" and encoder != "variance":
        raise DohyoError(f"a running baseline is for encoder 'variance', not {encoder!r}")
    if clip_datum is not None and not clip_datum >= 1:
        raise DohyoError(f"clip_datum is {clip_datum}; it must be at least 1, what the coefficients of one datum sum to")
    return MaximumLikelihood(
        estimator, encoder, k_draw == "batch", baseline == "running", math.inf if clip_datum is None else clip_datum
    )


def check_model(model: Any, objective: MaximumLikelihood) -> None:
    """A ValueError if the model lacks what the objective's encoder needs."""
    if not hasattr(model, "log_weights"):
        raise DohyoError(f"{type(model).__name__} has no log_weights(x, rows); see dohyo.models.LatentVariableModel")
    if objective.encoder != "same" and not (hasattr(model, "encoder_parameters") and hasattr(model, "decoder_parameters")):
        raise DohyoError(
            f"encoder {objective.encoder!r} needs {type(model).__name__}.encoder_parameters() and decoder_parameters(); "
            "add them (see dohyo.models.LatentVariableModel), or train with --estimator iwae --encoder same"
        )
    if objective.encoder == "dreg" and not hasattr(model, "bind"):
        raise DohyoError(
            f"encoder 'dreg' needs {type(model).__name__}.bind(x, detach_posterior=True); "
            "add it (see dohyo.models.LatentVariableModel), or use encoder 'iwae' or 'variance'"
        )
