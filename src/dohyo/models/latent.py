"""A latent-variable model from four distributions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from dohyo.contract import proposed
from dohyo.packing import in_order, take


class LatentVariableModel(nn.Module, ABC):
    r"""p(x, z) = p(z) p(x | z) with a proposal q(z; x), each a `torch.distributions.Distribution`.

    A subclass gives `encode`, `posterior`, `prior` and `likelihood`; log-weights follow:

    .. math:: \log w = \log p(z) + \log p(x \mid z) - \log q(z; x), \qquad z \sim q(\cdot\,; x)

    Give distributions inside a model `validate_args=False`: validation synchronises with the GPU. The proposal's
    parameters are those of the submodule `encoder`, unless `encoder_parameters` is overridden.

    Attributes:
        broadcasts: Whether `likelihood` also takes z of shape (data, n, latent). On a CPU x is then not copied for each of its n
            samples, which would take up to 15% of a step. A subclass must say so itself; it is not inherited.
    """

    broadcasts: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.broadcasts = vars(cls).get("broadcasts", False)

    @abstractmethod
    def encode(self, x: Tensor) -> Any:
        """What q(z; x) needs to know about x, one row for each datum: a tensor or a tuple of tensors."""

    @abstractmethod
    def posterior(self, code: Any) -> Distribution:
        """q(z; x), with `rsample`."""

    def frozen_posterior(self, code: Any) -> Distribution:
        """q(z; x) with phi constant, so that its log-density has a gradient in z alone.

        This is the posterior of the detached code, which is right if phi acts only through the code. Override it if `posterior`
        itself has parameters, as with a second stochastic layer (see `TwoLayerVAE`).
        """
        return self.posterior(_detach(code))

    @abstractmethod
    def prior(self) -> Distribution:
        """p(z), for a single z."""

    @abstractmethod
    def likelihood(self, z: Tensor) -> Distribution:
        """p(x | z)."""

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """log p(x, z), x and z with one row for each pair; if the model broadcasts, also with as many rows of z for each x."""
        log_prior = self.prior().log_prob(z)
        if len(x) == len(z):
            return torch.as_tensor(log_prior + self.likelihood(z).log_prob(x))
        return torch.as_tensor(log_prior + self.likelihood(z.unflatten(0, (len(x), -1))).log_prob(x[:, None]).flatten())

    def bind(self, x: Tensor, detach_posterior: bool = False, detach_x: bool = False) -> Callable[[Tensor], Tensor]:
        """rows -> log-weights of x[rows], encoding x once for any number of calls.

        Args:
            detach_posterior: Treat the parameters of log q as constants, so that phi's gradient flows only through z. The
                doubly reparameterised gradient (DReG, Tucker et al. 2019) needs this.
            detach_x: Let x's gradient flow only through p(x | z), not through q(z; x).
        """
        code = self.encode(x.detach() if detach_x else x)

        def log_weights(rows: Tensor) -> Tensor:
            data = in_order(rows) if self.broadcasts else None
            own = take(code, rows, data)
            proposal = self.posterior(own)
            z = proposal.rsample()
            if detach_posterior:
                proposal = self.frozen_posterior(own)
            return self.log_joint(x[rows if data is None else data], proposed(z)) - proposed(proposal.log_prob(z))

        return log_weights

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        """One log-weight for each row: z ~ q(.; x[row]), log p(x, z) - log q(z; x)."""
        return self.bind(x)(rows)

    def sample(self, n: int) -> Tensor:
        """n samples of x from the model."""
        with torch.no_grad():
            return self.likelihood(self.prior().sample((n,))).sample()

    def rsample(self, n: int) -> Tensor:
        """n samples of x by reparameterisation, with a gradient in theta."""
        return self.sample_joint(n)[1]

    def sample_joint(self, n: int) -> tuple[Tensor, Tensor]:
        """n samples of z and of x given z, by reparameterisation if the distributions support it."""
        z = _rsample(self.prior(), (n,))
        return z, _rsample(self.likelihood(z), ())

    def sample_mean(self, n: int) -> Tensor:
        """The means of p(x | z) for n samples of z from the prior, which give smoother pictures than `sample`."""
        with torch.no_grad():
            return _mean(self.likelihood(self.prior().sample((n,))))

    def reconstruct(self, x: Tensor) -> Tensor:
        """The mean of p(x | z) for one z ~ q(z; x) for each datum."""
        with torch.no_grad():
            return _mean(self.likelihood(self.posterior(self.encode(x)).sample()))

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """phi."""
        return self.get_submodule("encoder").parameters()

    def decoder_parameters(self) -> Iterator[nn.Parameter]:
        """theta: every parameter that is not the encoder's."""
        phi = {id(parameter) for parameter in self.encoder_parameters()}
        return (parameter for parameter in self.parameters() if id(parameter) not in phi)


def _rsample(distribution: Distribution, shape: tuple[int, ...]) -> Tensor:
    return distribution.rsample(shape) if distribution.has_rsample else distribution.sample(shape)


def _detach(code: Any) -> Any:
    return tuple(_detach(part) for part in code) if isinstance(code, tuple) else code.detach()


def _mean(distribution: Distribution) -> Tensor:
    """The mean, or a sample if there is no mean: not implemented in torch, or NaN as for a Cauchy."""
    try:
        mean = distribution.mean
    except NotImplementedError:
        return distribution.sample()
    return distribution.sample() if bool(mean.isnan().any()) else mean
