"""The paper's variational autoencoder."""

import torch
from torch import Tensor
from torch.distributions import Distribution

from dohyo.models.latent import LatentVariableModel
from dohyo.models.likelihoods import observed
from dohyo.models.networks import check_sizes, flat, gaussian, layers, output_bias, standard_normal


class VAE(LatentVariableModel):
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

    def start_from(self, train: Tensor) -> None:
        """Start the decoder at the data's own mean (Bernoulli), or mean and standard deviation (Gaussian).

        Args:
            train: (n, data), or (n, ...) with as many numbers for each datum.
        """
        self.observed.start_from(flat(train), output_bias(self.decoder))

    def encode(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.encoder(self.observed.inputs(flat(x))))

    def posterior(self, code: Tensor) -> Distribution:
        return gaussian(code)

    def prior(self) -> Distribution:
        return standard_normal(self.latent, self.decoder)

    def likelihood(self, z: Tensor) -> Distribution:
        return self.observed.forward(self.decoder(z))

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        return super().log_joint(flat(x), z)
