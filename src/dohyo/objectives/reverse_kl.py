r"""Reverse KL: fit a latent-variable model to an unnormalised density.

.. math:: \min_\theta E_{x \sim p_\theta}[\log p_\theta(x) - \log p^*(x)]

x is drawn by reparameterisation, and log p(x) is estimated. A lower bound in its place is not safe: theta can push the bound
below log p(x) without limit. With Y unbiased for log p(x) at every x, theta's gradient has three parts: through x in
log p(x | z), through x in the proposal q(z; x), and straight through theta in log p(x, z). The second and the third have
expectation zero, as log p does not depend on q, and as the mean score of p under p is zero.
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
from dohyo.objectives.losses import DRAWN_ENCODERS, Losses, Term, check_choices, sleep_loss, weigh

PATHS = {
    "all": "the whole gradient; the only choice for a bound, where no part has expectation zero",
    "x": "through x alone, in p(x | z) and in q(z; x)",
    "decoder": "through x in p(x | z) alone",
}


@dataclass(frozen=True)
class ReverseKL:
    """See `reverse_kl`."""

    estimator: Estimator
    target: Callable[[Tensor], Tensor]
    encoder: str
    shared: bool
    paths: str
    running_baseline: bool

    def __call__(self, model: Any, index: Tensor, generator: torch.Generator | None = None, baseline: float = 0.0) -> Losses:
        """The losses of as many draws of the model as `index` is long."""
        z, x = model.draw(len(index))
        leaf = x.detach().requires_grad_()
        log_target = self.target(leaf)
        about = log_target.detach().double() + baseline if self.running_baseline else 0.0
        source = model.bind(leaf, **self._options())
        encoder = "same" if self.encoder == "sleep" else self.encoder
        weighed = weigh(source, leaf, self.estimator, encoder, generator, self.shared, about)
        value = weighed.dot(weighed.value)
        (through_x,) = torch.autograd.grad(value - log_target.sum(), leaf, retain_graph=True)
        theta = (through_x * x).sum() / len(x)
        if self.paths == "all":
            theta = theta + value / len(x)
        for_theta = Term(theta)
        for_phi = for_theta
        if self.encoder == "sleep":
            for_phi = Term(sleep_loss(model, z, x))
        elif self.encoder != "same":
            for_phi = Term(weighed.dot(weighed.phi / len(x)))
        estimate = weighed.log_px - log_target.detach()
        whole = estimate.mean().expand_as(estimate) if self.shared else estimate  # with one K the draws of a step are as one
        numbers = {"estimate": estimate, "estimate_square": whole.square()}
        return Losses(for_theta, for_phi, weighed.iwae - log_target.detach(), numbers)

    def _options(self) -> dict[str, bool]:
        wanted = {"detach_posterior": self.encoder == "dreg", "detach_x": self.paths == "decoder"}
        return {name: True for name, is_wanted in wanted.items() if is_wanted}

    def skip(self, generator: torch.Generator) -> None:
        self.estimator.plan(1, generator, shared=True)


def reverse_kl(
    estimator: Estimator,
    target: Callable[[Tensor], Tensor],
    encoder: str | None = None,
    *,
    k_draw: str = "datum",
    paths: str | None = None,
    baseline: str = "zero",
) -> ReverseKL:
    """The objective of reverse KL: theta descends the estimate of log p(x) - log p*(x) at its own draws.

    Args:
        target: x (n, d) -> log p*(x) (n,), up to a constant; see `dohyo.lab.targets`.
        encoder: "sleep" (the default for unbiased estimators), "dreg", "iwae" or "variance"; "same" (the default for
            bounds) follows theta downhill, which is how plain IWAE fails; with "iwae" IWAE becomes minimax.
        k_draw: "datum", one K for each draw, or "batch".
        paths: The parts of the gradient to keep, `PATHS`; by default "all" for bounds, "x" for unbiased estimators
            ("decoder" with encoder "dreg", which leaves no other choice).
        baseline: For encoder "variance": "zero", as in the paper, or "target": log p*(x) plus a running mean, which is near
            log p(x) once the model fits and does not depend on the draws of z and K.

    Example:
        >>> import dohyo
        >>> objective = reverse_kl(dohyo.MultilevelRR.at_cost(15), lambda x: -x.square().sum(-1))
        >>> model = dohyo.models.GaussianLVM(data=2)
        >>> objective(model, torch.arange(10)).numbers["estimate"].shape
        torch.Size([10])
    """
    unbiased = estimator.target_terms == math.inf
    encoder = encoder or ("sleep" if unbiased else "same")
    check_choices(estimator, encoder, k_draw, DRAWN_ENCODERS)
    paths = paths or ("all" if not unbiased else "decoder" if encoder == "dreg" else "x")
    named(PATHS, paths, "set of paths")
    named({"zero": 0, "target": 0}, baseline, "baseline")
    if paths != "all" and not unbiased:
        raise DohyoError(f"paths {paths!r} leave out parts whose mean is zero for unbiased estimators alone; use 'all'")
    if paths != "decoder" and encoder == "dreg":
        instead = "paths 'decoder', or encoder 'iwae'" if unbiased else "encoder 'iwae'"
        raise DohyoError(f"encoder 'dreg' changes the gradient through x in q(z; x); use {instead}")
    if baseline == "target" and encoder != "variance":
        raise DohyoError(f"baseline 'target' is for encoder 'variance', not {encoder!r}")
    return ReverseKL(estimator, target, encoder, k_draw == "batch", paths, baseline == "target")


def check_drawn(model: Any) -> None:
    """A ValueError if the model cannot be trained on its own draws."""
    for method in ("draw", "bind", "encoder_parameters", "decoder_parameters"):
        if not hasattr(model, method):
            raise DohyoError(f"{type(model).__name__} has no {method}; derive it from dohyo.models.LatentVariableModel")
    _, x = model.draw(2)
    if not x.requires_grad:
        raise DohyoError(f"{type(model).__name__}'s draws have no gradient: p(x | z) must have rsample, as a Gaussian has")
