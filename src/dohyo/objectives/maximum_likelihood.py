"""Maximum likelihood: theta climbs an estimate of log p(x), phi makes that estimate better."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.estimators import Estimator
from dohyo.marginal import Model
from dohyo.names import named
from dohyo.objectives.losses import Losses, check_choices, source_of, weigh


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
        source = source_of(model, x, self.encoder)
        weighed = weigh(source, x, self.estimator, self.encoder, generator, self.shared, baseline)
        value, clipped = self._clip(weighed.value, weighed.rows, len(x))
        theta = weighed.dot(-value / len(x))
        phi = theta if weighed.phi is None else weighed.dot(weighed.phi / len(x))
        numbers = {"train_nll": -weighed.log_px, "train_iwae_nll": -weighed.iwae, "clipped_data": clipped}
        return Losses(theta, phi, weighed.iwae, numbers)

    def skip(self, generator: torch.Generator) -> None:
        self.estimator.plan(1, generator, shared=True)

    def _clip(self, value: Tensor, rows: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Scale down data whose coefficients are large in sum of absolute values: 1 for IWAE, thousands for a deep SUMO."""
        if self.clip_datum == math.inf:
            return value, value.new_zeros(batch)
        size = value.new_zeros(batch).index_add(0, rows, value.abs())
        too_large = size > self.clip_datum * (1 + 1e-9)
        return value * (self.clip_datum / size).clamp(max=1.0)[rows], too_large.double()


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
