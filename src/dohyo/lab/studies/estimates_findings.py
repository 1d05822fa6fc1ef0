"""What the cells of the study `estimates` show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from dohyo.lab.folder import Conclusion, Table
from dohyo.lab.studies.study import Cell, Row
from dohyo.lab.studies.verdicts import all_hold, student_quantile

NAMES = {
    "iwae": "IWAE",
    "sumo-harmonic": "SUMO, the paper's law",
    "sumo-geometric": "SUMO, geometric law",
    "sumo-power": "SUMO, power law",
    "symmetric-sumo": "SymmetricSUMO",
    "multilevel-rr": "MultilevelRR",
}
LAWS = ("sumo-harmonic", "sumo-geometric", "sumo-power")
_LATER = ("symmetric-sumo", "multilevel-rr")
_DOUBT = 0.01  # the chance that an unbiased estimator is called biased, over all estimators and costs together


@dataclass(frozen=True)
class Offset:
    """The mean of an estimator's runs at one cost beside the truth; `stderr` is that of the offset."""

    cost: float
    mean: float
    sd: float
    offset: float
    stderr: float
    finite_variance: bool

    @classmethod
    def of(cls, cell: Cell, truth: Cell) -> "Offset":
        mean, sd = fmean(cell["nll"]), stdev(cell["nll"])
        stderr = math.hypot(sd / math.sqrt(len(cell["nll"])), truth["stderr"])
        return cls(cell["expected_cost"], mean, sd, mean - truth["nll"], stderr, cell["finite_variance"])

    @property
    def errors(self) -> float:
        return abs(self.offset) / self.stderr

    def __str__(self) -> str:
        return f"{self.offset:+.2f} ± {1.96 * self.stderr:.2f}"


class Findings:
    """The finished runs beside the truth, and what follows.

    Args:
        cells: The results by name. truth has the NLL with its standard error, and that of IWAE with as many terms as K is deep
            where every K is counted; every-k has SUMO's there; the others are named ESTIMATOR_COST.
        costs: All costs; claims are made of estimators that are done at each.
    """

    def __init__(self, cells: Mapping[str, Cell], costs: Sequence[int]) -> None:
        names = {name: [f"{name}_{cost:03d}" for cost in costs] for name in NAMES}
        own = {name: [cells[cell] for cell in each if cell in cells] for name, each in names.items()}
        self.truth, self.costs, counted = cells["truth"], costs, cells.get("every-k", {})
        self.every_k = {law: [counted[cell] for cell in names[law]] for law in LAWS if counted}
        self.offsets = {name: [Offset.of(cell, self.truth) for cell in each] for name, each in own.items() if each}
        self.whole = {name: each for name, each in self.offsets.items() if len(each) == len(costs)}
        self.middle = len(costs) // 2
        self.runs = min((len(cell["nll"]) for each in own.values() for cell in each), default=2)
        claims = len(costs) * len((*LAWS, *_LATER))
        self.far = student_quantile(1 - _DOUBT / 2 / claims, self.runs - 1)  # in standard errors

    def conclusions(self) -> list[Conclusion]:
        conclusions = []
        if "iwae" in self.whole:
            if self.every_k:
                conclusions.append(self._unbiased_sumo())
            conclusions += [self._in_runs(names) for names in (LAWS, _LATER) if all(name in self.whole for name in names)]
        if all(name in self.whole for name in (*LAWS, *_LATER)):
            conclusions.append(self._spreads())
        return conclusions

    def tables(self, title: str) -> list[Table]:
        columns = ["estimator", "cost", "mean NLL", "from the truth", "standard errors", "sd of a run", "variance"]
        rows: list[Row] = []
        for name, each in self.offsets.items():
            counted = self.every_k.get(name, [None] * len(each))
            for o, k in zip(each, counted, strict=False):
                every_k = None if k is None else f"{k['nll']:.3f} ± {1.96 * k['stderr']:.3f}"
                variance = "finite" if o.finite_variance else "infinite"
                row: Row = [NAMES[name], round(o.cost, 2), round(o.mean, 3), str(o), round(o.errors, 1), round(o.sd, 3)]
                rows.append([*row, variance, every_k])
        truth = self.truth
        heavy = truth["khat"]["share_above_0.7"]
        note = (
            f"The truth is {truth['nll']:.3f} ± {1.96 * truth['stderr']:.3f}, by unbiased multilevel estimates; IWAE with "
            f"{truth['iwae_terms']} terms gives {truth['iwae_nll']:.3f}. ± is half a 95% interval; where the variance is "
            "infinite it is too small, because the deep K are hardly ever drawn. The variance is as given if the weights have "
            f"finite moments; k-hat is above 0.7 for {heavy:.0%} of the images examined, so that every error bar may be too "
            f"small. The last column counts each K up to {truth['iwae_terms']} at its probability."
        )
        return [Table(title, [*columns, "every K counted"], rows, note)]

    def _unbiased_sumo(self) -> Conclusion:
        """With every K up to a depth counted, SUMO has the mean of IWAE with that many terms; IWAE at SUMO's cost has not."""
        iwae, truth = self.whole["iwae"], self.truth
        biased = all(o.errors > self.far and o.offset > 0 for o in iwae)
        away = [
            abs(each["nll"] - truth["iwae_nll"]) / math.hypot(each["stderr"], truth["iwae_stderr"])
            for law in LAWS
            for each in self.every_k[law]
        ]
        far = student_quantile(1 - _DOUBT / 2 / len(away), 1000)
        middle = [self.every_k[law][self.middle] for law in LAWS]
        each = ", ".join(
            f"{e['nll'] - truth['nll']:+.2f} ± {1.96 * math.hypot(e['stderr'], truth['stderr']):.2f} ({NAMES[law]})"
            for law, e in zip(LAWS, middle, strict=True)
        )
        text = (
            f"at cost {self.costs[self.middle]} IWAE's NLL is {iwae[self.middle]} from the truth; with every K up to "
            f"{truth['iwae_terms']} counted at its probability SUMO's is {each}, and IWAE's with that many terms is "
            f"{truth['iwae_nll'] - truth['nll']:+.2f}"
        )
        seen = all(o.offset > far * e["stderr"] for law in LAWS for o, e in zip(iwae, self.every_k[law], strict=True))
        holds = False if max(away) > far else biased if seen else None
        claim = "SUMO is unbiased where IWAE is not, whatever the law of K"
        return Conclusion(claim, "unbiased by construction; a figure compares it with IWAE", text, holds)

    def _in_runs(self, names: Sequence[str]) -> Conclusion:
        """Whether plain runs show the truth; None where their noise would hide IWAE's bias at every cost."""
        verdicts, texts = [], []
        for name in names:
            own, errors = self.whole[name], max(o.errors for o in self.whole[name])
            seen = any(i.offset > self.far * o.stderr for i, o in zip(self.whole["iwae"], own, strict=True))
            verdicts.append(False if errors > self.far else True if seen else None)
            texts.append(f"{NAMES[name]} {own[self.middle]} (over all costs {errors:.1f} standard errors at most)")
        which = "SUMO under each law" if names == LAWS else "SymmetricSUMO and of MultilevelRR"
        text = f"from the truth, at cost {self.costs[self.middle]}: {'; '.join(texts)}"
        return Conclusion(f"The mean of {self.runs} runs of {which} agrees with the truth", "", text, all_hold(verdicts))

    def _spreads(self) -> Conclusion:
        sds = {name: [offset.sd for offset in self.whole[name]] for name in (*LAWS, *_LATER)}
        each = ", ".join(f"{NAMES[name]} {sd[self.middle]:.3f}" for name, sd in sds.items())
        text = f"standard deviation of a run at cost {self.costs[self.middle]}: {each}"
        less = [max(sds[a][i] for a in _LATER) < min(sds[b][i] for b in LAWS) for i in range(len(self.costs))]
        claim = f"In {self.runs} runs SymmetricSUMO and MultilevelRR spread less than SUMO under each law, at every cost"
        return Conclusion(claim, "", text, all(less))
