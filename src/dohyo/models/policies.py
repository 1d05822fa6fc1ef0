"""Distributions over {0, 1}^d that can be trained on the rewards of their samples.

Each has `variables` and `sample(n)`. Exact policies have `log_prob(x)`; the latent one has log-weights instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from dohyo.models.latent import LatentVariableModel
from dohyo.models.networks import bernoulli, check_sizes, gaussian, output_bias, standard_normal

# The standard deviation of output weights at the start: the logits of 200 hidden units are then about 0.1, the policy is
# near uniform and its samples explore.
SMALL = 0.01
POSITION = 32  # the size of the input vector that shows a GRU which bit it is at


class Policy(Protocol):
    """What every policy has."""

    variables: int

    def sample(self, n: int) -> Tensor:
        """(n, d) samples, float 0 and 1, without gradient."""
        ...


class LatentPolicy(LatentVariableModel):
    r"""Bits that are independent given a Gaussian z, so all of them are sampled at once.

    .. math:: p(x) = \int N(z; 0, I) \prod_i \mathrm{Bernoulli}(x_i; f_\theta(z)_i)\, dz, \qquad
              q(z; x) = N(\mu_\phi(x), \mathrm{diag}\,\sigma_\phi^2(x))

    One tanh layer on each side. The encoder sees 2x - 1. Both output layers start near zero, so that p(x) is near uniform
    and q near the prior, which is then near the posterior.

    References:
        Luo et al., SUMO (ICLR 2020), with these sizes.

    Example:
        >>> import dohyo
        >>> policy = LatentPolicy(variables=100)
        >>> x = policy.sample(3)
        >>> dohyo.log_marginal(policy, x, dohyo.IWAE(10)).shape
        torch.Size([3])
    """

    name: ClassVar[str] = "latent"

    def __init__(self, variables: int, hidden: int = 200, latent: int = 20) -> None:
        check_sizes(variables=variables, hidden=hidden, latent=latent)
        super().__init__()
        self.variables, self.latent = variables, latent
        self.encoder = _one_layer(variables, hidden, 2 * latent)
        self.decoder = _one_layer(latent, hidden, variables)

    def bind(self, x: Tensor, detach_posterior: bool = False, detach_x: bool = False) -> Callable[[Tensor], Tensor]:
        return super().bind(x.to(output_bias(self.decoder).dtype), detach_posterior, detach_x)

    def sample_joint(self, n: int) -> tuple[Tensor, Tensor]:
        """z and the bits given z. NaN parameters lead to a record with NaN; torch's Bernoulli would raise an error here."""
        z = self.prior().sample((n,))
        odds = self.decoder(z)
        return z, (torch.rand_like(odds) < odds.sigmoid()).to(odds.dtype)

    @torch.no_grad()
    def sample(self, n: int) -> Tensor:
        return self.sample_joint(n)[1]

    def encode(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.encoder(2 * x - 1))

    def posterior(self, code: Tensor) -> Distribution:
        return gaussian(code)

    def prior(self) -> Distribution:
        return standard_normal(self.latent, self.decoder)

    def likelihood(self, z: Tensor) -> Distribution:
        return bernoulli(self.decoder(z))


class ExactPolicy(nn.Module, ABC):
    """A policy that knows its log p(x): a product of Bernoulli probabilities, each given the bits before it."""

    name: ClassVar[str]

    def __init__(self, variables: int) -> None:
        check_sizes(variables=variables)
        super().__init__()
        self.variables = variables

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """(n, d) -> (n, d): the log-odds of each bit given those before it, for all bits at once."""

    @abstractmethod
    def sample(self, n: int) -> Tensor:
        """(n, d) samples, float 0 and 1, without gradient."""

    def log_prob(self, x: Tensor) -> Tensor:
        """(n, d) -> (n,): log p(x)."""
        x = x.to(next(self.parameters()).dtype)
        return logsigmoid((2 * x - 1) * self.logits(x)).sum(-1)


class IndependentPolicy(ExactPolicy):
    r"""Independent bits, uniform at the start.

    .. math:: p(x) = \prod_i \mathrm{Bernoulli}(x_i; \sigma(b_i))

    Example:
        >>> IndependentPolicy(variables=2).log_prob(torch.tensor([[0, 1]])).exp().item()
        0.25
    """

    name: ClassVar[str] = "independent"

    def __init__(self, variables: int) -> None:
        super().__init__(variables)
        self.bias = nn.Parameter(torch.zeros(variables))

    def logits(self, x: Tensor) -> Tensor:
        return self.bias.expand(x.shape)

    @torch.no_grad()
    def sample(self, n: int) -> Tensor:
        return torch.bernoulli(self.bias.sigmoid().expand(n, -1))


class GRUPolicy(ExactPolicy):
    r"""Autoregressive bits from a gated recurrent unit: d steps for a sample, one pass for log p(x).

    .. math:: p(x) = \prod_t \mathrm{Bernoulli}(x_t; \sigma(v_t \cdot h_t + b_t)), \qquad
              h_t = \mathrm{GRU}(h_{t-1}, (e_t, \pm x_{t-1}))

    The previous bit enters as -1 or 1, and as 0 for the first. The bits of an optimisation problem are not alike, so each
    position has a learned input vector e_t and its own output weights v_t; without them a GRU would have to count.

    References:
        Cho et al., Learning phrase representations using RNN encoder-decoder (EMNLP 2014).

    Example:
        >>> policy = GRUPolicy(variables=10, hidden=8)
        >>> policy.log_prob(policy.sample(3)).shape
        torch.Size([3])
    """

    name: ClassVar[str] = "gru"

    def __init__(self, variables: int, hidden: int = 200) -> None:
        check_sizes(hidden=hidden)
        super().__init__(variables)
        self.gru = nn.GRU(1 + POSITION, hidden, batch_first=True)
        self.position = nn.Parameter(torch.randn(variables, POSITION) / POSITION**0.5)
        self.weight = nn.Parameter(SMALL * torch.randn(variables, hidden))
        self.bias = nn.Parameter(torch.zeros(variables))

    def logits(self, x: Tensor) -> Tensor:
        before = torch.cat([x.new_zeros(len(x), 1), 2 * x[:, :-1] - 1], 1)
        inputs = torch.cat([before.unsqueeze(-1), self.position.expand(len(x), -1, -1)], -1)
        hidden, _ = self.gru(inputs)
        return torch.einsum("ndh,dh->nd", hidden, self.weight) + self.bias

    @torch.no_grad()
    def sample(self, n: int) -> Tensor:
        uniform = torch.rand(n, self.variables, dtype=self.bias.dtype, device=self.bias.device)
        hidden = uniform.new_zeros(n, self.gru.hidden_size)
        before = uniform.new_zeros(n, 1)
        x = torch.empty_like(uniform)
        weights = [getattr(self.gru, f"{kind}_l0") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        for t in range(self.variables):
            hidden = torch.gru_cell(torch.cat([before, self.position[t].expand(n, -1)], 1), hidden, *weights)
            x[:, t] = uniform[:, t] < (hidden @ self.weight[t] + self.bias[t]).sigmoid()
            before = 2 * x[:, t : t + 1] - 1
        return x


class NADEPolicy(ExactPolicy):
    r"""Autoregressive bits from the neural autoregressive distribution estimator.

    .. math:: p(x) = \prod_t \mathrm{Bernoulli}(x_t; \sigma(v_t \cdot h_t + b_t)), \qquad
              h_t = \sigma\Big(c + \sum_{s<t} x_s w_s\Big)

    This is NADE, not MADE: the input of h_t is that of h_{t-1} plus one term, so a whole sample costs O(d h), as much as one
    log p(x). It still takes d steps, one after another.

    References:
        Larochelle and Murray, The neural autoregressive distribution estimator (AISTATS 2011).

    Example:
        >>> policy = NADEPolicy(variables=10, hidden=8)
        >>> policy.log_prob(policy.sample(3)).shape
        torch.Size([3])
    """

    name: ClassVar[str] = "nade"
    CHUNK: ClassVar[int] = 2**22  # numbers in one chunk of (n, d, h): sums along d are faster if they fit into the cache

    def __init__(self, variables: int, hidden: int = 200) -> None:
        check_sizes(hidden=hidden)
        super().__init__(variables)
        self.inward = nn.Parameter((2 * torch.rand(variables, hidden) - 1) / variables**0.5)
        self.start = nn.Parameter(torch.zeros(hidden))
        self.weight = nn.Parameter(SMALL * torch.randn(variables, hidden))
        self.bias = nn.Parameter(torch.zeros(variables))

    def logits(self, x: Tensor) -> Tensor:
        rows = max(1, self.CHUNK // self.weight.numel())
        return torch.cat([self._logits(part) for part in x.split(rows)])

    def _logits(self, x: Tensor) -> Tensor:
        start = self.start.expand(len(x), 1, -1)
        terms = x[:, :-1].unsqueeze(-1) * self.inward[:-1]
        hidden = torch.cat([start, terms], 1).cumsum(1).sigmoid()
        return torch.einsum("ndh,dh->nd", hidden, self.weight) + self.bias

    @torch.no_grad()
    def sample(self, n: int) -> Tensor:
        uniform = torch.rand(n, self.variables, dtype=self.bias.dtype, device=self.bias.device)
        x = torch.empty_like(uniform)
        inside = self.start.repeat(n, 1)
        for t in range(self.variables):
            x[:, t] = uniform[:, t] < (inside.sigmoid() @ self.weight[t] + self.bias[t]).sigmoid()
            inside.addr_(x[:, t], self.inward[t])
        return x


POLICIES: dict[str, type[LatentPolicy] | type[ExactPolicy]] = {
    policy.name: policy for policy in (LatentPolicy, IndependentPolicy, GRUPolicy, NADEPolicy)
}


def _one_layer(size_in: int, hidden: int, size_out: int) -> nn.Sequential:
    """One tanh layer and a linear one that starts near zero."""
    network = nn.Sequential(nn.Linear(size_in, hidden), nn.Tanh(), nn.Linear(hidden, size_out))
    *_, weight, bias = network.parameters()
    nn.init.normal_(weight, std=SMALL)
    nn.init.zeros_(bias)
    return network
