r"""The true reverse KL of a model to a target, measured in ways that do not rely on the model's encoder.

It needs log p(x) at samples x of the model, for which there are three averages over many weights:

- by the encoder: IWAE with z from q(z; x), a lower bound that is loose if the encoder is bad;
- by the prior: the log of the mean of p(x | z) over z from p(z), the same z for all x. A lower bound independent of the
  encoder; tight in two dimensions, useless in many;
- from above: IWAE with one z replaced by the z that x was sampled from, which is a sample of the true posterior. An *upper*
  bound in any dimension (Sobolev and Vetrov 2019), loose if the encoder is bad.

So an encoder that no longer fits shows as a gap. Both gaps close as the weights get better: an `Annealed` model may stand for its
model here, with chains in place of draws of q, and one chain run backwards from the z that x was sampled from.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dohyo.annealing import Annealed
from dohyo.diagnostics import khat
from dohyo.evaluation import isolated
from dohyo.packing import rows

TOLERANCE = 1.0  # nats, beyond four standard errors, by which two ways may differ before the encoder counts as lost


@dataclass(frozen=True)
class Draws:
    """Samples x of a model, and for each of them, (n,) float64: the log-density of the target, and log p(x) in three ways."""

    x: Tensor
    log_target: Tensor
    by_encoder: Tensor
    by_prior: Tensor
    above: Tensor

    @property
    def log_px(self) -> Tensor:
        """The lower bound with the larger mean."""
        return self.by_prior if float(self.by_prior.mean()) > float(self.by_encoder.mean()) else self.by_encoder


@dataclass(frozen=True)
class Divergence:
    """The mean of log p(x) - log p*(x) over samples, and whether the three ways to compute it agree.

    Attributes:
        objective: The mean, with p* not normalised and the larger of the two lower bounds of log p(x).
        stderr: Its standard error over the samples; how well log p(x) is known shows in the gaps between the ways.
        reverse_kl: The objective plus log Z, the KL divergence itself; None if log Z is not known.
        log_z, log_z_stderr: log Z by the importance weights p*(x) / p(x) of the samples; where these are heavy (see the k-hat of
            `weighted_moments`) it is too low.
        ess: The effective sample size of these weights.
        estimated_kl, estimated_kl_stderr: The objective plus `log_z`, with the error of both together.
        by_encoder, by_prior, above: The objective by each way.
        warnings: How the ways disagree, in words; empty if they agree.
    """

    objective: float
    stderr: float
    reverse_kl: float | None
    log_z: float
    log_z_stderr: float
    ess: float
    estimated_kl: float
    estimated_kl_stderr: float
    by_encoder: float
    by_prior: float
    above: float
    warnings: tuple[str, ...]


def draw(model: Any, target: Any, n: int, terms: int, seed: int = 0, max_rows: int = 10_000, prior_terms: int = 20_000) -> Draws:
    """n samples of the model, with log p(x) from `terms` samples of the encoder and `prior_terms` of the prior.

    Args:
        model: With `Annealed`, `terms` chains that start from the encoder.
        max_rows: The most rows given to the network at a time.
    """
    parts, own = [], model.model if isinstance(model, Annealed) else model
    with isolated(model, seed):
        components = own.likelihood(own.prior().sample((prior_terms,)))
        for begin in range(0, n, most := max(1, max_rows // terms)):
            size = min(most, n - begin)
            z, x = own.sample_joint(size)
            log_w = model.bind(x)(rows(torch.full((size,), terms)).to(x.device)).double().view(size, terms)
            if isinstance(model, Annealed):
                exact = model.backwards(x, z)
            else:
                exact = own.prior().log_prob(z) + own.likelihood(z).log_prob(x) - own.posterior(own.encode(x)).log_prob(z)
            by_encoder = log_w.logsumexp(1) - math.log(terms)
            above = torch.cat([exact[:, None].double(), log_w[:, 1:]], 1).logsumexp(1) - math.log(terms)
            each = max(1, max_rows * 20 // prior_terms)
            sums = [components.log_prob(part[:, None]).double().logsumexp(1) for part in x.split(each)]
            by_prior = torch.cat(sums) - math.log(prior_terms)
            parts.append((x, target(x).double(), by_encoder, by_prior, above))
    return Draws(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def divergence(draws: Draws, log_normaliser: float | None = None) -> Divergence:
    """The reverse KL from these samples.

    Example:
        >>> import dohyo
        >>> from dohyo.lab.targets import Funnel
        >>> _ = torch.manual_seed(0)
        >>> found = divergence(draw(dohyo.models.GaussianLVM(data=2), Funnel(), n=200, terms=100), log_normaliser=0.0)
        >>> found.reverse_kl > 0 and not found.warnings
        True
    """
    sure = float((draws.above - draws.by_encoder).mean()) < 0.1  # the bounds meet: a low prior estimate has too few samples
    tight_prior = draws.x.shape[1] <= 2 and not sure
    warnings = []
    for way, name, low_is_wrong in (
        (draws.by_prior, "samples of the prior", tight_prior),
        (draws.above, "the z that x came from", False),
    ):
        gap = way - draws.by_encoder
        mean, allowed = float(gap.mean()), TOLERANCE + 4 * _stderr(gap)
        if not (mean <= allowed) or (low_is_wrong and mean < -allowed):
            warnings.append(
                f"log p(x) by the encoder and by {name} differ by {mean:+.3g} nats: the encoder "
                f"{'is lost' if mean > 0 else 'may be right, and the samples of the prior too few'}"
            )
    difference = draws.log_px - draws.log_target
    objective = float(difference.mean())
    by_encoder, by_prior, above = (
        float((way - draws.log_target).mean()) for way in (draws.by_encoder, draws.by_prior, draws.above)
    )
    known = None if log_normaliser is None else objective + log_normaliser
    weight = (-difference - (-difference).max()).exp()
    share = weight / weight.mean()
    log_z = float(weight.mean().log() - difference.min())
    ess = float(weight.sum().square() / weight.square().sum())
    by_weights = (log_z, _stderr(share), ess, objective + log_z, _stderr(difference + share))  # errors by the delta method
    return Divergence(objective, _stderr(difference), known, *by_weights, by_encoder, by_prior, above, tuple(warnings))


def weighted_moments(draws: Draws, quantities: dict[str, Tensor]) -> tuple[dict[str, dict[str, float]], float]:
    """Moments and quantiles of each quantity under the target, by importance weights p*(x) / p(x), and the weights' k-hat.

    Each quantity has its `mean`, `sd`, the mean's `stderr`, and its quantiles `q2.5`, `q25`, `q50`, `q75` and `q97.5` in percent;
    the outer two are the 95% credible interval. If k-hat is above 0.7 the weights are too heavy to trust them.
    """
    log_ratio = draws.log_target - draws.log_px
    weight = log_ratio.softmax(0)
    found = {}
    for name, value in quantities.items():
        mean = float((weight * value).sum())
        squares = (value.double() - mean).square()
        sd, stderr = (math.sqrt(float((power * squares).sum())) for power in (weight, weight.square()))
        found[name] = {"mean": mean, "sd": sd, "stderr": stderr, **_quantiles(value.double(), weight)}
    return found, float(khat(log_ratio[None])[0])


def _quantiles(values: Tensor, weight: Tensor) -> dict[str, float]:
    order = values.argsort()
    below = weight[order].cumsum(0) - weight[order] / 2
    percent = (2.5, 25.0, 50.0, 75.0, 97.5)
    found = np.interp([p / 100 for p in percent], below.numpy(), values[order].numpy())
    return {f"q{p:g}": float(value) for p, value in zip(percent, found, strict=True)}


def _stderr(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))
