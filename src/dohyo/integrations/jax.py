"""Models in JAX, and so in NumPyro and Flax: any function of a key and data that returns log-weights.

Numbers cross between the libraries as NumPy arrays; gradients do not.
"""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.integrations import missing

try:
    import jax
except ModuleNotFoundError as error:
    raise missing(error, "jax") from None


def from_jax(function: Callable[[Any, Any], Any]) -> "JaxModel":
    """A model of dohyo from a function of JAX.

    `function(key, x)` gets a random key and data, one in each row of x, draws a z for each, and returns one number for each
    row, log p(x, z) - log q(z; x). It is compiled by `jax.jit`; the number of rows is padded to a power of two, so that few
    shapes are compiled. Keys are drawn from torch's generator: the seed of `dohyo.evaluate` decides them too. JAX computes in
    float32 unless `jax_enable_x64` is set.

    Example:
        >>> import dohyo, torch, jax
        >>> from jax.scipy.stats import norm
        >>> def log_weights(key, x):
        ...     z = x / 2 + 0.9 * jax.random.normal(key, x.shape)
        ...     return norm.logpdf(z) + norm.logpdf(x, z) - norm.logpdf(z, x / 2, 0.9)
        >>> x = torch.linspace(-2, 2, 100)
        >>> found = dohyo.evaluate(from_jax(log_weights), x, dohyo.MultilevelRR.at_cost(15), replicates=4)
        >>> exact = torch.distributions.Normal(0.0, 2**0.5).log_prob(x).mean()
        >>> abs(found.mean - float(exact)) < 4 * found.noise_stderr
        True
    """
    if not callable(function):
        raise DohyoError(f"the function is a {type(function).__name__}; give a function of a key and x that returns log-weights")
    return JaxModel(function)


class JaxModel:
    """See `from_jax`."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = jax.jit(function)

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        """One log-weight for each row, without a gradient."""
        if not len(rows):
            return torch.empty(0, device=x.device)
        key = jax.random.key(int(torch.randint(2**31, ())))
        padding = (1 << (len(rows) - 1).bit_length()) - len(rows)
        wanted = torch.cat([rows, rows[-1:].expand(padding)])
        found = self.function(key, x.detach()[wanted].cpu().numpy())
        if getattr(found, "shape", None) != wanted.shape or not numpy.issubdtype(found.dtype, numpy.floating):
            raise DohyoError(
                f"the function returned {getattr(found, 'dtype', type(found).__name__)} {getattr(found, 'shape', '')} for "
                f"{len(wanted)} rows; it must return one float for each row, ({len(wanted)},)"
            )
        return torch.from_numpy(numpy.array(found))[: len(rows)].to(x.device)
