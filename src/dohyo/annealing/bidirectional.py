"""log p(x) from both sides, on data that the model itself has made."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.annealing.annealed import Annealed
from dohyo.annealing.chain import check_density
from dohyo.contract import Model, require
from dohyo.errors import DohyoError
from dohyo.evaluation import isolated, most_rows
from dohyo.files import plain as to_plain
from dohyo.packing import rows

SEED = 3_000_017  # added to the user's, so that constants tuned with the same seed have seen other data
ERRORS = 3  # standard errors by which the bounds must cross before it is called so


@dataclass(frozen=True)
class Sandwich:
    """What `sandwich` found.

    Attributes:
        lower, upper: The means over the data of a lower and of an upper bound on log p(x), in nats.
        lower_stderr, upper_stderr: Their standard errors, over data and chains.
        gap, gap_stderr: upper less lower, and its standard error from paired differences, which is much smaller.
        crosses: Whether the lower bound is above the upper one by more than three of these.
        verdict: What that means, in a sentence.
        count, chains, steps: Data, chains in each direction for each of them, leapfrogs of a chain.
        cost: Evaluations of p(x, z) in all, a gradient counted as 3.
        lost: Chains that met something not finite, or exploded. The bounds are wider for it, but bounds.
        lower_per_datum, upper_per_datum: (count,) float64.
    """

    lower: float
    lower_stderr: float
    upper: float
    upper_stderr: float
    gap: float
    gap_stderr: float
    crosses: bool
    verdict: str
    count: int
    chains: int
    steps: int
    cost: int
    lost: int
    lower_per_datum: Tensor
    upper_per_datum: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: everything but the tensors, null for what is not finite."""
        found = {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}
        return to_plain(found)  # type: ignore[no-any-return]


def sandwich(
    model: Model, count: int, *, chains: int = 16, seed: int = 0, batch_size: int = 100, max_rows: int | None = None
) -> Sandwich:
    r"""Bounds on log p(x) from both sides, for x simulated from the model: bidirectional Monte Carlo.

    The z that x was drawn from is an exact draw of p(z | x). n chains run forwards have weights w_i with :math:`E[w_i] = p(x)`,
    n chains run backwards from that z have weights w'_j with :math:`E[1 / w'_j] = 1 / p(x)`. So

    .. math:: E\Big[\log \frac1n \sum_i w_i\Big] \;\le\; \log p(x) \;\le\;
              E\Big[-\log \frac1n \sum_j \frac1{w'_j}\Big], \;
              E\Big[\frac1n \sum_j \log \frac1n \Big(w'_j + \sum_{i \ge 2} w_i\Big)\Big].

    The upper bound that is lower on average is given. As n grows the second closes in on log p(x), but an error in the weights
    shifts it together with the lower bound; it is the first, made of chains backwards alone, that finds errors. The gap is how
    far either bound can be from the truth. If they cross, draws and densities of the model do not agree, or a weight is wrong.

    Args:
        model: An `Annealed`, tuned on data like those it makes, or any model that could be annealed, for its encoder's
            weights. It needs `sample_joint(n)`, which returns n rows of z and of x given z.
        count: Data to simulate.
        chains: n; the more, the smaller an error that is found.
        seed: Of data and chains; the random numbers outside are not touched.
        batch_size, max_rows: As for `evaluate`.

    References:
        Grosse, Ghahramani and Adams, Sandwiching the marginal likelihood using bidirectional Monte Carlo (2015),
        https://arxiv.org/abs/1511.02543; Sobolev and Vetrov, Importance weighted hierarchical variational inference (NeurIPS
        2019), for the upper bound from one draw of the posterior among n.

    Example:
        >>> import dohyo
        >>> model = dohyo.models.VAE(data=64, hidden=16, latent=4)
        >>> found = sandwich(dohyo.Annealed(model, steps=8), 50)
        >>> found.crosses, 0 < found.gap < sandwich(model, 50).gap
        (False, True)
    """
    if count < 2 or chains < 1 or batch_size < 1:
        raise DohyoError(
            f"count is {count}, chains {chains}, batch_size {batch_size}; at least 2 data give an error bar, and the others must "
            "be 1 or more"
        )
    annealed = model if isinstance(model, Annealed) else Annealed(model, 0)
    check_density(annealed.model)
    require(annealed.model, "sandwich", "sample_joint")
    lost, bounds = annealed.lost, []
    with isolated(annealed, seed + SEED):
        for size in [batch_size] * (count // batch_size) + [count % batch_size] * (count % batch_size > 0):
            z, x = annealed.model.sample_joint(size)
            bounds.append(_bounds(annealed, x, z, chains, most_rows(x, max_rows)))
    lower, *uppers = (torch.cat(parts) for parts in zip(*bounds, strict=True))
    upper = min(uppers, key=lambda upper: float(upper.mean()))
    cost = 2 * count * chains * annealed.evaluations_per_weight
    return _summary(lower, upper, chains, annealed, cost, annealed.lost - lost)


def _bounds(annealed: Annealed, x: Tensor, z: Tensor, chains: int, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(data,) the lower bound, the upper bound by chains backwards alone, and that by one of them among chains forwards."""
    source, each = annealed.bind(x), rows(torch.full((len(x),), chains), x.device).split(max_rows)
    forwards = torch.cat([source(part) for part in each]).view(len(x), chains).double().cpu()
    backwards = torch.cat([annealed.backwards(x[part], z[part]) for part in each]).view(len(x), chains).double().cpu()
    others = forwards[:, 1:].logsumexp(-1, keepdim=True)  # -inf where there are none
    mixed = torch.logaddexp(backwards, others).mean(-1)
    n = math.log(chains)
    return forwards.logsumexp(-1) - n, n - (-backwards).logsumexp(-1), mixed - n


def _summary(lower: Tensor, upper: Tensor, chains: int, annealed: Annealed, cost: int, lost: int) -> Sandwich:
    gap = upper - lower
    (low, low_error), (high, high_error), (mean, error) = (
        (float(part.mean()), float(part.std() / math.sqrt(len(part)))) for part in (lower, upper, gap)
    )
    crosses = mean < -ERRORS * error
    if crosses:
        verdict = (
            f"the lower bound is {-mean:.3g} nats above the upper one (standard error {error:.2g}): sample_joint and log_joint "
            "are not of one model, or a log-weight is wrong"
        )
    elif not math.isfinite(mean):
        verdict = f"a bound is infinite: {lost} chains were lost, or all weights of a datum are zero; tune the chains"
    else:
        verdict = f"log p(x) of data from this model is known to {mean:.3g} nats: between {low:.2f} and {high:.2f} on average"
    return Sandwich(
        low, low_error, high, high_error, mean, error, crosses, verdict,
        len(gap), chains, annealed.constants.steps if annealed.constants else 0, cost, lost, lower, upper,
    )  # fmt: skip
