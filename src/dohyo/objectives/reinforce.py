r"""REINFORCE: train a policy p(x) on the rewards of its samples, with an optional reward for entropy.

.. math:: \nabla_\theta \left( E[R(x)] + \lambda H(p) \right) = E\left[ (R(x) - \lambda \log p(x) - b) \nabla \log p(x) \right]

For a latent policy log p(x) appears twice, as a value and as a score, and is estimated. The product of two estimates is
unbiased only if they are independent, so each x gets two plans and two sets of z. Each estimate then serves as the value for the
score of the other, and the two products are averaged. b is the mean over the other samples of the batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dohyo.contract import offers
from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.names import check_choice
from dohyo.objectives.weighing import KDraw, Outcome, SamplingEncoder, check_encoder, require_sampler, sleep_loss, weigh


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE: theta climbs E[R(x) / scale] + entropy * H(p).

    Attributes:
        estimator: The estimator of log p(x), for a policy with log-weights; None for a policy with `log_prob`.
        reward: x (n, d) -> (n,); see `dohyo.lab.rewards`. It needs no gradient.
        encoder: "sleep" (the default for unbiased estimators), "dreg", "iwae" or "variance"; "same" (the default for
            bounds) lets phi follow theta's objective.
        entropy: lambda, relative to the scaled reward; a function if it changes during training.
        scale: What rewards are divided by; a function if it is known only when training begins.
        baseline: "leave-one-out" or "none".
        k_draw: "datum", one K for each sample; "stratified", spread evenly over the law of K; or "batch".

    Example:
        >>> import dohyo
        >>> policy = dohyo.models.LatentPolicy(variables=10)
        >>> objective = Reinforce(dohyo.MultilevelRR.at_cost(15), lambda x: x.sum(-1), entropy=0.1)
        >>> out = objective(policy, torch.arange(8))
        >>> out.loss.backward()
        >>> out.numbers["reward"].shape
        torch.Size([8])
    """

    estimator: Estimator | None
    reward: Callable[[Tensor], Tensor]
    encoder: SamplingEncoder | None = None
    entropy: float | Callable[[], float] = 0.0
    scale: float | Callable[[], float] = 1.0
    baseline: Literal["leave-one-out", "none"] = "leave-one-out"
    k_draw: KDraw = "datum"
    shared: bool = field(init=False, repr=False)  # whether a batch has one K

    running_baseline: ClassVar[bool] = False  # the training loop need not keep a baseline

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", self.k_draw == "batch")
        check_choice(self.baseline, Literal["leave-one-out", "none"], "baseline")
        unbiased = self.estimator is not None and self.estimator.target_terms == math.inf
        if self.encoder is None:
            object.__setattr__(self, "encoder", "sleep" if unbiased else "same")
        if self.estimator is not None:
            check_encoder(self.estimator, str(self.encoder), SamplingEncoder)
        check_choice(self.k_draw, KDraw, "k_draw")
        if not callable(self.scale) and not 0 < self.scale < math.inf:
            raise DohyoError(f"scale is {self.scale}; it must be positive and finite")
        if not callable(self.entropy) and not 0 <= self.entropy < math.inf:
            raise DohyoError(f"entropy is {self.entropy}; it must be finite and not negative")

    def __call__(
        self, policy: Any, index: Tensor, generator: torch.Generator | None = None, baseline: float | Tensor = 0.0
    ) -> Outcome:
        """The loss of as many samples of the policy as `index` is long."""
        entropy = self.entropy() if callable(self.entropy) else self.entropy
        if offers(policy, "log_prob"):
            return self._exact(policy, policy.sample(len(index)), entropy)
        if self.estimator is None:
            raise DohyoError(
                f"{type(policy).__name__} has no log_prob; give an estimator of log p(x), such as dohyo.SUMO.at_cost(15)"
            )
        require_sampler(policy, "REINFORCE", "sample_joint")
        with torch.no_grad():
            z, x = policy.sample_joint(len(index))
        rewards = self.reward(x)
        earned = self._scaled(rewards)
        encoder, count = str(self.encoder), 2 if entropy > 0 else 1
        both = [weigh(policy, x, self.estimator, encoder, generator, self.k_draw) for _ in range(count)]
        gained, size = [], count * len(x)
        loss = torch.zeros((), device=x.device)
        for one, other in zip(both, reversed(both), strict=True):
            gain = earned - entropy * other.log_px if entropy > 0 else earned
            theta = -self._centred(gain)[one.rows] * one.value
            loss = loss + one.loss(theta, None if encoder == "same" else one.phi) / size
            gained.append(gain)
        if encoder == "sleep":
            loss = loss + sleep_loss(policy, z, x)
        log_px = torch.stack([one.log_px for one in both]).mean(0)
        iwae = torch.stack([one.iwae for one in both]).mean(0)
        return self._outcome(loss, torch.stack(gained).mean(), rewards, log_px, iwae)

    def _exact(self, policy: Any, x: Tensor, entropy: float) -> Outcome:
        log_px = policy.log_prob(x)
        rewards = self.reward(x)
        gain = self._scaled(rewards) - entropy * log_px.detach().double()
        loss = -(self._centred(gain).to(log_px.dtype) * log_px).mean()
        return self._outcome(loss, gain.mean(), rewards, log_px.detach(), log_px.detach())

    def _scaled(self, rewards: Tensor) -> Tensor:
        return rewards.double() / (self.scale() if callable(self.scale) else self.scale)

    def _centred(self, gain: Tensor) -> Tensor:
        """The gain minus the mean of the other samples, which does not depend on this one."""
        n = len(gain)
        return gain - (gain.sum() - gain) / (n - 1) if self.baseline == "leave-one-out" and n > 1 else gain

    def _outcome(self, loss: Tensor, gain: Tensor, rewards: Tensor, log_px: Tensor, iwae: Tensor) -> Outcome:
        loss = loss - (gain + loss).detach()  # the loss shows minus the mean gain
        return Outcome(loss, log_px, iwae, log_px, {"reward": rewards, "entropy": -log_px})

    def skip(self, generator: torch.Generator) -> None:
        raise DohyoError("the batch holds fewer samples than there are processes; raise the batch size")
