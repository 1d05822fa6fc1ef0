"""Constants for chains, learnt on data with noise of its own, and how many leapfrogs they should have."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dohyo.annealing.chain import Constants
from dohyo.annealing.climbing import climb
from dohyo.diagnostics import khat
from dohyo.errors import DohyoError
from dohyo.evaluation import isolated, most_rows
from dohyo.files import plain as to_plain
from dohyo.packing import rows
from dohyo.verdict import heavy_share

if TYPE_CHECKING:
    from dohyo.annealing.annealed import Annealed

STEPS = (0, 4, 8, 16, 32, 64)  # 1 and 2 leapfrogs gain nothing
SCALES = (1.0, 1.5, 0.5, 0.2, 0.05)  # of the step sizes that learning starts from
PILOT, EVALUATIONS, CHAINS = 64, 1000, 8  # data; evaluations of p(x, z) for each, and chains where constants are compared
FEW = 0.2  # of the data may have heavy weights where the encoder is called good
SEED = 2_000_003  # added to the user's, so that an evaluation with the same seed has other noise


@dataclass(frozen=True)
class Candidate:
    """A number of leapfrogs, as the pilot saw it.

    Attributes:
        steps: T.
        evaluations: Of p(x, z), for one log-weight.
        bound: The mean over the pilot's data of the log-mean of as many weights as `EVALUATIONS` pay for.
        variance: Of that log-mean, in a datum: the smaller the better, as all candidates had the same evaluations.
    """

    steps: int
    evaluations: int
    bound: float
    variance: float


@dataclass(frozen=True)
class Tuned:
    """What `Annealed.tune` found.

    Attributes:
        steps: The number of leapfrogs.
        constants: What the chains now use.
        bound_before, bound: The mean log-weight of the pilot's data with the constants it began with and with those it kept.
        candidates: What the pilot saw of each number of leapfrogs, where `steps` was left to it.
        lost: Chains that met something not finite, exploded or went astray while it learnt.
    """

    steps: int
    constants: Constants
    bound_before: float
    bound: float
    candidates: tuple[Candidate, ...]
    lost: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the constants included."""
        candidates = [vars(candidate) for candidate in self.candidates]
        found = {**vars(self), "constants": self.constants.to_dict(), "candidates": candidates}
        return to_plain(found)  # type: ignore[no-any-return]


def tune(annealed: "Annealed", x: Tensor, steps: int | None, seed: int, max_rows: int | None, *climbing: Any) -> Tuned:
    """`Annealed.tune`; the last arguments are those of `climb`, the iterations first."""
    if x.ndim == 0 or len(x) == 0 or climbing[0] < 0:
        raise DohyoError(
            f"x is {tuple(x.shape)}, iterations {climbing[0]}; tuning needs at least one datum, and 0 or more of these"
        )
    with isolated(annealed, seed + SEED):
        data = x[torch.randperm(len(x)).to(x.device)]
        pilot = _Pilot(annealed, data, seed + SEED, most_rows(x, max_rows), climbing)
        if steps is None:
            return pilot.choose()
        known = annealed.constants
        return pilot.learn(pilot.scaled(steps) if known is None or known.size is None else known)


@dataclass(frozen=True)
class _Pilot:
    """Shuffled data, the first of which are the pilot's, and what is done with them."""

    annealed: "Annealed"
    data: Tensor
    seed: int
    max_rows: int
    climbing: tuple[Any, ...]  # the last arguments of `climb`

    def learn(self, start: Constants) -> Tuned:
        """Constants learnt from `start` on, unless they are worse on the pilot."""
        before = self.bounds(start)
        if start.steps == 0:
            return Tuned(0, start, float(before.mean()), float(before.mean()), (), 0)
        learnt, lost = climb(self.annealed.model, self.data, start, *self.climbing)
        after = self.bounds(learnt)
        gain = float((after - before).clamp(-100, 100).mean())  # no lost chain may decide alone
        constants, bounds = (learnt, after) if gain >= 0 else (start, before)
        return Tuned(start.steps, constants, float(before.mean()), float(bounds.mean()), (), lost)

    def scaled(self, steps: int) -> Constants:
        """The constants to learn from: those with the best length of steps."""
        if steps == 0:
            return Constants.plain(0)
        options = [Constants.plain(steps, scale) for scale in SCALES]
        return max(options, key=lambda option: float(self.bounds(option, other=1).mean()))

    def choose(self) -> Tuned:
        """The number of leapfrogs that is best with constants yet to learn, and what is learnt for it."""
        options = [self.scaled(steps) for steps in STEPS]
        seen = [self.weights(option, EVALUATIONS // (3 * option.steps + 1)) for option in options]
        tried = [Candidate(steps, 3 * steps + 1, *_moments(log_w)) for steps, log_w in zip(STEPS, seen, strict=True)]
        return replace(self.learn(options[preferred(seen)]), candidates=tuple(tried))

    def bounds(self, constants: Constants, other: int = 0) -> Tensor:
        """(pilot,) mean log-weights, with the same noise for all constants of as many steps; `other`: with other noise."""
        torch.manual_seed(self.seed + other)
        return self.weights(constants, CHAINS).mean(-1)

    def weights(self, constants: Constants, n: int) -> Tensor:
        """(pilot, n) log-weights of the first data, with very small numbers for zero, so that means can be compared."""
        x = self.data[:PILOT]
        source = type(self.annealed)(self.annealed.model, constants=constants).bind(x)
        parts = [source(part) for part in rows(torch.full((len(x),), n), x.device).split(self.max_rows)]
        return torch.cat(parts).view(len(x), n).double().clamp(min=-1e30)


def preferred(seen: list[Tensor]) -> int:
    """The best of several kinds of weights (data, n), all of which took the same evaluations, the first being the encoder's.

    To first order the log-mean of n weights has variance v = Var(w) / (n p^2) and lies v / 2 below log p(x). Where the encoder's
    weights are good, v is measured and the least wins. Heavy weights (k-hat above 0.7) hide their variance, but not that of their
    logarithms, s^2: were they log-normal, v would be (exp(s^2) - 1) / n. The least of that wins, with the median of s^2 over the
    data; log-means themselves are too noisy to choose by.
    """
    if heavy_share(khat(seen[0])) <= FEW:
        scores = [_moments(log_w)[1] for log_w in seen]
    else:
        each = ((_spread(log_w), log_w.shape[-1]) for log_w in seen)
        scores = [s + math.log1p(-math.exp(-max(s, 1e-9))) - math.log(n) for s, n in each]  # log v
    return scores.index(min(scores))


def _moments(log_w: Tensor) -> tuple[float, float]:
    """The mean over the data of the log-mean of weights (data, n), and of its variance within a datum, to first order."""
    mean, n = _log_mean(log_w), log_w.shape[-1]
    return float(mean.mean()), float((log_w - mean[:, None]).exp().var(-1).mean() / n)


def _spread(log_w: Tensor) -> float:
    """The variance of log-weights (data, n) within a datum: the median over the data, which few weights make too low."""
    usual = (1 - 2 / (9 * (log_w.shape[-1] - 1))) ** 3  # the median of a sample's variance over its mean (Wilson and Hilferty)
    return float(log_w.var(-1).median()) / usual


def _log_mean(log_w: Tensor) -> Tensor:
    return log_w.logsumexp(-1) - math.log(log_w.shape[-1])
