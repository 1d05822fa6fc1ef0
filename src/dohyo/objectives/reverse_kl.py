r"""Reverse KL: fit a latent-variable model to an unnormalised density.

.. math:: \min_\theta E_{x \sim p_\theta}[\log p_\theta(x) - \log p^*(x)]

x is drawn by reparameterisation, and log p(x) is estimated. A lower bound in its place is not safe: theta can push the bound
below log p(x) without limit. If Y is unbiased for log p(x) at every x, theta's gradient has three parts: through x in
log p(x | z), through x in the proposal q(z; x), and directly through theta in log p(x, z). The second has expectation zero
because log p does not depend on q, the third because the mean score of p under p is zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.names import check_choice
from dohyo.objectives.weighing import KDraw, Outcome, SamplingEncoder, check_encoder, dot, require_sampler, sleep_loss, weigh

Paths = Literal["all", "x", "decoder"]
PATHS: dict[str, str] = {
    "all": "the whole gradient; the only choice for a bound, where no part has expectation zero",
    "x": "through x alone, in p(x | z) and in q(z; x)",
    "decoder": "through x in p(x | z) alone",
}


@dataclass(frozen=True)
class ReverseKL:
    """Reverse KL: theta descends the estimate of log p(x) - log p*(x) at samples of the model itself.

    Attributes:
        target: A function x (n, d) -> log p*(x) (n,), up to a constant; see `dohyo.lab.targets`.
        encoder: "sleep" (the default for unbiased estimators), "dreg", "iwae" or "variance"; "same" (the default for
            bounds) follows theta downhill, which is how plain IWAE fails; "iwae" turns the estimator IWAE into minimax.
        k_draw: "datum", one K for each sample; "stratified", spread evenly over the law of K; or "batch".
        paths: The parts of the gradient to keep (`PATHS`); by default "all" for bounds, "x" for unbiased estimators
            ("decoder" with encoder "dreg", which works with no other).
        baseline: For encoder "variance": "zero", as in the paper, or "target": log p*(x) plus a running mean, which is near
            log p(x) once the model fits and does not depend on the noise of z and K.

    Example:
        >>> import dohyo
        >>> objective = ReverseKL(dohyo.MultilevelRR.at_cost(15), lambda x: -x.square().sum(-1))
        >>> model = dohyo.models.GaussianLVM(data=2)
        >>> out = objective(model, torch.arange(10))
        >>> out.loss.backward()
        >>> out.log_px.shape
        torch.Size([10])
    """

    estimator: Estimator
    target: Callable[[Tensor], Tensor]
    encoder: SamplingEncoder | None = None
    k_draw: KDraw = "datum"
    paths: Paths | None = None
    baseline: Literal["zero", "target"] = "zero"
    shared: bool = field(init=False, repr=False)  # whether a batch has one K
    running_baseline: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", self.k_draw == "batch")
        object.__setattr__(self, "running_baseline", self.baseline == "target")
        unbiased = self.estimator.target_terms == math.inf
        if self.encoder is None:
            object.__setattr__(self, "encoder", "sleep" if unbiased else "same")
        if self.paths is None:
            default = "all" if not unbiased else "decoder" if self.encoder == "dreg" else "x"
            object.__setattr__(self, "paths", default)
        check_encoder(self.estimator, str(self.encoder), SamplingEncoder)
        check_choice(self.k_draw, KDraw, "k_draw")
        check_choice(str(self.paths), Paths, "set of paths")
        check_choice(self.baseline, Literal["zero", "target"], "baseline")
        if self.paths != "all" and not unbiased:
            raise DohyoError(f"paths {self.paths!r} leave out parts whose mean is zero for unbiased estimators alone; use 'all'")
        if self.paths != "decoder" and self.encoder == "dreg":
            instead = "paths 'decoder', or encoder 'iwae'" if unbiased else "encoder 'iwae'"
            raise DohyoError(f"encoder 'dreg' changes the gradient through x in q(z; x); use {instead}")
        if self.baseline == "target" and self.encoder != "variance":
            raise DohyoError(f"baseline 'target' is for encoder 'variance', not {self.encoder!r}")

    def __call__(
        self, model: Any, index: Tensor, generator: torch.Generator | None = None, baseline: float | Tensor = 0.0
    ) -> Outcome:
        """The loss of as many samples of the model as `index` is long."""
        z, x = _samples(model, len(index))
        encoder = str(self.encoder)
        leaf = x.detach().requires_grad_()
        log_target = self.target(leaf)
        about = log_target.detach().double() + baseline if self.running_baseline else 0.0
        weighed = weigh(model, leaf, self.estimator, encoder, generator, self.k_draw, about, detach_x=self.paths == "decoder")
        value = dot(weighed.value, weighed.log_w)
        marks = weighed.marks if self.paths != "all" and encoder in ("variance", "iwae", "dreg") else []
        wanted = [leaf, *(mark.outside for mark in marks)]
        through_x, *through_marks = torch.autograd.grad(value - log_target.sum(), wanted, retain_graph=True)
        estimate = weighed.log_px - log_target.detach()
        loss = (through_x * x).sum() / len(x)
        if self.paths == "all":
            loss = loss + weighed.loss(weighed.value, None if encoder == "same" else weighed.phi) / len(x)
        elif marks:
            loss = loss + weighed.proposals_loss(through_marks) / len(x)
        if encoder == "sleep":
            loss = loss + sleep_loss(model, z, x)
        loss = loss + (estimate.mean() - loss).detach()  # the loss shows the mean estimate
        whole = estimate.mean().expand_as(estimate) if self.shared else estimate  # with one K, samples of a step are dependent
        numbers = {"estimate": estimate, "estimate_square": whole.square()}
        return Outcome(loss, weighed.log_px, weighed.iwae, weighed.iwae - log_target.detach(), numbers)

    def skip(self, generator: torch.Generator) -> None:
        """Draw a shared K and discard it, to stay in step with the other processes."""
        self.estimator.plan(1, generator, shared=True)


def _samples(model: Any, n: int) -> tuple[Tensor, Tensor]:
    require_sampler(model, "reverse KL", "sample_joint", "bind")
    z, x = model.sample_joint(n)
    if not x.requires_grad:
        raise DohyoError(f"{type(model).__name__}'s samples have no gradient: p(x | z) must have rsample, as a Gaussian has")
    return z, x
