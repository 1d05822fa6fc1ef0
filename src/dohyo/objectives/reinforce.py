r"""REINFORCE: train a policy p(x) by what its samples earn, with a reward for entropy.

.. math:: \nabla_\theta \left( E[R(x)] + \lambda H(p) \right) = E\left[ (R(x) - \lambda \log p(x) - b) \nabla \log p(x) \right]

For a latent policy log p(x) appears twice, as a value and as a score, and is estimated. The product of two estimates is
unbiased only if they are independent: two plans and two sets of z for each x. Each then serves as value for the other's
score, and the two products are averaged. b is the mean of the others in the batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.names import named
from dohyo.objectives.losses import DRAWN_ENCODERS, Losses, Term, check_choices, sleep_loss, source_of, weigh


@dataclass(frozen=True)
class Reinforce:
    """See `reinforce`."""

    estimator: Estimator | None
    reward: Callable[[Tensor], Tensor]
    entropy: Callable[[], float]
    scale: Callable[[], float]
    encoder: str
    shared: bool
    leave_one_out: bool
    running_baseline: bool = False

    def __call__(self, policy: Any, index: Tensor, generator: torch.Generator | None = None, baseline: float = 0.0) -> Losses:
        """The losses of as many samples of the policy as `index` is long."""
        if hasattr(policy, "log_prob"):
            return self._exact(policy, policy.sample(len(index)))
        if self.estimator is None:
            raise DohyoError(
                f"{type(policy).__name__} has no log_prob; give an estimator of log p(x), such as dohyo.SUMO.at_cost(15)"
            )
        with torch.no_grad():
            z, x = policy.draw(len(index))
        rewards, entropy = self.reward(x), self.entropy()
        earned = rewards.double() / self.scale()
        encoder = "same" if self.encoder == "sleep" else self.encoder
        source = source_of(policy, x, encoder)
        count = 2 if entropy > 0 else 1
        both = [weigh(source, x, self.estimator, encoder, generator, self.shared) for _ in range(count)]
        theta = phi = torch.zeros((), device=x.device)
        for one, other in zip(both, reversed(both), strict=True):
            gain = self._centred(earned - entropy * other.log_px if entropy > 0 else earned)
            theta = theta - one.dot(gain[one.rows] * one.value) / (count * len(x))
            phi = phi + one.dot(one.phi) / (count * len(x))
        if self.encoder == "sleep":
            phi = sleep_loss(policy, z, x)
        for_theta = Term(theta)
        for_phi = for_theta if self.encoder == "same" else Term(phi)
        log_px = torch.stack([one.log_px for one in both]).mean(0)
        return Losses(for_theta, for_phi, log_px, {"reward": rewards, "entropy": -log_px})

    def _exact(self, policy: Any, x: Tensor) -> Losses:
        log_px = policy.log_prob(x)
        rewards, entropy = self.reward(x), self.entropy()
        gain = self._centred(rewards.double() / self.scale() - entropy * log_px.detach().double())
        theta = Term(-(gain.to(log_px.dtype) * log_px).mean())
        return Losses(theta, theta, log_px.detach(), {"reward": rewards, "entropy": -log_px.detach()})

    def _centred(self, gain: Tensor) -> Tensor:
        """Less the mean of the other samples, which does not depend on this one."""
        n = len(gain)
        return gain - (gain.sum() - gain) / (n - 1) if self.leave_one_out and n > 1 else gain

    def skip(self, generator: torch.Generator) -> None:
        raise DohyoError("the batch holds fewer samples than there are processes; raise --batch-size")


def reinforce(
    estimator: Estimator | None,
    reward: Callable[[Tensor], Tensor],
    encoder: str | None = None,
    *,
    entropy: float | Callable[[], float] = 0.0,
    scale: float | Callable[[], float] = 1.0,
    baseline: str = "leave-one-out",
    k_draw: str = "datum",
) -> Reinforce:
    """The objective of REINFORCE: theta climbs E[R(x) / scale] + entropy * H(p).

    Args:
        estimator: Of log p(x), for a policy with log-weights; None for one that has `log_prob`.
        reward: x (n, d) -> (n,); see `dohyo.lab.rewards`. It needs no gradient.
        encoder: "sleep" (the default for unbiased estimators), "dreg", "iwae" or "variance"; "same" (the default for
            bounds) lets phi follow theta's objective.
        entropy: lambda, on the scale of the scaled reward; a function where it changes in training.
        scale: What rewards are divided by; a function where it is known only when training begins.
        baseline: "leave-one-out" or "none".
        k_draw: "datum", one K for each sample, or "batch".

    Example:
        >>> import dohyo
        >>> policy = dohyo.models.LatentPolicy(variables=10)
        >>> objective = reinforce(dohyo.MultilevelRR.at_cost(15), lambda x: x.sum(-1), entropy=0.1)
        >>> objective(policy, torch.arange(8)).numbers["reward"].shape
        torch.Size([8])
    """
    named({"leave-one-out": 0, "none": 0}, baseline, "baseline")
    if estimator is not None:
        encoder = encoder or ("sleep" if estimator.target_terms == math.inf else "same")
        check_choices(estimator, encoder, k_draw, DRAWN_ENCODERS)
    if not callable(scale) and not 0 < scale < math.inf:
        raise DohyoError(f"scale is {scale}; it must be positive and finite")
    if not callable(entropy) and not 0 <= entropy < math.inf:
        raise DohyoError(f"entropy is {entropy}; it must be finite and not negative")
    weight = entropy if callable(entropy) else lambda: entropy
    divisor = scale if callable(scale) else lambda: scale
    shared = k_draw == "batch"
    return Reinforce(estimator, reward, weight, divisor, encoder or "same", shared, baseline == "leave-one-out")
