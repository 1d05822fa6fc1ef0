"""The estimator with the least variance for its cost, from pilot log-weights."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dohyo.bounds import leave_one_out_differences, prefix_log_mean, tree_means
from dohyo.diagnostics import components, cut, depth_probabilities, stratified_moments
from dohyo.errors import DohyoError
from dohyo.estimators import IWAE, Estimator, MultilevelRR, MultilevelSS, SymmetricSUMO
from dohyo.estimators.multilevel import r_at_cost
from dohyo.estimators.roulette import power_law_with_mean
from dohyo.laws import Finite, PowerLaw

_FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)  # of the cost, for m
Candidate = tuple[float, Estimator]


def tune(log_w: Tensor, cost: float, max_terms: int | None = None, grad_log_w: Tensor | None = None) -> Estimator:
    r"""The estimator with the least variance at this cost, measured on pilot log-weights (data, samples).

    The candidates are SymmetricSUMO and both multilevel estimators over a grid of m, each centred at the pilot's mean
    differences. Under a cap SymmetricSUMO gets the optimal law for its differences (Rhee and Glynn 2015),

    .. math:: S(k) \propto \sqrt{\nu_k}, \qquad \nu_k = E\big[d_k^2 + 2 d_k \sum_{j > k} d_j\big],

    made monotone; without one it gets power laws of several exponents, and the variance beyond the pilot's width is
    extrapolated at the asymptotic rate. Draw fresh log-weights for the estimate itself: the law and the centre depend on the
    pilot.

    Args:
        cost: The expected number of log-weights for each datum.
        max_terms: If given, the result is unbiased for IWAE_max_terms instead of log p(x); the pilot needs at least twice as
            many samples.
        grad_log_w: (data, samples, parameters), d log w / d theta: minimise the gradient's variance, as in the paper.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> tuned = tune(2 * torch.randn(50, 128), cost=10, max_terms=64)
        >>> tuned.target_terms, round(tuned.expected_cost, 3)
        (64.0, 10.0)
    """
    if not math.isfinite(cost) or cost < 2:
        raise DohyoError(f"cost is {cost}; tuning needs at least 2 log-weights for each datum")
    blocks, grads = cut(log_w, max_terms, grad_log_w)
    if max_terms is not None and cost >= max_terms:
        return IWAE(max_terms)
    candidates = [*_symmetric(blocks, grads, cost, max_terms), *_multilevel(blocks, grads, cost, max_terms)]
    if not candidates:
        raise DohyoError(f"no estimator costs {cost} with a pilot of {log_w.shape[1]} samples; give more pilot samples")
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _symmetric(blocks: Tensor, grads: Tensor | None, cost: float, max_terms: int | None) -> Iterator[Candidate]:
    width = blocks.shape[-1]

    def prefixes(log_w: Tensor) -> Tensor:
        return torch.cat([prefix_log_mean(log_w), leave_one_out_differences(log_w, 2)], -1)

    bounds = components(prefixes, blocks, grads)
    for m in sorted({max(1, round(cost * fraction)) for fraction in _FRACTIONS}):
        if m >= min(cost, width - 1):
            continue
        iwae, differences = bounds[..., m - 1 : width], bounds[..., width + m - 1 :]
        centre = differences.mean((0, 1, 2)) if grads is None else differences.new_zeros(0)
        if max_terms is not None:
            options = [SymmetricSUMO(m, _best_law(differences, centre, cost - m), tuple(centre.tolist()))]
        else:
            laws = [power_law_with_mean(cost - m, exponent, math.inf) for exponent in (1.2, 1.35, 1.5, 1.65, 1.8)]
            options = [SymmetricSUMO(m, law, tuple(centre.tolist())) for law in laws]
        for option in options:
            variance = _variance(option, option.combine(iwae, differences), width)
            if isinstance(option.law, PowerLaw):
                variance += _power_tail(differences, option.m, option.law, width)
            yield variance * option.expected_cost, option


def _multilevel(blocks: Tensor, grads: Tensor | None, cost: float, max_terms: int | None) -> Iterator[Candidate]:
    width = blocks.shape[-1]
    for m in range(1, math.ceil(cost)):
        levels = int(math.log2(width / m))
        if levels < 1 or (max_terms is not None and m << levels != max_terms):
            continue
        if max_terms is not None:
            r = r_at_cost(cost / m, levels)
        elif cost > 1.5 * m:
            r = min(r_at_cost(cost / m, None), 0.74)
        else:
            continue
        means = components(partial(tree_means, m=m, levels=levels), blocks, grads)
        differences = (means[..., 1:, :] - means[..., :-1, :])[..., -1]
        centre = tuple(differences.mean((0, 1, 2)).tolist()) if grads is None else ()
        for cls in (MultilevelRR, MultilevelSS):
            option = cls(m, r, None if max_terms is None else levels, centre)
            paths = option.combine(means.flatten(0, 2)).unflatten(0, means.shape[:3])
            variance = _variance(option, paths, width)
            if max_terms is None:
                variance += _geometric_tail(differences, option)
            yield variance * option.expected_cost, option


def _variance(option: Estimator, paths: Tensor, width: int) -> float:
    _, probability, _ = depth_probabilities(option, width)
    return sum(float(stratified_moments(part, probability)[1].mean()) for part in paths)


def _best_law(differences: Tensor, centre: Tensor, mean: float) -> Finite:
    """The law with E[K] = mean that minimises sum_k nu_k / S(k)."""
    from scipy.optimize import brentq, isotonic_regression  # type: ignore[import-untyped]  # slow to import

    d = differences if len(centre) == 0 else differences - centre
    later = d.flip(-1).cumsum(-1).flip(-1) - d
    nu = (d.square() + 2 * d * later).mean((1, 2)).sum(0).detach().cpu()
    nu = nu.clamp(min=max(1e-300, 1e-12 * float(nu.max())))
    root = torch.from_numpy(isotonic_regression(nu.numpy() / float(nu.max()), increasing=False).x.copy()).sqrt()

    def survival(scale: float) -> Tensor:
        return (scale * root).clamp(max=1.0)

    best = survival(brentq(lambda scale: float(survival(scale).sum()) - mean, 0.0, 1e6 / float(root.min()), xtol=1e-15))
    table = torch.cat([root.new_ones(1), best, root.new_zeros(1)])
    return Finite(tuple((table[:-1] - table[1:]).tolist()), start=0)


def _power_tail(differences: Tensor, m: int, law: PowerLaw, width: int) -> float:
    """The variance beyond the pilot's width N if E[d_k^2] ~ k^-4 from there: sum_{k > N} nu_k / S(k), nu_k = c k^-3."""
    k = torch.arange(m + 1, width + 1, dtype=torch.float64)
    last = slice(len(k) // 2, None)
    c = ((2 * k + 1) * k**3 * differences.square().mean((1, 2)).sum(0))[last].mean()
    return float(c * law.scale**-law.exponent * width ** (law.exponent - 2) / (2 - law.exponent))


def _geometric_tail(differences: Tensor, option: MultilevelRR | MultilevelSS) -> float:
    """The variance beyond the pilot's last level if second moments fall by a factor of 4 with each level from there."""
    last = float(differences[..., -1].square().mean((1, 2)).sum())
    ratio = 1 / (4 * (1 - option.r))
    weight = 3.0 if isinstance(option, MultilevelRR) else 1 / option.r  # with and without the cross terms of later levels
    return weight * last * (1 - option.r) ** -differences.shape[-1] * ratio / (1 - ratio)
