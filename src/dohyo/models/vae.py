"""The paper's variational autoencoder."""

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal

from dohyo.models.latent import LatentVariableModel


class VAE(LatentVariableModel):
    r"""Gaussian latents, Bernoulli pixels, two tanh layers on each side.

    .. math:: p(z) = N(0, I), \quad p(x_i \mid z) = \mathrm{Bernoulli}(f_\theta(z)_i), \quad
              q(z; x) = N(\mu_\phi(x), \mathrm{diag}\,\sigma_\phi^2(x))

    References:
        Burda et al., Importance weighted autoencoders (ICLR 2016), the model with one stochastic layer; Luo et al. (2020).

    Example:
        >>> import dohyo
        >>> x = torch.rand(3, 784).round()
        >>> dohyo.log_marginal(VAE(), x, dohyo.IWAE(10)).shape
        torch.Size([3])
    """

    def __init__(self, data: int = 784, hidden: int = 200, latent: int = 50) -> None:
        super().__init__()
        self.encoder = _layers(data, hidden, 2 * latent)
        self.decoder = _layers(latent, hidden, data)
        self.latent = latent

    def encode(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.encoder(x))

    def posterior(self, code: Tensor) -> Distribution:
        mean, log_scale = code.chunk(2, -1)
        return _independent(Normal(mean, log_scale.exp(), validate_args=False))

    def prior(self) -> Distribution:
        zero = next(self.decoder.parameters()).new_zeros(self.latent)
        return _independent(Normal(zero, torch.ones_like(zero), validate_args=False))

    def likelihood(self, z: Tensor) -> Distribution:
        return _independent(Bernoulli(logits=self.decoder(z), validate_args=False))


def _layers(size_in: int, hidden: int, size_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(size_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, size_out)
    )


def _independent(distribution: Distribution) -> Distribution:
    return Independent(distribution, 1, validate_args=False)
