"""A model with better log-weights, made of any model with a density."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dohyo.annealing.chain import Constants, Ends, Source, check_density
from dohyo.annealing.tuning import Tuned, tune
from dohyo.contract import Model, bound, require
from dohyo.errors import DohyoError

ITERATIONS = 400  # of Adam in `tune`
_NAMES = [field.name for field in fields(Constants)]


class Chains(NamedTuple):
    """The ends of chains and their log-weights, one for each row, both detached."""

    z: Tensor
    log_w: Tensor


class Annealed(nn.Module):
    r"""A model made of a model: its log-weights are those of chains that lead from q(z; x) to p(x, z).

    This is uncorrected Hamiltonian annealing. Noise u with density r(u) gives z = T(u) ~ q(z; x), and the model in these
    coordinates is :math:`\tilde p(u) = p(x, T(u))\, |J(u)|`. From u_0 ~ r on, T leapfrogs follow the gradients of
    :math:`\log \pi_t = (1 - \beta_t) \log r + \beta_t \log \tilde p`, with a momentum v that is partly kept:

    .. math:: v'_1 \sim N(0, I), \qquad v'_t = \eta v_{t-1} + \sqrt{1 - \eta^2}\, \xi_t, \quad \xi_t \sim N(0, I)

    .. math:: u_{t-1/2} = u_{t-1} + \tfrac12 h_t M^\top v'_t, \quad v_t = v'_t + M h_t \nabla \log \pi_t(u_{t-1/2}), \quad
              u_t = u_{t-1/2} + \tfrac12 h_t M^\top v_t

    .. math:: w = \frac{\tilde p(u_T)}{r(u_0)} \prod_{t=1}^T \frac{N(v_t; 0, I)}{N(v'_t; 0, I)}, \qquad E[w] = p(x)

    for any constants h (diagonal), M, beta, eta and any widening of r: leapfrogs keep volumes and can be undone, refreshes keep
    N(0, I), and nothing is accepted or refused. One log-weight costs T gradients and one value of log p(x, z), which `evaluate`
    counts as 3 T + 1 evaluations. Where log-weights are differentiated, the gradient in theta (and in x) is that of log p(x, z)
    at the end of the chain, held fixed, because E[w grad log p(x, z)] is the gradient of p(x). The encoder gets none: in training
    it follows fresh samples of its own, see `bind_encoder`.

    A chain that meets a gradient or a density that is not finite has weight zero and, where no gradient is asked for, is counted
    in `lost` (training counts in its record); E[w] is then below p(x), never above. Constants that were never tuned are safe but
    poor: call `tune`.

    Args:
        model: It has `posterior(code)`, a distribution with one batch dimension, for `encode(x)` (for x itself where there is
            no `encode`), and `log_joint(x, z)`, one row for each pair. `LatentVariableModel` has all three.
        steps: T; 0 is the model itself, and None leaves it to `tune`.
        constants: In place of `steps`, those of chains that were tuned before.

    References:
        Geffner and Domke, MCMC variational inference via uncorrected Hamiltonian annealing (NeurIPS 2021); Zhang et al.,
        Differentiable annealed importance sampling and the perils of gradient noise (NeurIPS 2021); Thin et al., Monte Carlo
        variational auto-encoders (ICML 2021).

    Example:
        >>> import dohyo
        >>> model, x = dohyo.models.VAE(data=64, hidden=16, latent=4), torch.rand(5, 64).round()
        >>> annealed = Annealed(model, steps=4)
        >>> dohyo.evaluate(annealed, x, dohyo.MultilevelRR(2), khat_samples=0).cost % 13
        0
    """

    def __init__(self, model: Model, steps: int | None = None, constants: Constants | None = None) -> None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 0):
            raise DohyoError(f"steps is {steps!r}; it must be a whole number of leapfrogs, 0 for the model itself, or None")
        if constants is not None and steps not in (None, constants.steps):
            raise DohyoError(f"steps is {steps}, but the constants are of {constants.steps} leapfrogs; leave steps out")
        super().__init__()
        self.model: Any = model
        for name in _NAMES:
            self.register_buffer(name, None)
        self.constants = Constants.plain(steps) if constants is None and steps is not None else constants
        self._choose = self.constants is None
        self._lost: Tensor | int = 0
        if self.steps != 0:
            check_density(model)

    @property
    def constants(self) -> Constants | None:
        """Those of the chains, buffers where the parameters are; None before `tune` has chosen the number of steps."""
        return None if self.step is None else Constants(*(getattr(self, name) for name in _NAMES))

    @constants.setter
    def constants(self, constants: Constants | None) -> None:
        device = next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        like = torch.empty((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        for name in _NAMES if constants is not None else ():
            value = getattr(constants, name)
            setattr(self, name, None if value is None else value.detach().to(like, copy=True))

    @property
    def steps(self) -> int | None:
        """T, or None before `tune` has chosen it."""
        return None if self.constants is None else self.constants.steps

    @property
    def evaluations_per_weight(self) -> int:
        """Evaluations of p(x, z) for one log-weight, a gradient counted as 3."""
        return 3 * self._chosen.steps + 1

    @property
    def lost(self) -> int:
        """How many chains met something that is not finite, or exploded, and so got weight zero."""
        return int(self._lost)

    def bind(self, x: Tensor, **options: bool) -> Callable[[Tensor], Tensor]:
        """rows -> log-weights of x[rows], encoding x once for any number of calls; options are the model's, for no steps."""
        if self._chosen.steps == 0:
            return bound(self.model, x, **options)
        if options:
            raise DohyoError(f"chains know no {' or '.join(options)}; give the model without Annealed here")
        source = Source(self.model, x, self._chosen)

        def log_weights(rows: Tensor) -> Tensor:
            with torch.no_grad():
                ends = source(rows).forwards()
            return self.weighed(ends, x[rows])

        return log_weights

    def bind_encoder(self, x: Tensor, **options: bool) -> Callable[[Tensor], Tensor]:
        """rows -> log-weights of the encoder's own samples for x[rows], with theta constant: what phi is trained by.
        The options are those of the model's own `bind`."""
        require(self.model, "training through chains", "encoder_parameters", "decoder_parameters")
        theta = {id(parameter) for parameter in self.decoder_parameters()}
        encoder = _Encoder(self.model)
        constant = {name: own.detach() for name, own in encoder.named_parameters() if id(own) in theta}
        return lambda rows: functional_call(encoder, constant, (x, rows, options))

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        """One log-weight for each row."""
        return self.bind(x)(rows)

    @torch.no_grad()
    def chains(self, x: Tensor, rows: Tensor) -> Chains:
        """The end of one chain for each row and its log-weight, to be used as draws of z and their weights."""
        ends = Source(self.model, x, self._chosen)(rows).forwards()
        return Chains(ends.z, self.weighed(ends, x[rows]))

    @torch.no_grad()
    def backwards(self, x: Tensor, z: Tensor) -> Tensor:
        """The log-weight of one chain for each datum, run from z ~ p(z | x) back to q; +inf where it was lost."""
        ends = Source(self.model, x, self._chosen)(torch.arange(len(x), device=x.device)).backwards(z)
        log_w = ends.log_ratio + self.model.log_joint(x, z)
        return torch.where(self._count(~ends.alive | ~log_w.isfinite()), torch.inf, log_w)

    def tune(
        self,
        x: Tensor,
        *,
        iterations: int = ITERATIONS,
        seed: int = 0,
        max_rows: int | None = None,
        mixing: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> Tuned:
        """Learn the constants on x, then freeze them; where no number of steps was given, choose that too.

        Adam climbs the mean log-weight through the chains. The data to be evaluated are the best to tune on, and
        doing so leaves the evaluation unbiased: E[w] = p(x) for any constants that do not depend on the noise in w, and the
        noise here has a seed of its own. Tuned again, chains start from the constants they have.

        Args:
            x: Data, of which minibatches are drawn; the more like those to be evaluated the better.
            iterations: Of Adam. The more the better, slowly; 100 do most where the steps were of a wrong length.
            seed: Of noise and minibatches. Random numbers outside are not touched; `evaluate` with the same seed draws others.
            max_rows: As for `evaluate`.
            mixing: Learn the matrix M too, where z has at most 256 dimensions.
            progress: Called after each iteration with the number done.
        """
        tuned = tune(self, x, None if self._choose else self.steps, seed, max_rows, iterations, mixing, progress)
        self.constants = tuned.constants
        return tuned

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        """Constants are taken as they are saved, of any number of leapfrogs, because `tune` may have chosen it."""
        saved: dict[str, Any] = {name: state_dict.get(prefix + name) for name in _NAMES}
        if all(value is not None for name, value in saved.items() if name != "mixing"):
            constants = Constants(**saved)
            constants.check()
            self.constants, self._choose = constants, False
        super()._load_from_state_dict(state_dict, prefix, *more)

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """phi."""
        require(self.model, "training through chains", "encoder_parameters", "decoder_parameters")
        return self.model.encoder_parameters()  # type: ignore[no-any-return]

    def decoder_parameters(self) -> Iterator[nn.Parameter]:
        """theta: every parameter, where the model does not tell."""
        return getattr(self.model, "decoder_parameters", self.parameters)()

    def to_dict(self) -> dict[str, Any]:
        """The constants as plain data for JSON."""
        return self._chosen.to_dict()

    @classmethod
    def from_dict(cls, model: Model, plain: Mapping[str, Any]) -> Self:
        """The model annealed by constants that `to_dict` gave."""
        return cls(model, constants=Constants.from_dict(plain))

    @property
    def _chosen(self) -> Constants:
        if self.constants is None:
            raise DohyoError("the number of steps is not known yet; call tune(x), which chooses it, or give steps=16, say")
        return self.constants

    def weighed(self, ends: Ends, x: Tensor) -> Tensor:
        """log w of chains; the only part of it that gradients may pass through is log p(x, z) with z fixed."""
        log_w = ends.log_ratio + self.model.log_joint(x, ends.z)
        lost = self._count(~ends.alive | log_w.isnan() | (log_w == torch.inf))
        return torch.where(lost, -torch.inf, log_w)

    def _count(self, lost: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self._lost = lost.sum() + self._lost
        return lost


class _Encoder(nn.Module):
    """A model as a function of x and rows, so that some of its parameters can be replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, rows: Tensor, options: dict[str, bool]) -> Tensor:
        return bound(self.model, x, **options)(rows)  # type: ignore[arg-type]
