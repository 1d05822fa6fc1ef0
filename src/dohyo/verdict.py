"""Whether an error bar can be trusted: one field, one sentence, and the warnings that it is made of."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.estimators import Estimator

HEAVY = 0.7  # k-hat above which importance weights are not to be trusted (Vehtari et al.)
# Some heavy weights are bearable. These bounds were chosen on synthetic weights with known truth (benchmarks/verdict.py and its
# result): where they hold, the mean is beyond three stated errors in a few percent of the cases.
BEARABLE = 0.5  # the share of the data with heavy weights
HOPELESS = 1.5  # k-hat of any datum: above 1 weights have no mean, and k-hat of 200 to 500 weights errs by about a quarter
SHIFT = 2.0  # how far heavy weights may shift the mean, in stated errors
_OPENINGS = {
    True: "the error bar can be trusted",
    False: "do not trust the error bar",
    None: "nothing tells whether the error bar can be trusted",
}


@dataclass(frozen=True)
class Verdict:
    """Whether to trust the error bar of an `Evaluation`.

    Attributes:
        trusted: None where there is no error bar, or where k-hat was not examined.
        reason: One sentence, with all warnings in it; where the error bar is not to be trusted it names what to do.
        warnings: What to know about the numbers; empty if there is nothing. A number with warnings may still be trusted.
    """

    trusted: bool | None
    reason: str
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the warnings, which stand beside it."""
        return {"trusted": self.trusted, "reason": self.reason}


def judge(
    per_datum: Tensor, replicates: int, estimator: Estimator, khat: Tensor, stated: float, annealed: bool | None = False
) -> Verdict:
    """The verdict on estimates, averaged over replicates for each datum.

    Args:
        khat: Pareto k-hat of the weights of some of the data, NaN where there were too few weights.
        stated: The error stated for their mean: that of the noise, or where it is not known, of noise and data; NaN for none.
        annealed: Whether the weights are those of chains; None if they were made elsewhere.
    """
    measured = math.isfinite(stated)
    wrong, open_questions = _estimator_at_fault(per_datum, replicates, estimator, measured), []
    if not measured and not wrong:
        open_questions.append("one datum and one replicate give no error bar: use more data or replicates")
    shapes, heavy, notes, calm = khat[khat.isfinite()], heavy_share(khat), [], ""
    if heavy > 0:
        largest = f"(largest {float(shapes.max()):.2f})"
        found = f"Pareto k-hat is above {HEAVY} for {heavy:.0%} of the {len(shapes)} data examined {largest}"
        if len(shapes) == 1:
            found = f"Pareto k-hat is {float(shapes):.2f}, above {HEAVY}"
        low = shortfall(khat)
        if heavy > BEARABLE or float(shapes.max()) > HOPELESS:
            wrong.append(f"{found}: {_consequence(estimator)}; {_remedy(annealed)}")
        elif low > SHIFT * stated:
            wrong.append(f"{found}, by which the mean may be {low:.2g} nats too low, with a stated error of {stated:.2g}; "
                         f"{_remedy(annealed)}")  # fmt: skip
        else:
            notes.append(f"{found}, too few to spoil the mean")
    elif len(shapes):
        many = len(shapes) > 1
        calm = f"Pareto k-hat is {'at most ' * many}{float(shapes.max()):.2f}{f' in the {len(shapes)} data examined' * many}"
    else:
        calm = "k-hat was not examined, which takes 25 weights of a datum or more"
    trusted = False if wrong else None if open_questions or not len(shapes) else True
    warnings = (*wrong, *open_questions, *notes)
    reason = f"{_OPENINGS[trusted]}: {'; '.join(warnings) or calm}"
    if trusted and estimator.kind == "lower bound":
        reason += "; but this is a lower bound, which log p(x) may exceed"
    return Verdict(trusted, reason, warnings)


def heavy_share(khat: Tensor) -> float:
    """The share of the data whose weights are heavy, among those that were examined; 0 if none were."""
    shapes = khat[khat.isfinite()]
    return float((shapes > HEAVY).double().mean()) if len(shapes) else 0.0


def shortfall(khat: Tensor) -> float:
    """How far, in nats, heavy weights of some data may put the mean over the data below the truth.

    A typical estimate from weights with a k-hat of k is at most about 2 k^4 nats low, for log-normal and Pareto weights and for
    those of too narrow a proposal, whatever the cost (20 to 200 weights). What would make up for it is seen too rarely.
    """
    shapes = khat[khat.isfinite()].double()
    return float(torch.where(shapes > HEAVY, 2 * shapes**4, 0.0).mean()) if len(shapes) else 0.0


def _estimator_at_fault(per_datum: Tensor, replicates: int, estimator: Estimator, measured: bool) -> list[str]:
    """Warnings that are not about the tail of the weights."""
    found, draws = [], len(per_datum) * replicates
    if empty := int((per_datum == -torch.inf).sum()):
        found.append(f"{empty} of {len(per_datum)} estimates are -inf: all weights of some block are zero, so the mean is -inf")
    if estimator.finite_variance is False:
        found.append("this estimator's variance is infinite: use symmetric-sumo or multilevel-rr, or else robust_interval")
    unseen = estimator.unseen_share(draws)
    if estimator.finite_variance and unseen > 0.5 and measured:
        found.append(
            f"about {unseen:.0%} of this estimator's variance comes from depths that {draws} draws hardly reach: the "
            f"standard error is far too small; {_better_than(estimator)}"
        )
    return found


def _better_than(estimator: Estimator) -> str:
    """What to use where an estimator's rare depths carry its variance: never the one that ran."""
    good = ("symmetric-sumo", "multilevel-rr")
    others = " or ".join(name for name in good if name != estimator.name)
    return f"use more replicates, or {others}" if estimator.name in good else f"use {others}"


def _consequence(estimator: Estimator) -> str:
    if estimator.kind == "lower bound":
        return "log p(x) may be far above this bound"
    return "their weights may have no variance, and errors may be far larger than stated"


def _remedy(annealed: bool | None) -> str:
    if annealed is None:
        return "take a better proposal where the weights are made, or anneal them there: more of the same do not help"
    if annealed:
        return "take longer chains, dohyo.Annealed(model, 64) and tune(x) in Python, or dohyo evaluate --anneal 64"
    return "anneal the weights, dohyo.Annealed(model) and tune(x) in Python, or dohyo evaluate --anneal auto, or 16"
