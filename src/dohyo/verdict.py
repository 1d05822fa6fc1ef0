"""Whether an error bar can be trusted: one field, one sentence, and the warnings that it is made of."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dohyo.estimators import Estimator

HEAVY = 0.7  # k-hat above which importance weights are not to be trusted (Vehtari et al.)
# The share of the data that may have heavy weights: a judgement. With synthetic weights, means by MultilevelRR were within 1.3
# stated standard errors of the truth up to here, and up to 2.9 off where nearly all are heavy; results/annealing.json has those
# of a trained VAE.
BEARABLE = 0.5
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
    values: Tensor, estimator: Estimator, khat: Tensor, annealed: bool | None = False, measured: bool | None = None
) -> Verdict:
    """The verdict on estimates (data, replicates).

    Args:
        khat: Pareto k-hat of the weights of some of the data, NaN where there were too few weights.
        annealed: Whether the weights are those of chains; None if they were made elsewhere.
        measured: Whether there is an error bar; by default if there are two values or more.
    """
    measured = values.numel() > 1 if measured is None else measured
    wrong, open_questions = _estimator_at_fault(values, estimator, measured), []
    if not measured and not wrong:
        open_questions.append("one datum and one replicate give no error bar: use more data or replicates")
    shapes, heavy, notes, calm = khat[khat.isfinite()], heavy_share(khat), [], ""
    if heavy > 0:
        largest = f"(largest {float(shapes.max()):.2f})"
        found = f"Pareto k-hat is above {HEAVY} for {heavy:.0%} of the {len(shapes)} data examined {largest}"
        if len(shapes) == 1:
            found = f"Pareto k-hat is {float(shapes):.2f}, above {HEAVY}"
        if heavy > BEARABLE:
            wrong.append(f"{found}: {_consequence(estimator)}; {_remedy(annealed)}")
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


def _estimator_at_fault(values: Tensor, estimator: Estimator, measured: bool) -> list[str]:
    """Warnings that are not about the tail of the weights."""
    found = []
    if empty := int((values.mean(-1) == -torch.inf).sum()):
        found.append(f"{empty} of {len(values)} estimates are -inf: all weights of some block are zero, so the mean is -inf")
    if estimator.finite_variance is False:
        found.append("this estimator's variance is infinite: use symmetric-sumo or multilevel-rr, or else robust_interval")
    unseen = estimator.unseen_share(values.numel())
    if estimator.finite_variance and unseen > 0.5 and measured:
        found.append(
            f"about {unseen:.0%} of this estimator's variance comes from depths that {values.numel()} draws hardly reach: the "
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
    return "anneal the weights, dohyo.Annealed(model) and tune(x) in Python, or dohyo evaluate --anneal auto"
