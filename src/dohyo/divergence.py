r"""The true reverse KL of a model to a target, by ways that do not trust the model's encoder.

log p(x) at draws x of the model is wanted, and each of these is a mean over many weights:

- by the encoder: IWAE with z from q(z; x), a lower bound, and as far below as the encoder is bad;
- by the prior: log of the mean of p(x | z) over many z from p(z), the same for all x. A lower bound that knows nothing of the
  encoder; tight in two dimensions, hopeless in many;
- above: IWAE with one of its z replaced by the z that x was drawn from, which is a draw of the true posterior. An *upper*
  bound (Sobolev and Vetrov 2019), as far above as the encoder is bad, in any dimension.

So an encoder that has been lost shows as a gap.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.diagnostics import khat
from dohyo.evaluation import apart
from dohyo.packing import rows

TOLERANCE = 1.0  # nats by which two ways may differ beyond four standard errors before the encoder is called lost


@dataclass(frozen=True)
class Draws:
    """Draws of a model with what is known of each, (n,) float64 but for x.

    Attributes:
        log_target: log p*(x) up to its normaliser.
        by_encoder, by_prior, above: log p(x), three ways.
    """

    x: Tensor
    log_target: Tensor
    by_encoder: Tensor
    by_prior: Tensor
    above: Tensor

    @property
    def log_px(self) -> Tensor:
        """By the larger of the two lower bounds."""
        return self.by_prior if float(self.by_prior.mean()) > float(self.by_encoder.mean()) else self.by_encoder


@dataclass(frozen=True)
class Divergence:
    """The mean of log p(x) - log p*(x) over draws, and whether the ways to it agree.

    Attributes:
        objective: The mean, with the target as it is; by the larger of the two lower bounds of log p(x).
        stderr: Its standard error over the draws, not of what log p(x) at each is known to: that shows between the ways.
        reverse_kl: The objective plus log Z: the KL divergence itself; None where log Z is not known.
        by_encoder, by_prior, above: The objective by each way.
        warnings: How the ways disagree, in words; empty if they agree.
    """

    objective: float
    stderr: float
    reverse_kl: float | None
    by_encoder: float
    by_prior: float
    above: float
    warnings: tuple[str, ...]


def draw(model: Any, target: Any, n: int, terms: int, seed: int = 0, max_rows: int = 10_000, prior_terms: int = 20_000) -> Draws:
    """Draw n of x, and find log p(x) from `terms` samples of the encoder and `prior_terms` of the prior.

    Args:
        max_rows: The most rows given to the network at a time.
    """
    parts = []
    with apart(model, seed):
        components = model.likelihood(model.prior().sample((prior_terms,)))
        for size in _sizes(n, max(1, max_rows // terms)):
            z, x = model.sample_joint(size)
            log_w = model.bind(x)(rows(torch.full((size,), terms)).to(x.device)).double().view(size, terms)
            exact = model.prior().log_prob(z) + model.likelihood(z).log_prob(x) - model.posterior(model.encode(x)).log_prob(z)
            by_encoder = log_w.logsumexp(1) - math.log(terms)
            above = torch.cat([exact[:, None].double(), log_w[:, 1:]], 1).logsumexp(1) - math.log(terms)
            each = max(1, max_rows * 20 // prior_terms)
            by_prior = [components.log_prob(part[:, None]).double().logsumexp(1) for part in x.split(each)]
            log_prior = torch.cat(by_prior) - math.log(prior_terms)
            parts.append((x, target(x).double(), by_encoder, log_prior, above))
    return Draws(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def divergence(draws: Draws, log_normaliser: float | None = None) -> Divergence:
    """What the draws say.

    Example:
        >>> import dohyo
        >>> from dohyo.lab.targets import Funnel
        >>> _ = torch.manual_seed(0)
        >>> found = divergence(draw(dohyo.models.GaussianLVM(data=2), Funnel(), n=200, terms=100), log_normaliser=0.0)
        >>> found.reverse_kl > 0 and not found.warnings
        True
    """
    sure = float((draws.above - draws.by_encoder).mean()) < 0.1  # from both sides: then the prior's samples are too few
    two_dimensional = draws.x.shape[1] <= 2 and not sure
    warnings = []
    for other, name, both in (
        (draws.by_prior, "samples of the prior", two_dimensional),
        (draws.above, "the z that x came from", False),
    ):
        gap = other - draws.by_encoder
        mean, allowed = float(gap.mean()), TOLERANCE + 4 * _stderr(gap)
        if not (mean <= allowed) or (both and mean < -allowed):
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
    return Divergence(objective, _stderr(difference), known, by_encoder, by_prior, above, tuple(warnings))


def weighted_moments(draws: Draws, quantities: dict[str, Tensor]) -> tuple[dict[str, dict[str, float]], float]:
    """Mean and standard deviation of each quantity under the target, by importance weights p*(x) / p(x), and their k-hat.

    Above 0.7 the k-hat says that the weights are too heavy, and the moments not to be trusted.
    """
    log_ratio = draws.log_target - draws.log_px
    weight = log_ratio.softmax(0)
    found = {}
    for name, value in quantities.items():
        mean = float((weight * value).sum())
        sd = math.sqrt(max(0.0, float((weight * (value.double() - mean).square()).sum())))
        stderr = math.sqrt(float((weight.square() * (value.double() - mean).square()).sum()))
        found[name] = {"mean": mean, "sd": sd, "stderr": stderr}
    return found, float(khat(log_ratio[None])[0])


def _stderr(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def _sizes(n: int, most: int) -> list[int]:
    return [min(most, n - start) for start in range(0, n, most)]
