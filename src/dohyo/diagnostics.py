"""How good an estimate is: its variance stratified over K, the tail of the weights, an interval robust to outliers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp

from dohyo.errors import DohyoError
from dohyo.estimators import Estimator


@dataclass(frozen=True)
class Moments:
    """Mean and variance of an estimator, for each datum and on average.

    Attributes:
        mean, variance: Averages over the data.
        per_datum_mean, per_datum_variance: (data,).
        gradient_variance: The trace of the gradient's covariance, averaged over the data; None without gradients.
        cost: Log-weights for each datum, with the depths that were measured.
        uncovered: The probability of depths beyond the pilot's width; they count as the deepest one measured.
    """

    mean: float
    variance: float
    per_datum_mean: Tensor
    per_datum_variance: Tensor
    gradient_variance: float | None
    cost: float
    uncovered: float


def moments(estimator: Estimator, log_w: Tensor, grad_log_w: Tensor | None = None) -> Moments:
    r"""The estimator's mean and variance on pilot log-weights (data, samples), stratified over K.

    Every K is evaluated on every block of weights and weighted by P(K),

    .. math:: \mathrm{Var} = \sum_K P(K)\, E[\hat Y_K^2] - \Big(\sum_K P(K)\, E[\hat Y_K]\Big)^2

    because plain Monte Carlo misses the rare K that carry the variance. Each row is cut into two or more disjoint blocks,
    each long enough for the deepest K (half a row if K is unbounded).

    Args:
        grad_log_w: (data, samples, parameters), d log w / d theta for each weight, to measure the gradient's variance, the
            paper's criterion; a random projection of a long theta works as well.
    """
    blocks, grads = cut(log_w, estimator.max_terms, grad_log_w)
    depths, probability, uncovered = depth_probabilities(estimator, blocks.shape[-1])
    mean, variance = stratified_moments(components(estimator.paths, blocks, None)[0], probability)
    gradient_variance = None
    if grads is not None:
        traces = [stratified_moments(paths, probability)[1] for paths in components(estimator.paths, blocks, grads)]
        gradient_variance = float(torch.stack(traces).sum(0).mean())
    cost = float((estimator.terms(depths).double() * probability).sum())
    return Moments(float(mean.mean()), float(variance.mean()), mean, variance, gradient_variance, cost, uncovered)


def cut(log_w: Tensor, terms: float | None, grad_log_w: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(data, blocks, width): disjoint blocks of `terms` weights each, or of half a row if `terms` is unbounded."""
    if log_w.ndim != 2 or log_w.shape[0] < 1 or log_w.shape[1] < 2:
        raise DohyoError(f"log_w has shape {tuple(log_w.shape)}; it must be (data, samples) with at least 2 samples")
    if not bool(log_w.isfinite().all()):
        raise DohyoError("log_w has entries that are not finite; drop those data, or give the pilot a better proposal")
    samples = log_w.shape[1]
    width = samples // 2 if terms is None or terms == math.inf else int(terms)
    if samples < 2 * width:
        raise DohyoError(f"{samples} pilot samples for each datum; at least {2 * width} are needed (two blocks of {width})")
    count = samples // width
    blocks = log_w[:, : count * width].double().unflatten(1, (count, width))
    if grad_log_w is None:
        return blocks, None
    if grad_log_w.ndim != 3 or grad_log_w.shape[:2] != log_w.shape:
        raise DohyoError(f"grad_log_w has shape {tuple(grad_log_w.shape)}; it must be log_w's shape with one more axis")
    return blocks, grad_log_w[:, : count * width].double().unflatten(1, (count, width))


def components(bounds: Callable[[Tensor], Tensor], blocks: Tensor, grads: Tensor | None) -> Tensor:
    """(components, data, blocks, ...): the bounds themselves, or their derivatives in each parameter."""
    flat = blocks.flatten(0, 1)
    along = [] if grads is None else [jvp(bounds, (flat,), (g.flatten(0, 1),))[1] for g in grads.unbind(-1)]
    return torch.stack(along or [bounds(flat)]).unflatten(1, blocks.shape[:2])  # type: ignore[no-any-return]


def depth_probabilities(estimator: Estimator, width: int) -> tuple[Tensor, Tensor, float]:
    """(depths, P(depth), P(deeper)) for the depths that fit into `width`; the last one includes all that are deeper."""
    depths = estimator.depths(width)
    if len(depths) == 0:
        raise DohyoError(f"blocks of {width} log-weights are too short for {estimator}; give more pilot samples")
    survival = estimator.depth_law.survival(torch.cat([depths, depths[-1:] + 1]))
    drawable = survival[:-1] > 1e-30  # deeper ones are never drawn, and their coefficients overflow
    depths, survival = depths[drawable], survival[: int(drawable.sum()) + 1].clone()
    uncovered = float(survival[-1])
    survival[-1] = 0.0
    return depths, survival[:-1] - survival[1:], uncovered


def stratified_moments(paths: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance for each datum from paths (data, blocks, depths)."""
    paths = paths[..., : len(probability)]
    averaged = (paths * probability).sum(-1)
    second = (paths.square() * probability).sum(-1).mean(-1)
    mean = averaged.mean(-1)
    # The square of a mean over few blocks is too large by the variance of that mean.
    square_of_mean = mean.square() - averaged.var(-1) / averaged.shape[-1]
    return mean, second - square_of_mean


def khat(log_w: Tensor) -> Tensor:
    r"""The Pareto shape k-hat of the largest importance weights of each row, (data,): above 0.7 their tail is too heavy.

    With k-hat > 1/2 the weights have no variance, with k-hat > 1 no mean. NaN if there are fewer than 25 weights.

    References:
        Vehtari et al., Pareto smoothed importance sampling (JMLR 2024); Zhang and Stephens (Technometrics 2009) for the
        fit; https://arxiv.org/abs/1507.02646
    """
    if log_w.shape[-1] < 25:
        return torch.full(log_w.shape[:1], torch.nan, dtype=torch.float64)
    return torch.cat([_khat(part) for part in log_w.split(256)])


def _khat(log_w: Tensor) -> Tensor:
    samples = log_w.shape[-1]
    tail = math.ceil(min(0.2 * samples, 3 * math.sqrt(samples)))
    ordered = (log_w.double() - log_w.double().amax(-1, keepdim=True)).sort(-1).values
    x = (ordered[:, -tail:].exp() - ordered[:, -tail - 1, None].exp()).clamp(min=1e-300)
    grid = 30 + int(math.sqrt(tail))
    b = 1 - (grid / (torch.arange(1, grid + 1, dtype=torch.float64, device=x.device) - 0.5)).sqrt()
    b = b / (3 * x[:, int(tail / 4 + 0.5) - 1, None]) + 1 / x[:, -1:]
    k = (-b[:, :, None] * x[:, None]).log1p().mean(-1)
    profile = tail * ((-b / k).log() - k - 1)
    b = (b * profile.softmax(-1)).sum(-1, keepdim=True)
    k = (-b * x).log1p().mean(-1)
    return (tail * k + 10 * 0.5) / (tail + 10)  # the weak prior towards 1/2 of the reference


def median_of_means(values: Tensor, confidence: float = 0.95) -> tuple[float, tuple[float, float]]:
    """The median of the means of up to 32 groups of values, and an interval from their order statistics.

    A few huge values affect only a few groups, so this is stable even if the variance is infinite. The interval is one for
    the median of a group's mean, which is below the mean if the distribution is skewed to the right.
    """
    from scipy.special import bdtr  # type: ignore[import-untyped]  # here, so that `import dohyo` does not load scipy

    groups = min(32, len(values))
    means = torch.stack([part.mean() for part in values.double().tensor_split(groups)]).sort().values
    rank = int((bdtr(range(groups + 1), groups, 0.5) <= (1 - confidence) / 2).sum())
    low, high = means[max(rank - 1, 0)], means[min(groups - rank, groups - 1)]
    return float(means[(groups - 1) // 2 : groups // 2 + 1].mean()), (float(low), float(high))
