"""A model from anybody's encoder and decoder."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal, Poisson

from dohyo.errors import DohyoError, whole
from dohyo.models.latent import LatentVariableModel
from dohyo.models.networks import LOG_SCALE_LIMIT, independent, standard_normal
from dohyo.names import choices, nearest

Likelihood = Literal["bernoulli", "gaussian", "poisson", "categorical"]


class Autoencoder(LatentVariableModel):
    r"""A plain PyTorch VAE as a model: an encoder, a decoder, and what the decoder's output means.

    .. math:: p(z) = N(0, I), \quad x \mid z \sim p(\cdot \mid f_\theta(z)), \quad
              q(z; x) = N(\mu_\phi(x), \mathrm{diag}\,\sigma_\phi^2(x))

    The encoder gets x in the shape in which it comes, such as (N, C, H, W), and log p(x | z) is the sum over all elements of a
    datum. A decoder may give them in another shape, such as flat images.

    Args:
        encoder: x -> the mean and the log-variance of q(z; x), as a pair, or as one tensor that holds the means and then as many
            log-variances along its dimension 1.
        decoder: z, (rows, latent) -> its output, one row for each z.
        likelihood: What the output is: "bernoulli", logits; "gaussian", means, or the pair of means and log-variances; "poisson",
            log-rates; "categorical", logits (rows, classes, ...) of x in 0, 1, ..., as for `torch.nn.CrossEntropyLoss`. Or a
            function from the output to a `Distribution`.
        scale: The standard deviation of "gaussian" if the decoder gives only means; None to learn one for all, starting at 1.
        latent: The size of z, or the shape in which the decoder gets it. By default it is known once the encoder has been used.

    References:
        Kingma and Welling, Auto-encoding variational Bayes (ICLR 2014).

    Example:
        >>> import dohyo
        >>> encoder = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 3 * 3, 2 * 5))
        >>> decoder = nn.Sequential(nn.Linear(5, 64), nn.Unflatten(1, (1, 8, 8)))
        >>> model = Autoencoder(encoder, decoder, "bernoulli")
        >>> x = torch.rand(20, 1, 8, 8).round()
        >>> dohyo.log_marginal(model, x, dohyo.MultilevelRR.at_cost(15)).shape
        torch.Size([20])
        >>> model.sample(3).shape
        torch.Size([3, 1, 8, 8])
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        likelihood: Likelihood | Callable[[Any], Distribution] = "bernoulli",
        scale: float | None = None,
        latent: int | tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        for name, network in (("encoder", encoder), ("decoder", decoder)):
            if not isinstance(network, nn.Module):
                raise DohyoError(f"the {name} is a {type(network).__name__}; it must be a torch.nn.Module")
        self.encoder, self.decoder = encoder, decoder
        self.observed = _observed(likelihood, scale)
        sizes = (latent,) if isinstance(latent, int) else latent
        self.latent = None if sizes is None else tuple(whole("latent", size) for size in sizes)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.encoder(x)
        if isinstance(output, Tensor):
            if output.ndim < 2 or output.shape[1] % 2:
                raise DohyoError(
                    f"the encoder returned one tensor {tuple(output.shape)}; it must hold the means and as many log-variances "
                    "along dimension 1, or be a pair (mean, log-variance)"
                )
            output = output.chunk(2, 1)
        if not (isinstance(output, tuple | list) and len(output) == 2 and all(isinstance(part, Tensor) for part in output)):
            raise DohyoError(f"the encoder returned {_words(output)}; it must return mean and log-variance, two tensors")
        mean, log_variance = output
        if mean.shape != log_variance.shape or mean.ndim < 2 or len(mean) != len(x):
            raise DohyoError(
                f"the encoder returned a mean {tuple(mean.shape)} and a log-variance {tuple(log_variance.shape)} for x "
                f"{tuple(x.shape)}; both must be ({len(x)}, latent)"
            )
        if self.latent is None:
            self.latent = tuple(mean.shape[1:])
        if tuple(mean.shape[1:]) != self.latent:
            raise DohyoError(
                f"the encoder gives z of shape {tuple(mean.shape[1:])}, but latent is {self.latent}; make them equal"
            )
        return mean.flatten(1), log_variance.flatten(1)

    def posterior(self, code: tuple[Tensor, Tensor]) -> Distribution:
        mean, log_variance = code
        return independent(Normal(mean, _scale(log_variance), validate_args=False))

    def prior(self) -> Distribution:
        return standard_normal(math.prod(self._shape_of_z()), self)

    def likelihood(self, z: Tensor) -> Distribution:
        distribution = self.observed(self.decoder(z.unflatten(-1, self._shape_of_z())))
        if not isinstance(distribution, Distribution):
            raise DohyoError(f"the likelihood returned {_words(distribution)}; it must be a torch.distributions.Distribution")
        if distribution.batch_shape[:1] != z.shape[:1]:
            raise DohyoError(
                f"p(x | z) is of shape {tuple(distribution.batch_shape)} for z {tuple(z.shape)}; the decoder must return one row "
                "for each z"
            )
        return Independent(distribution, len(distribution.batch_shape) - 1, validate_args=False)

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        distribution = self.likelihood(z)
        shape = distribution.event_shape
        if x.shape[1:] != shape:
            if x.shape[1:].numel() != shape.numel():
                raise DohyoError(
                    f"a datum is {tuple(x.shape[1:])}, but the decoder gives {tuple(shape)}; they must have as many elements"
                )
            x = x.reshape(len(x), *shape)
        return torch.as_tensor(self.prior().log_prob(z) + distribution.log_prob(x))

    def _shape_of_z(self) -> tuple[int, ...]:
        if self.latent is None:
            raise DohyoError("the size of z is not known before the encoder has been used; give latent= to Autoencoder")
        return self.latent


class _Gaussian(nn.Module):
    """Means with one standard deviation, fixed or learned; or means and log-variances."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        if scale is not None and not 0 < scale < float("inf"):
            raise DohyoError(f"scale is {scale}; it must be positive and finite, or None to be learned")
        self.scale, self.log_variance = scale, nn.Parameter(torch.zeros(())) if scale is None else None

    def forward(self, output: Any) -> Distribution:
        if isinstance(output, tuple | list):
            mean, log_variance = output
            return Normal(mean, _scale(log_variance), validate_args=False)
        scale = torch.full_like(output, self.scale or 1.0) if self.log_variance is None else _scale(self.log_variance)
        return Normal(output, scale, validate_args=False)


def _bernoulli(output: Tensor) -> Distribution:
    return Bernoulli(logits=output, validate_args=False)


def _poisson(output: Tensor) -> Distribution:
    return Poisson(output.exp(), validate_args=False)


def _categorical(output: Tensor) -> Distribution:
    return Categorical(logits=output.movedim(1, -1), validate_args=False)


def _observed(likelihood: Likelihood | Callable[[Any], Distribution], scale: float | None) -> Callable[[Any], Distribution]:
    if likelihood == "gaussian":
        return _Gaussian(scale)
    if scale is not None:
        raise DohyoError(f"scale is {scale}, but the likelihood is {likelihood!r}; only 'gaussian' has a scale")
    known: dict[Any, Callable[[Any], Distribution]] = {"bernoulli": _bernoulli, "poisson": _poisson, "categorical": _categorical}
    if likelihood in known:
        return known[likelihood]
    if not callable(likelihood):
        hint = nearest(str(likelihood), choices(Likelihood))
        raise DohyoError(
            f"unknown likelihood {likelihood!r}: {hint}; or give a function from the decoder's output to a Distribution"
        )
    return likelihood


def _scale(log_variance: Tensor) -> Tensor:
    return (log_variance / 2).clamp(-LOG_SCALE_LIMIT, LOG_SCALE_LIMIT).exp()


def _words(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return f"a {type(value).__name__}"
