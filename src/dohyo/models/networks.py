"""Parts that the models share: tanh networks, distributions on top of them, and p(x | z) of pixels and of real numbers."""

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal
from torch.nn.functional import softplus

from dohyo.contract import eager
from dohyo.errors import DohyoError
from dohyo.names import named

# Latent scales stay within e^-9 .. e^9. Below that, float32 does not resolve z - mean to three digits, and log q is noise;
# above it, one bad step of the encoder would overflow. No trained model comes near either end.
LOG_SCALE_LIMIT = 9.0
_LARGE = 40.0  # a logit l above which log(1 + e^l) is l to the last bit
_FACTORS = 64  # of 0.5 to 1, whose product float32 holds
LEAST_SCALE = 1e-3  # of the Gaussian likelihood, as a share of each dimension's own standard deviation


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
    """log p = x l - log(1 + e^l), summed over all bits: most of a VAE's memory, and on a CPU much of its time."""

    def log_prob(self, value: Tensor) -> Tensor:
        logits: Tensor = self.base_dist.logits
        if logits.dtype in (torch.float16, torch.bfloat16):  # from autocast; log p(x) of many bits needs more digits
            logits = logits.float()
        # By hand: the first call of torch.broadcast_shapes takes 0.25 s.
        sizes = zip(reversed(value.shape), reversed(logits.shape), strict=False)
        if eager() and not value.requires_grad and value.ndim <= logits.ndim and all(own in (1, whole) for own, whole in sizes):
            return _LogBits.apply(logits, value)  # type: ignore[no-any-return, no-untyped-call]
        return -torch.addcmul(softplus(logits, threshold=_LARGE), logits, value, value=-1).sum(-1)


class _LogBits(torch.autograd.Function):
    """The same in place and, of many bits, with few logarithms: less memory, and on a CPU less time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(logits, value)
        ctx.save_for_forward(logits, value)
        if logits.shape[-1] <= _FACTORS:
            return softplus(logits, threshold=_LARGE).addcmul_(logits, value, value=-1).sum(-1).neg_()
        likely = logits.abs().sigmoid_()  # log(1 + e^l) = max(l, 0) - log sigmoid(|l|), and a product needs one logarithm
        rest = likely.shape[-1] % _FACTORS
        whole, last = likely.split([likely.shape[-1] - rest, rest], -1)
        log_p: Tensor = whole.unflatten(-1, (-1, _FACTORS)).prod(-1).log_().sum(-1).add_(last.prod(-1).log_())
        return log_p.sub_(torch.clamp(logits, min=0, out=likely).addcmul_(logits, value, value=-1).sum(-1))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        logits, value = ctx.saved_tensors
        change: Tensor = (value - logits.sigmoid()) * tangents[0]
        return change.sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, value = ctx.saved_tensors
        again = torch.is_grad_enabled()  # to be differentiated once more
        excess = logits.sigmoid() - value if again else logits.sigmoid().sub_(value)
        gradient = -gradients[0][..., None]
        if not again:
            with suppress(RuntimeError):  # many gradients are asked for at once
                return excess.mul_(gradient), None
        return excess * gradient, None


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


class Observed(nn.Module, ABC):
    """The likelihood of flat data of a given size, from a decoder's output."""

    each: ClassVar[int]  # outputs of the decoder for each number of a datum

    def __init__(self, data: int) -> None:
        super().__init__()
        self.data, self.outputs = data, self.each * data

    @abstractmethod
    def forward(self, output: Tensor) -> Distribution:
        """p(x | z), one density for each row."""

    @abstractmethod
    def start_from(self, train: Tensor, bias: Tensor) -> None:
        """Set the decoder's output bias so that a decoder that ignores z fits each dimension of `train` separately."""

    def inputs(self, x: Tensor) -> Tensor:
        """x as the encoder sees it."""
        return x

    def _check(self, train: Tensor) -> None:
        if train.ndim != 2 or train.shape[1] != self.data or len(train) == 0 or train.is_complex():
            raise DohyoError(
                f"the training data is {train.dtype} {tuple(train.shape)}, this model needs (n, {self.data}); flatten each "
                "datum, or build the model with data= its size"
            )
        if not bool(train.isfinite().all()):
            raise DohyoError("the training data holds NaN or infinite values; remove or fill them")


class BernoulliPixels(Observed):
    r"""p(x_i | z) = Bernoulli(sigmoid(output_i)); the bias starts at the logit of the mean, clamped to [0.001, 0.999]."""

    each = 1

    def forward(self, output: Tensor) -> Distribution:
        return bernoulli(output)

    @torch.no_grad()
    def start_from(self, train: Tensor, bias: Tensor) -> None:
        self._check(train)
        low, high = float(train.min()), float(train.max())
        if low < 0 or high > 1:
            raise DohyoError(
                f"the training data ranges over [{low:g}, {high:g}], Bernoulli pixels need [0, 1]; rescale it, or use "
                "likelihood='gaussian'"
            )
        bias.copy_(train.mean(0, dtype=torch.float64).clamp(1e-3, 1 - 1e-3).logit())


class GaussianValues(Observed):
    r"""p(x_i | z) = N(m_i + s_i mean_i, (s_i scale_i)^2), where m and s standardise each dimension.

    m and s are buffers, 0 and 1 until `start_from` sets them to the data's mean and standard deviation. The encoder sees
    (x - m) / s. So training does not depend on the data's units, the model starts at the data's own mean and standard
    deviation if the output bias is zero, and densities are in the data's units. A dimension that never varies keeps s = 1 and the
    mean m whatever the decoder outputs; otherwise its tiny scale would turn every step of the decoder into a huge loss.

    The scale is bounded below by `LEAST_SCALE`, smoothly: log scale = f + softplus(output - f), f = log LEAST_SCALE. So a
    dimension that is constant, or a function of z, has a density of at most 400 / s_i, and never an infinite one.
    """

    each = 2
    location: Tensor
    spread: Tensor
    gain: Tensor

    def __init__(self, data: int) -> None:
        super().__init__(data)
        self.register_buffer("location", torch.zeros(data))
        self.register_buffer("spread", torch.ones(data))
        self.register_buffer("gain", torch.ones(data))

    def inputs(self, x: Tensor) -> Tensor:
        return (x - self.location) / self.spread

    def forward(self, output: Tensor) -> Distribution:
        mean, log_scale = output.chunk(2, -1)
        floor = math.log(LEAST_SCALE)
        scale = (floor + softplus(log_scale - floor)).exp()
        return independent(Normal(self.location + self.gain * mean, self.spread * scale, validate_args=False))

    @torch.no_grad()
    def start_from(self, train: Tensor, bias: Tensor) -> None:
        self._check(train)
        spread, location = torch.std_mean(train.double(), 0, correction=0)
        rounding = 4 * torch.finfo(train.dtype if train.is_floating_point() else torch.float32).eps
        constant = spread <= rounding * location.abs()
        self.location.copy_(location)
        self.spread.copy_(torch.where(constant, 1.0, spread))
        self.gain.copy_(torch.where(constant, 0.0, spread))
        bias.zero_()


LIKELIHOODS: dict[str, type[Observed]] = {"bernoulli": BernoulliPixels, "gaussian": GaussianValues}


def observed(likelihood: str, data: int) -> Observed:
    """The likelihood with this name."""
    return named(LIKELIHOODS, likelihood, "likelihood")(data)
