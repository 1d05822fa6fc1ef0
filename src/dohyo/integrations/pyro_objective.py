"""Training in Pyro on an estimate of log p(x): an `ELBO` for `SVI`, with one backward pass for theta and phi."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.estimators import Estimator
from dohyo.integrations import pyro_traces as traced
from dohyo.integrations.pyro_traces import ELBO, Messenger, Pointed, Traces, poutine
from dohyo.names import named

ENCODERS = {
    "dreg": "the guide climbs IWAE_K of the same samples by the doubly reparameterised gradient; needs rsample",
    "iwae": "the guide climbs IWAE_K of the same samples; needs rsample",
    "wake": "the guide learns the posterior from weighted samples (reweighted wake-sleep); any guide",
}


class LogMarginal(ELBO):  # type: ignore[misc]
    r"""An unbiased estimate of log p(x) as the loss of `pyro.infer.SVI`.

    .. math:: \text{loss} = -\frac{N}{B} \sum_{i=1}^B Y_i, \qquad E[Y_i] = \log p_\theta(x_i)

    where Y_i is made of the log-weights of datum i alone. So the gradient in theta is unbiased for that of log p(all data), with
    subsampling too. The guide follows a loss of its own, since an unbiased estimate does not depend on it in the mean. One depth
    K is drawn for each step, and all data of the step get K samples.

    Args:
        estimator: Any of `dohyo`'s.
        encoder: What the guide follows: "dreg", "iwae" or "wake", which needs no `rsample`.
        plate: The data's plate, where every site lies in several. A model with sites outside of every plate is taken as one
            datum, as by `from_pyro` without a plate.
        max_plate_nesting: As for Pyro's own; found by one run where it is not given.
        vectorize_particles: All samples at once, in an outermost plate; False runs guide and model K times.

    References:
        Tucker et al., Doubly reparameterized gradient estimators (ICLR 2019). Bornschein and Bengio, Reweighted wake-sleep
        (ICLR 2015).

    Example:
        >>> import dohyo, torch, pyro
        >>> from pyro.distributions import Normal
        >>> def model(x):
        ...     mean = pyro.param("mean", torch.tensor(0.0))
        ...     with pyro.plate("data", len(x), subsample_size=50) as i:
        ...         z = pyro.sample("z", Normal(mean, 1.0))
        ...         pyro.sample("x", Normal(z, 1.0), obs=x[i])
        >>> def guide(x):
        ...     slope = pyro.param("slope", torch.tensor(0.4))
        ...     with pyro.plate("data", len(x), subsample_size=50) as i:
        ...         pyro.sample("z", Normal(slope * x[i] + 1.0, 0.9))
        >>> _ = pyro.set_rng_seed(0)
        >>> x = 2.0 + 2**0.5 * torch.randn(400)
        >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), LogMarginal(dohyo.MultilevelRR.at_cost(15)))
        >>> for step in range(80):
        ...     loss = svi.step(x)
        >>> abs(pyro.param("mean").item() - x.mean().item()) < 0.2
        True
    """

    max_plate_nesting: float

    def __init__(
        self,
        estimator: Estimator,
        encoder: str = "dreg",
        *,
        plate: str | None = None,
        max_plate_nesting: float = math.inf,
        vectorize_particles: bool = True,
    ) -> None:
        super().__init__(max_plate_nesting=max_plate_nesting)
        if not isinstance(estimator, Estimator):
            raise DohyoError(
                f"the estimator is a {type(estimator).__name__}; give one of dohyo's, as dohyo.MultilevelRR.at_cost(15)"
            )
        named(ENCODERS, encoder, "encoder")
        self.estimator, self.encoder, self.plate, self.vectorize_particles = estimator, encoder, plate, vectorize_particles

    def loss(self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """An estimate of -log p(all data)."""
        with torch.no_grad():
            return float(self.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """The same, with theta's and phi's gradients added to the parameters."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        return float(loss.detach())

    def differentiable_loss(self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """The same as a tensor, whose backward pass leaves theta's gradient in theta and phi's in phi."""
        if self.max_plate_nesting == math.inf:
            with traced.unseen():
                self.max_plate_nesting = traced.plate_depth(traced.run(model, guide, args, kwargs, None))
        count = int(self.estimator.plan(1, shared=True)[0])
        passes = [_Pass(self, model, guide, args, kwargs, count)]
        while sum(each.samples for each in passes) < count:  # on the same data
            passes.append(_Pass(self, model, guide, args, kwargs, count, passes[0].subsample))
        log_p, log_q = torch.cat([each.log_p for each in passes]), torch.cat([each.log_q for each in passes])
        log_px, theta, phi = self._coefficients((log_p - log_q).detach())
        value = -log_px.sum()
        if torch.is_grad_enabled():
            surrogate = -(theta * torch.where(theta == 0, 0.0, log_p)).sum()
            ratio = torch.where(theta == 0, 0.0, phi / theta)
            size = passes[0].samples
            for each, own_ratio, own_phi in zip(passes, ratio.split(size), phi.split(size), strict=True):
                each.scale_gradients(own_ratio)
                surrogate = surrogate + each.loss_of_guide(own_phi)
            value = value + (surrogate - surrogate.detach())
        return passes[0].scale * value

    def _coefficients(self, log_w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The estimates (data,), dY / dlog w and the coefficients of the guide's objective, (samples, data)."""
        log_w = log_w.double().T.contiguous()
        log_px, theta = self.estimator.slopes(log_w, torch.full((log_w.shape[0],), log_w.shape[1], device=log_w.device))
        posterior = log_w.softmax(-1).nan_to_num(0.0)  # a datum of zero weights asks for nothing
        return log_px, theta.T, (posterior.square() if self.encoder == "dreg" else posterior).T

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError("LogMarginal makes its own traces")


class _Detached(Messenger):  # type: ignore[misc]
    """No gradient passes through what is drawn."""

    def _pyro_post_sample(self, msg: Any) -> None:
        msg["value"] = msg["value"].detach()


class _Pass:
    """One pass through guide and model: all K samples of a step in a plate of their own, or one of them.

    theta's coefficients c and phi's c' differ by a factor for each sample. All that phi does to log p passes through z, so under
    the loss -sum c log p the gradient of z is multiplied by c' / c, and one backward pass serves both.
    """

    def __init__(
        self,
        objective: LogMarginal,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: Any,
        kwargs: Any,
        count: int,
        subsample: dict[str, Tensor] | None = None,
    ) -> None:
        self.encoder, depth = objective.encoder, int(objective.max_plate_nesting)
        self.ratio: list[Tensor] = []  # what gradients of z are multiplied by; known after the forward pass
        self.samples = count if objective.vectorize_particles else 1
        if objective.vectorize_particles:
            model, guide = (traced.in_particles(fn, count, depth) for fn in (model, guide))
        self.replay_guide: Callable[[Any], Any] = lambda trace: traced.replay(guide, trace, args, kwargs, -2 - depth)
        with Pointed(subsample or {}):
            with _Detached() if self.encoder == "wake" else nullcontext():
                self.guide = poutine.trace(guide).get_trace(*args, **kwargs)
            _check_rsample(self.guide, self.encoder)
            passed = traced.with_values(self.guide, self._scaled)
            trace = traced.replay(model, passed, args, kwargs, -2 - depth)
        traces = Traces(self.guide, trace)
        plate = traced.common_plate(traces, objective.plate) or traced.subsampled(traces)
        traced.check(traces, plate)
        frames = traced.frames_of(traces)
        self.frames = [frames[name] for name in (traced.PARTICLES, plate) if name in frames]
        # N / B, the densities (samples, data), and the data that each subsampling plate drew.
        self.scale = (frames[plate].full_size or frames[plate].size) / frames[plate].size if plate else 1.0
        self.log_p, self.log_q = self._density(trace), self._density(self.guide)
        self.subsample = traced.subsamples(self.guide)

    def _density(self, trace: Any) -> Tensor:
        return traced.log_density(trace, self.frames).reshape(self.samples, -1)

    def _scaled(self, site: Any) -> Tensor:
        """The value of a site, with a gradient that is multiplied by the ratio on its way from the model to the guide."""
        value, ratio, event = site["value"].view_as(site["value"]), self.ratio, (1,) * site["fn"].event_dim
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * ratio[0].reshape(ratio[0].shape + event).to(gradient.dtype))
        return value  # type: ignore[no-any-return]

    def scale_gradients(self, ratio: Tensor) -> None:
        """Says what the gradients of z are to be multiplied by, (samples, data)."""
        shape = [1] * max([-frame.dim for frame in self.frames], default=0)
        for frame in self.frames:
            shape[frame.dim] = frame.size
        self.ratio.append(ratio.reshape(shape))

    def loss_of_guide(self, phi: Tensor) -> Tensor:
        """What log q adds to the loss, for the coefficients of phi's objective, (samples, data)."""
        if self.encoder != "dreg":  # wake: log q at fixed samples is to rise
            return (phi * self.log_q).sum() * (-1 if self.encoder == "wake" else 1)
        drawn = [name for name, site in self.guide.iter_stochastic_nodes() if site["value"].requires_grad]
        if not drawn:  # a guide without parameters
            return phi.new_zeros(())
        # The density of q moves through z alone: its gradient in z, at constant phi, meets that of z in phi.
        fixed = traced.with_values(self.guide, lambda site: site["value"].detach().requires_grad_())
        log_q = self._density(self.replay_guide(fixed))
        leaves = [fixed.nodes[name]["value"] for name in drawn]
        gradients = torch.autograd.grad((phi * log_q).sum(), leaves, allow_unused=True, materialize_grads=True)
        values = [self.guide.nodes[name]["value"] for name in drawn]
        return torch.stack([(g * value).sum() for g, value in zip(gradients, values, strict=True)]).sum()


def _check_rsample(trace: Any, encoder: str) -> None:
    for site in traced.sites(trace):
        if encoder != "wake" and not site["is_observed"] and not site["fn"].has_rsample:
            raise DohyoError(
                f"the guide draws {site['name']!r} from a {type(site['fn']).__name__} without rsample, so that encoder "
                f"{encoder!r} has no gradient; use encoder='wake', or enumerate the site in the model"
            )
