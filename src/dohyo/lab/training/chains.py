"""Training through annealed chains: samples of the encoder first, and chains that are tuned as the model changes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dohyo.annealing import Annealed, Constants
from dohyo.annealing.chain import Source
from dohyo.estimators import IWAE
from dohyo.objectives import Encoder, MaximumLikelihood

PILOT = 256  # training data on which chains are tuned
SAMPLES = 5  # of the encoder, at most, before chains, so that epochs are short at first


@dataclass
class Chains:
    """How far a run is with the chains that theta follows in the end."""

    waiting: bool  # whether theta still follows samples of the encoder
    since: int = 0  # epochs before it followed chains
    lost: bool = False  # whether some were lost in the last epoch

    def due(self, epoch: int) -> bool:
        """Whether chains are tuned before this epoch: the more slowly the model changes, the more rarely. On the digits that was
        as good as before every epoch, in two thirds of the time."""
        passed = epoch - self.since
        return not self.waiting and (self.lost or passed & (passed - 1) == 0)  # 0 and the powers of two


def passes(steps: int) -> tuple[int, int]:
    """The passes through the decoder, forward and backward, of a training step for each chain of so many leapfrogs with its fresh
    sample of the encoder, or for each sample alone (0). Those backward by inputs and those by weights count one each."""
    return (steps + 2, steps + 3) if steps else (1, 2)


def by_samples(objective: Any, steps: int) -> MaximumLikelihood:
    """What theta follows before chains of so many leapfrogs: IWAE on a few samples of the encoder, at no more passes.

    Example:
        >>> by_samples(MaximumLikelihood(IWAE(4), "dreg"), 8).estimator
        IWAE(k=5)
    """
    equal = objective.estimator.expected_cost * sum(passes(steps)) / sum(passes(0))
    encoder: Encoder = "iwae" if objective.encoder == "variance" else objective.encoder  # the variance of a bound is no aim
    return MaximumLikelihood(IWAE(min(SAMPLES, int(equal))), encoder)


def in_words(chains: float, steps: int) -> str:
    """
    Example:
        >>> in_words(1.0, 8), in_words(4.5, 8)
        ('1 chain of 8 leapfrogs', '4.5 chains of 8 leapfrogs')
    """
    return f"{chains:.4g} chain{'s' * (chains != 1)} of {steps} leapfrogs"


def has_chains(model: object) -> bool:
    """Whether theta follows chains, at least in the end."""
    return isinstance(model, Annealed) and bool(model.steps)


def phases(models: Any, objective: Any, anneal_from: float) -> list[tuple[Any, Any]]:
    """Models and what their theta follows, one after the other."""
    last = [(models, objective)]
    if anneal_from > 0 and has_chains(models[0]):
        return [([model.model for model in models], by_samples(objective, models[0].steps)), *last]
    return last


def tune_chains(model: Annealed, pilot: Tensor, seed: int, first: bool) -> None:
    """Tune chains again after the model has changed; `first`: from the beginning."""
    if first:
        model.constants = Constants.plain(model.steps or 0)
    model.tune(pilot, iterations=40 if first else 10, seed=seed, mixing=False)  # a step stays as fast as it is
    model.constants = sized(model, pilot)


def sized(model: Annealed, x: Tensor) -> Constants:
    """The constants of chains with a value for each dimension, so that they fit a checkpoint."""
    constants = model.constants or Constants.plain(0)
    return constants.of_size(Source(model.model, x[:1], constants).size)
