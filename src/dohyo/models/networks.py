"""Parts that the models share: tanh networks and diagonal Gaussians on top of them."""

import math

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal
from torch.nn.functional import binary_cross_entropy_with_logits

from dohyo.errors import DohyoError

# Latent scales stay within e^-9 .. e^9. Below that, float32 does not resolve z - mean to three digits, and log q is noise;
# above it, one bad step of the encoder would overflow. No trained model comes near either end.
LOG_SCALE_LIMIT = 9.0


def layers(size_in: int, hidden: int, size_out: int) -> nn.Sequential:
    """Two tanh layers and a linear one."""
    return nn.Sequential(nn.Linear(size_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, size_out))


def output_bias(network: nn.Module) -> Tensor:
    """The bias of the last of `layers`."""
    *_, bias = network.parameters()
    return bias


def gaussian(output: Tensor) -> Distribution:
    """A diagonal Gaussian from a network's output: means, then as many log-scales, kept within `LOG_SCALE_LIMIT`."""
    mean, log_scale = output.chunk(2, -1)
    scale = log_scale.clamp(-LOG_SCALE_LIMIT, LOG_SCALE_LIMIT).exp()
    return independent(Normal(mean, scale, validate_args=False))


def bernoulli(logits: Tensor) -> Distribution:
    """Independent bits."""
    return _Bits(Bernoulli(logits=logits, validate_args=False), 1, validate_args=False)


class _Bits(Independent):  # type: ignore[type-arg]
    """The sum comes before the change of sign, which saves two passes over all bits: a tenth of a VAE's step on a CPU."""

    def log_prob(self, value: Tensor) -> Tensor:
        logits, value = torch.broadcast_tensors(self.base_dist.logits, value)
        return -binary_cross_entropy_with_logits(logits, value, reduction="none").sum(-1)


def standard_normal(size: int, like: nn.Module) -> Distribution:
    """N(0, I) on the device of the module's parameters, in their precision."""
    zero = next(like.parameters()).new_zeros(size)
    return _StandardNormal(Normal(zero, torch.ones_like(zero), validate_args=False), 1, validate_args=False)


class _StandardNormal(Independent):  # type: ignore[type-arg]
    """The same density to the last bit, in a third of the operations."""

    def log_prob(self, value: Tensor) -> Tensor:
        return (value.square() * -0.5 - math.log(math.sqrt(2 * math.pi))).sum(-1)


def flat(x: Tensor) -> Tensor:
    """One vector for each datum."""
    return x.flatten(1) if x.ndim > 2 else x


def independent(distribution: Distribution) -> Distribution:
    """One density for each row."""
    return Independent(distribution, 1, validate_args=False)


def check_sizes(**sizes: int) -> None:
    """Raise a DohyoError that names the first size below one."""
    for name, size in sizes.items():
        if size < 1:
            raise DohyoError(f"{name} is {size}; it must be at least 1")
