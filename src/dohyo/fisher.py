r"""The score, the gradient of log p(x) in theta, and the Fisher information, both without bias.

The gradient of an unbiased estimate Y of log p(x) is an unbiased estimate of the score (the paper's A.4),
:math:`E[\nabla_\theta Y] = \nabla_\theta E[Y] = \nabla_\theta \log p_\theta(x)`, wherever mean and gradient may be exchanged: by
dominated convergence, if :math:`\|\nabla_\theta Y\|` has an integrable bound near theta.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dohyo.contract import Model
from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.marginal import log_marginal


def score(
    model: Model,
    x: Tensor,
    estimator: Estimator,
    generator: torch.Generator | None = None,
    *,
    per_datum: bool = False,
    shared: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""The gradient of log p(x) in theta, by name: the sum over the batch, as log p of independent data is a sum.

    .. math:: \sum_i \nabla_\theta \log p_\theta(x_i)

    It is unbiased if `estimator.kind` is "unbiased", and otherwise the gradient of what the estimator is unbiased for. Theta
    is the model's `decoder_parameters()` if it has that method, else all its parameters; frozen ones are left out. The
    proposal may depend on theta, as when encoder and decoder share layers, but only if z is reparameterised (`rsample`): the
    gradient of a sampling distribution that changes with theta is not seen here.

    Args:
        generator: Draws K. The model's noise comes from the model's own source.
        per_datum: One score for each datum, `(batch, ...)`, instead of the sum. The data pass through the model one by one,
            which works for any model that treats them independently, and is slow for large batches.
        shared: One K for the whole batch; not with `per_datum`.
        parameters: What to differentiate with respect to, instead of theta: tensors that the model uses, under any names.

    References:
        Luo et al., SUMO (ICLR 2020), sections 3.4 and A.4.

    Example:
        >>> import dohyo
        >>> model, x = dohyo.models.VAE(data=4, hidden=8, latent=2), torch.rand(10, 4).round()
        >>> gradient = dohyo.score(model, x, dohyo.MultilevelRR.at_cost(15))
        >>> gradient["decoder.4.bias"].shape
        torch.Size([4])
        >>> dohyo.score(model, x, dohyo.MultilevelRR.at_cost(15), per_datum=True)["decoder.4.bias"].shape
        torch.Size([10, 4])
    """
    theta = _theta(model) if parameters is None else parameters
    constant = [name for name, parameter in theta.items() if not parameter.requires_grad]
    if constant or not theta:
        raise DohyoError(f"{constant or 'no parameters'} to differentiate with respect to; give tensors with requires_grad=True")
    log_p = partial(log_marginal, model, estimator=estimator, generator=generator, shared=shared)
    if not per_datum:
        return _gradient(theta, x, log_p)
    if shared:
        raise DohyoError("per_datum draws one K for each datum; leave shared=False, or take the sum over the batch")
    each = [_gradient(theta, one, log_p) for one in x.split(1)]
    return {name: torch.stack([gradient[name] for gradient in each]) for name in theta}


@dataclass(frozen=True)
class FisherInformation:
    """The result of `fisher_information`.

    Attributes:
        matrix: (size, size), or (size,) if only the diagonal was asked for; float64, symmetric, not always positive.
        stderr: The standard error of each entry, as an estimate for new data of this kind.
        slices: The rows and columns of each parameter, flattened.
        kind: What the scores' mean is, in words; the matrix is unbiased if this is "unbiased".
        warnings: What to know before trusting the numbers; empty if there is nothing.
    """

    matrix: Tensor
    stderr: Tensor
    slices: dict[str, slice]
    kind: str
    warnings: tuple[str, ...]


def fisher_information(
    model: Model,
    x: Tensor,
    estimator: Estimator,
    generator: torch.Generator | None = None,
    *,
    replicates: int = 2,
    diagonal: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
) -> FisherInformation:
    r"""The mean over x of score times score transposed: the Fisher information if x was drawn from the model.

    .. math:: E_x\left[ \nabla \log p_\theta(x) \, \nabla \log p_\theta(x)^\top \right]
              \approx \frac1n \sum_{i=1}^n \frac{1}{R (R - 1)} \sum_{r \ne s} g_{ir}\, g_{is}^\top

    The g_ir are independent estimates of the score of x_i, so the product of two of them is unbiased, while the square of one
    is too large by its variance. With observed x this is the empirical Fisher information.

    Args:
        replicates: R, at least 2.
        diagonal: Only the diagonal, for models with many parameters.
        generator, parameters: As for `score`.

    References:
        Luo et al., SUMO (ICLR 2020), section 3.4, names this use.

    Example:
        >>> import dohyo
        >>> model = dohyo.models.GaussianLVM(data=1, hidden=2, latent=1)
        >>> found = dohyo.fisher_information(model, model.sample(20), dohyo.MultilevelRR.at_cost(15))
        >>> found.matrix.shape, found.slices["decoder.2.bias"]
        (torch.Size([10, 10]), slice(8, 10, None))
    """
    if replicates < 2 or len(x) < 2:
        raise DohyoError(f"{replicates} replicates of {len(x)} data; both must be at least 2: the square of one score is biased")
    mean = spread = torch.zeros((), dtype=torch.float64, device=x.device)
    slices: dict[str, slice] = {}
    for done, one in enumerate(x.split(1), 1):
        scores = score(model, one[[0] * replicates], estimator, generator, per_datum=True, parameters=parameters)
        g = torch.cat([part.double().reshape(replicates, -1) for part in scores.values()], -1)
        total = g.sum(0)
        product = total.square() - g.square().sum(0) if diagonal else total.outer(total) - g.T @ g
        product = product / (replicates * (replicates - 1))
        if not slices:
            ends = torch.tensor([part[0].numel() for part in scores.values()]).cumsum(0).tolist()
            slices = {name: slice(a, b) for name, a, b in zip(scores, [0, *ends], ends, strict=False)}
        delta = product - mean  # Welford's update of the mean and of the sum of squares about it
        mean = mean + delta / done
        spread = spread + delta * (product - mean)
    warnings = []
    if not estimator.finite_variance or estimator.unseen_share(len(x) * replicates) > 0.5:
        warnings.append("the variance is infinite, or comes from rare depths: stderr is too small; use MultilevelRR, for example")
    return FisherInformation(mean, (spread / (len(x) - 1) / len(x)).sqrt(), slices, estimator.kind, tuple(warnings))


def _theta(model: object) -> dict[str, Tensor]:
    """The generative parameters that are not frozen, by name."""
    if not isinstance(model, nn.Module):
        raise DohyoError(f"{type(model).__name__} is not an nn.Module; say what theta is: parameters={{'theta': ...}}")
    wanted = {id(parameter) for parameter in getattr(model, "decoder_parameters", model.parameters)()}
    return {name: p for name, p in model.named_parameters() if id(p) in wanted and p.requires_grad}


def _gradient(theta: Mapping[str, Tensor], x: Tensor, log_p: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    with torch.enable_grad():
        log_px = log_p(x)
        total = log_px.sum()
    if not bool(total.isfinite()):
        dead = int((log_px == -torch.inf).sum())
        raise DohyoError(f"{dead} of {len(x)} estimates are -inf and have no gradient; q(z; x) must cover all z with p(x, z) > 0")
    if not total.requires_grad:
        raise DohyoError("log_weights has no gradient: compute it from the parameters, without detach or no_grad")
    gradients = torch.autograd.grad(total, list(theta.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(theta, gradients, strict=True))
