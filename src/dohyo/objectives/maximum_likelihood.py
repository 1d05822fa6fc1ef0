"""Maximum likelihood: theta climbs an estimate of log p(x), phi makes that estimate better."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dohyo.contract import bound, steered, through_chains
from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.names import check_choice
from dohyo.objectives import weighing
from dohyo.objectives.weighing import Encoder, KDraw, Outcome, dot
from dohyo.packing import Plan, through_tables


@dataclass(frozen=True)
class MaximumLikelihood:
    """Maximum likelihood: theta follows `estimator`, phi follows `encoder`.

    Attributes:
        encoder: "same", "variance", "iwae" or "dreg" (`ENCODERS` says what each does). The default is "same" for bounds and
            the jackknife, and "dreg" for unbiased estimators, because it did better than "variance" on MNIST
            (results/mnist_300_epochs.json).
        k_draw: "batch": one K for the whole batch, so that huge weights and clipping are limited to rare steps; "datum": one K
            for each datum, so that every batch has a few huge weights; "stratified": the same, spread evenly over the law of K,
            so that every batch has about as many log-weights.
        baseline: "zero" as in the paper, or "running": the encoder then minimises the mean of (estimate - c)^2 with c a
            running mean of earlier batches' IWAE_n. Any c that is independent of the batch's own noise leaves the expected
            gradient unchanged; a c from the same noise would not.
        clip_datum: The largest sum of the absolute coefficients of one datum's log-weights (for IWAE the sum is 1).

    Example:
        >>> import dohyo
        >>> model, x = dohyo.models.VAE(data=4, hidden=8, latent=2), torch.rand(10, 4).round()
        >>> objective = MaximumLikelihood(dohyo.SUMO.at_cost(15))
        >>> out = objective(model, x)
        >>> out.loss.backward()
        >>> objective.encoder, out.log_px.shape
        ('dreg', torch.Size([10]))
    """

    estimator: Estimator
    encoder: Encoder | None = None
    k_draw: KDraw = "batch"
    baseline: Literal["zero", "running"] = "zero"
    clip_datum: float | None = None
    shared: bool = field(init=False, repr=False)  # whether a batch has one K
    running_baseline: bool = field(init=False, repr=False)

    RECORDED: ClassVar = ("train_nll", "train_iwae_nll", "clipped_data")
    RECORDED_OF_CHAINS: ClassVar = (*RECORDED, "lost_chains")

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", self.k_draw == "batch")
        object.__setattr__(self, "running_baseline", self.baseline == "running")
        if self.encoder is None:
            object.__setattr__(self, "encoder", "dreg" if self.estimator.depth_law.cap > 0 else "same")
        weighing.check_encoder(self.estimator, str(self.encoder), Encoder)
        check_choice(self.k_draw, KDraw, "k_draw")
        check_choice(self.baseline, Literal["zero", "running"], "baseline")
        if self.baseline == "running" and self.encoder != "variance":
            raise DohyoError(f"a running baseline is for encoder 'variance', not {self.encoder!r}")
        if self.clip_datum is not None and not self.clip_datum >= 1:
            raise DohyoError(f"clip_datum is {self.clip_datum}; it must be at least 1, what the coefficients of one datum sum to")

    def __call__(
        self, model: Any, x: Tensor, generator: torch.Generator | None = None, baseline: float | Tensor = 0.0
    ) -> Outcome:
        """The loss of a batch, a mean over its data.

        Args:
            generator: Draws K; torch's own if None.
            baseline: c, for encoder "variance"; one number for all data, or one for each datum.
        """
        encoder = str(self.encoder)
        plan = Plan.of(self.estimator.plan(len(x), generator, self.shared, self.k_draw == "stratified"), x.device)
        given = weighing.baselines(baseline, x, encoder)
        if through_chains(model):
            return self._through_chains(model, x, plan, given)
        log_w, marks = weighing.draw_weights(model, x, encoder, plan.rows)
        function = partial(self.coefficients, batch=len(x), dtype=log_w.dtype)
        found = through_tables(function, log_w.detach(), plan.counts, *given)
        nll, iwae_nll, _, theta, *ratio = found
        loss = dot(theta, log_w)
        if ratio:
            loss = steered(loss, nll.mean(), ratio[0], marks)
        else:
            loss = loss + (nll.mean() - loss).detach()  # the loss shows the mean NLL
        return Outcome(loss, -nll, -iwae_nll, -iwae_nll, dict(zip(self.RECORDED, found, strict=False)))

    def _through_chains(self, model: Any, x: Tensor, plan: Plan, baseline: list[Tensor]) -> Outcome:
        """Theta follows the chains' weights, phi as many fresh samples of the encoder."""
        fresh = model.bind_encoder(x, **weighing.bind_options(str(self.encoder)))(plan.rows)
        log_w = bound(model, x)(plan.rows)
        of_theta = partial(self.chain_coefficients, batch=len(x), dtype=log_w.dtype)
        of_phi = partial(self.encoder_coefficients, batch=len(x), dtype=log_w.dtype)
        found = through_tables(of_theta, log_w.detach(), plan.counts)
        (phi,) = through_tables(of_phi, fresh.detach(), plan.counts, *baseline)
        nll, iwae_nll, *_, theta = found
        loss = dot(theta, log_w) + dot(phi, fresh)
        loss = loss + (nll.mean() - loss).detach()
        return Outcome(loss, -nll, -iwae_nll, -iwae_nll, dict(zip(self.RECORDED_OF_CHAINS, found, strict=False)))

    def coefficients(
        self, log_w: Tensor, counts: Tensor, baseline: Tensor | None = None, *, batch: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """From a table of log-weights: the `RECORDED` numbers of each datum, theta's coefficients, and, if phi has its own, phi's
        coefficients divided by theta's.

        With `clip_datum`, the coefficients of a datum are scaled down if the sum of their absolute values is too large. That sum
        is 1 for IWAE and in the thousands for a deep SUMO.
        """
        encoder = str(self.encoder)
        value, phi, log_px, iwae = weighing.coefficients(log_w, counts, baseline, estimator=self.estimator, encoder=encoder)
        value, clipped = _clipped(value, self.clip_datum)
        if encoder == "same":
            return -log_px, -iwae, clipped, (-value / batch).to(dtype)
        return -log_px, -iwae, clipped, *(part.to(dtype) for part in weighing.safe_ratio(-value / batch, phi / batch))

    def chain_coefficients(self, log_w: Tensor, counts: Tensor, *, batch: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """From a table of chains' log-weights: the `RECORDED_OF_CHAINS` numbers of each datum, and theta's coefficients."""
        value, _, log_px, iwae = weighing.coefficients(log_w, counts, estimator=self.estimator, encoder="same")
        value, clipped = _clipped(value, self.clip_datum)
        own = torch.arange(log_w.shape[1], device=log_w.device) < counts[:, None]
        lost = (own & (log_w == -torch.inf)).double().sum(-1)
        return -log_px, -iwae, clipped, lost, (-value / batch).to(dtype)

    def encoder_coefficients(
        self, log_w: Tensor, counts: Tensor, baseline: Tensor | None = None, *, batch: int, dtype: torch.dtype
    ) -> tuple[Tensor]:
        """From a table of the encoder's own log-weights: phi's coefficients."""
        encoder = str(self.encoder)
        value, phi, _, _ = weighing.coefficients(log_w, counts, baseline, estimator=self.estimator, encoder=encoder)
        return (((-value if encoder == "same" else phi) / batch).to(dtype),)

    def skip(self, generator: torch.Generator) -> None:
        """Draw a shared K and discard it, to stay in step with the other processes."""
        self.estimator.plan(1, generator, shared=True)


def _clipped(value: Tensor, most: float | None) -> tuple[Tensor, Tensor]:
    """The coefficients (batch, width), rows scaled to absolute values that sum to at most `most`; 1 where that was needed."""
    if most is None:
        return value, torch.zeros_like(value[:, 0])
    size = value.abs().sum(-1)
    return value * (most / size).clamp(max=1.0)[:, None], (size > most * (1 + 1e-9)).double()
