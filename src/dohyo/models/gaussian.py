"""The paper's model of an unnormalised density."""

from torch import Tensor, nn
from torch.distributions import Distribution

from dohyo.models.latent import LatentVariableModel
from dohyo.models.networks import check_sizes, gaussian, standard_normal


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
