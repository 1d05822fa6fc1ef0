"""The paper's models: variational autoencoders with one stochastic layer and with two, and that of an unnormalised density."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call
from torch.nn.functional import pad

from dohyo.models.latent import LatentVariableModel
from dohyo.models.networks import Observed, check_sizes, flat, gaussian, layers, observed, output_bias, standard_normal


class _OfData(LatentVariableModel):
    """A model of data of any shape, of which it sees one vector each."""

    observed: Observed
    decoder: Any

    def start_from(self, train: Tensor) -> None:
        """Start the decoder at the data's own mean (Bernoulli), or mean and standard deviation (Gaussian).

        Args:
            train: (n, data), or (n, ...) with as many numbers for each datum.
        """
        self.observed.start_from(flat(train), output_bias(self.decoder))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return super().log_joint(flat(x), z)


class VAE(_OfData):
    r"""Gaussian latents, Bernoulli pixels or Gaussian values, two tanh layers on each side.

    .. math:: p(z) = N(0, I), \quad p(x_i \mid z) = \mathrm{Bernoulli}(f_\theta(z)_i), \quad
              q(z; x) = N(\mu_\phi(x), \mathrm{diag}\,\sigma_\phi^2(x))

    Args:
        data: The size of a datum, flattened: x may come in any shape with so many numbers.
        hidden: The width of the tanh layers.
        latent: The size of z.
        likelihood: "bernoulli" for pixels in [0, 1], "gaussian" for real numbers: the decoder then outputs a mean and a
            log-scale for each dimension, and no scale falls below 0.001 of the dimension's standard deviation.

    References:
        Burda et al., Importance weighted autoencoders (ICLR 2016), the model with one stochastic layer; Luo et al. (2020).

    Example:
        >>> import dohyo
        >>> x = torch.rand(3, 784).round()
        >>> dohyo.log_marginal(VAE(), x, dohyo.IWAE(10)).shape
        torch.Size([3])
    """

    broadcasts = True

    def __init__(self, data: int = 784, hidden: int = 200, latent: int = 50, likelihood: str = "bernoulli") -> None:
        check_sizes(data=data, hidden=hidden, latent=latent)
        super().__init__()
        self.observed = observed(likelihood, data)
        self.encoder = layers(data, hidden, 2 * latent)
        self.decoder = layers(latent, hidden, self.observed.outputs)
        self.latent = latent

    def encode(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.encoder(self.observed.inputs(flat(x))))

    def posterior(self, code: Tensor) -> Distribution:
        return gaussian(code)

    def prior(self) -> Distribution:
        return standard_normal(self.latent, self.decoder)

    def likelihood(self, z: Tensor) -> Distribution:
        return self.observed.forward(self.decoder(z))


class TwoLayerVAE(_OfData):
    r"""Two Gaussian layers z = (z_1, z_2), with two tanh layers in each of the four networks.

    .. math:: p(x, z) = p(z_2)\, p_\theta(z_1 \mid z_2)\, p_\theta(x \mid z_1), \qquad
              q(z; x) = q_\phi(z_1; x)\, q_\phi(z_2 \mid z_1)

    p(z_2) is N(0, I); the other densities of z_1 and z_2 are diagonal Gaussians whose mean and scale come from a network.

    Args:
        data: The size of a datum, flattened: x may come in any shape with so many numbers.
        hidden: The width of the networks between x and z_1.
        latent: The size of z_2.
        likelihood: "bernoulli" or "gaussian", as for `VAE`.
        hidden2: The width of the networks between z_1 and z_2; half of `hidden` by default.
        latent1: The size of z_1; twice `latent` by default.

    References:
        Burda et al., Importance weighted autoencoders (ICLR 2016), the model with two stochastic layers.

    Example:
        >>> import dohyo
        >>> x = torch.rand(3, 784).round()
        >>> dohyo.log_marginal(TwoLayerVAE(), x, dohyo.IWAE(10)).shape
        torch.Size([3])
    """

    broadcasts = True

    def __init__(
        self,
        data: int = 784,
        hidden: int = 200,
        latent: int = 50,
        likelihood: str = "bernoulli",
        hidden2: int | None = None,
        latent1: int | None = None,
    ) -> None:
        check_sizes(data=data, hidden=hidden, latent=latent)
        hidden2 = max(1, hidden // 2) if hidden2 is None else hidden2
        latent1 = 2 * latent if latent1 is None else latent1
        check_sizes(hidden2=hidden2, latent1=latent1)
        super().__init__()
        self.observed = observed(likelihood, data)
        self.encoder = nn.ModuleDict({"z1": layers(data, hidden, 2 * latent1), "z2": layers(latent1, hidden2, 2 * latent)})
        self.decoder = nn.ModuleDict(
            {"z1": layers(latent, hidden2, 2 * latent1), "x": layers(latent1, hidden, self.observed.outputs)}
        )
        self.latent, self.latent1 = latent, latent1

    def encode(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.encoder["z1"](self.observed.inputs(flat(x))))

    def posterior(self, code: Tensor) -> Distribution:
        return self._upwards(code, self.encoder["z2"])

    def frozen_posterior(self, code: Tensor) -> Distribution:
        """q with phi constant: here phi acts through the code and also through the network of q(z_2 | z_1), which takes z_1."""
        constants = {name: parameter.detach() for name, parameter in self.encoder["z2"].named_parameters()}
        return self._upwards(code.detach(), partial(functional_call, self.encoder["z2"], constants))

    def prior(self) -> Distribution:
        top = standard_normal(self.latent, self.decoder)
        return _Chain(top, lambda z2: gaussian(self.decoder["z1"](z2)), self.latent1, reverse=True)

    def likelihood(self, z: Tensor) -> Distribution:
        return self.observed.forward(self.decoder["x"](z[..., : self.latent1]))

    def _upwards(self, code: Tensor, network: Callable[[Tensor], Any]) -> Distribution:
        return _Chain(gaussian(code), lambda z1: gaussian(network(z1)), self.latent)


class _Chain(Distribution):
    """p(a) p(b | a) as a distribution of the vector (a, b), or of (b, a) with `reverse`; b has `size` numbers."""

    arg_constraints: ClassVar = {}
    has_rsample = True

    def __init__(self, first: Distribution, second: Callable[[Tensor], Distribution], size: int, reverse: bool = False) -> None:
        self.first, self.second, self.reverse = first, second, reverse
        sizes = [first.event_shape.numel(), size]
        self.sizes = sizes[::-1] if reverse else sizes
        super().__init__(first.batch_shape, torch.Size([sum(sizes)]), validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        a = self.first.rsample(torch.Size(sample_shape))
        b = self.second(a).rsample()
        left, right = (b, a) if self.reverse else (a, b)
        # Not torch.cat: mapped over replicas it fixes the number of rows, and a captured step must serve any number.
        return pad(left, (0, self.sizes[1])) + pad(right, (self.sizes[0], 0))

    def log_prob(self, value: Tensor) -> Tensor:
        a, b = value.split(self.sizes, -1)
        if self.reverse:
            a, b = b, a
        return torch.as_tensor(self.first.log_prob(a) + self.second(a).log_prob(b))


class GaussianLVM(LatentVariableModel):
    r"""A mixture of infinitely many Gaussians: each network has one hidden layer of tanh units.

    .. math:: p(z) = N(0, I), \quad p(x \mid z) = N(\mu_\theta(z), \mathrm{diag}\,\sigma_\theta^2(z)), \quad
              q(z; x) = N(\mu_\phi(x), \mathrm{diag}\,\sigma_\phi^2(x))

    Args:
        data: The size of x.
        hidden: The width of the tanh layers.
        latent: The size of z.

    References:
        Luo et al., SUMO (ICLR 2020), the section on entropy maximisation.

    Example:
        >>> GaussianLVM(data=2).rsample(5).shape
        torch.Size([5, 2])
    """

    def __init__(self, data: int = 2, hidden: int = 200, latent: int = 20) -> None:
        check_sizes(data=data, hidden=hidden, latent=latent)
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(data, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, 2 * data))
        self.data, self.latent = data, latent

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]

    def posterior(self, code: Tensor) -> Distribution:
        return gaussian(code)

    def prior(self) -> Distribution:
        return standard_normal(self.latent, self.decoder)

    def likelihood(self, z: Tensor) -> Distribution:
        return gaussian(self.decoder(z))
