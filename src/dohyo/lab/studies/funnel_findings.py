"""What the cells of the study `funnel` show."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, stdev

from dohyo.lab.folder import Conclusion, Table
from dohyo.lab.studies.study import Cell, Row
from dohyo.lab.studies.verdicts import all_hold, student_quantile

NAMES = {
    "elbo": "ELBO",
    "iwae": "IWAE",
    "minimax-iwae": "minimax IWAE",
    "sumo": "SUMO",
    "symmetric-sumo": "SymmetricSUMO",
    "multilevel-rr": "MultilevelRR",
}
_FALLS = 0.5  # a run that ends below this share of the true reverse KL at its first check has optimised it
_BIAS = 0.1  # nats: an estimate this far below the truth, and four standard errors more, has left it
_IMPOSSIBLE = -1.0  # nats: an estimate below this by four standard errors is that of no KL
_DOUBT = 0.01  # the chance that an honest estimate is called dishonest, over all runs together
_UNSURE = 1.0  # nats: with a larger standard error a training estimate says nothing


class Findings:
    """The finished runs by estimator and cost, from cells named ESTIMATOR_COST_REPLICA, and what follows."""

    def __init__(self, cells: dict[str, Cell]) -> None:
        self.groups: dict[tuple[str, int], list[Cell]] = {}
        for name, cell in cells.items():
            estimator, cost, _ = name.split("_")
            self.groups.setdefault((estimator, int(cost)), []).append(cell)
        order = list(NAMES)
        self.groups = dict(sorted(self.groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))

    def at(self, estimator: str) -> dict[int, list[Cell]]:
        """The runs of an estimator by cost, from the lowest."""
        return {cost: runs for (name, cost), runs in self.groups.items() if name == estimator}

    def diverged(self) -> str:
        """Which runs diverged, and how many out of how many."""
        counts = {key: sum(run["diverged"] for run in runs) for key, runs in self.groups.items()}
        return ", ".join(f"{NAMES[n]} {c} ({count} of {len(self.groups[n, c])})" for (n, c), count in counts.items() if count)

    def conclusions(self) -> list[Conclusion]:
        iwae, minimax, sumo = self.at("iwae"), self.at("minimax-iwae"), self.at("sumo")
        later = {name: self.at(name) for name in ("symmetric-sumo", "multilevel-rr") if self.at(name)}
        conclusions = []
        if iwae:
            conclusions.append(self._impossible(iwae))
        if shared := [cost for cost in iwae if cost in sumo]:
            conclusions.append(self._same_cost(iwae, sumo, shared))
        if sumo:
            conclusions += [self._least_cost(sumo), self._honest(sumo)]
        if len(sumo) > 1:
            conclusions.append(self._less_variance(sumo))
        if minimax:
            conclusions += self._minimax(minimax, sumo)
        if later:
            conclusions.append(self._later(later))
        return conclusions

    def tables(self) -> list[Table]:
        columns = ["estimator", "cost", "expected cost", "runs", "true reverse KL", "training estimate", "its standard error"]
        rows: list[Row] = []
        for (name, cost), runs in self.groups.items():
            errors = [run["training_estimate_stderr"] for run in runs]
            numbers = [_kl(runs), _spread([run["training_estimate"] for run in runs]), _spread(errors)]
            steps = " and ".join(str(n) for n in sorted({run["steps"] for run in runs}))
            diverged = f"{sum(run['diverged'] for run in runs)} of {len(runs)}"
            rows.append([NAMES[name], cost, round(runs[0]["expected_cost"], 2), len(runs), *numbers, diverged, steps])
        note = (
            "In nats; ± is the standard deviation over runs, or where there is one run the standard error. The training estimate "
            "is the mean over the steps since the last check but one, the true reverse KL that of the model at the end, by ways "
            "that do not trust the encoder; where a run has diverged it is no more than an order of magnitude. A run stops when "
            "two checks in a row find it diverged."
        )
        return [Table("Reverse KL on the funnel", [*columns, "diverged", "steps"], rows, note)] if rows else []

    def _impossible(self, iwae: dict[int, list[Cell]]) -> Conclusion:
        each = "; ".join(f"cost {cost}: {_spread([run['training_estimate'] for run in runs])}" for cost, runs in iwae.items())
        runs = [run for one in iwae.values() for run in one]
        below = [run["training_estimate"] + 4 * run["training_estimate_stderr"] < _IMPOSSIBLE for run in runs]
        text = f"training estimate at {each}; {sum(run['diverged'] for run in runs)} of {len(runs)} runs diverged"
        claim = "Minimising IWAE drives its estimate of the reverse KL far below zero, where no KL can be"
        lost = all(low or run["diverged"] for low, run in zip(below, runs, strict=True))  # perhaps with a standard error as large
        return Conclusion(claim, "estimates of -∞ unless k is very large", text, True if all(below) else None if lost else False)

    def _same_cost(self, iwae: dict[int, list[Cell]], sumo: dict[int, list[Cell]], shared: Sequence[int]) -> Conclusion:
        each = "; ".join(f"cost {cost}: IWAE {_kl(iwae[cost])}, SUMO {_kl(sumo[cost])}" for cost in shared)
        found = [_optimised(run) for cost in shared for run in iwae[cost]]
        fail = [None if holds is None else not holds for holds in found]
        holds = all_hold([*fail, *(_optimised(run) for cost in shared for run in sumo[cost])])
        claim = "For the same expected cost SUMO optimises the true objective, and IWAE does not"
        text = f"true reverse KL at the end, at {each}"
        return Conclusion(claim, "SUMO can optimize the true objective but IWAE cannot", text, holds)

    def _least_cost(self, sumo: dict[int, list[Cell]]) -> Conclusion:
        cost = min(sumo)
        text = f"true reverse KL at cost {cost}: {_from_first(sumo[cost])} (runs: {len(sumo[cost])})"
        claim = "SUMO optimises the reverse KL even at a small expected cost"
        paper = "optimizes correctly even with a small expected cost"
        return Conclusion(claim, paper, text, all_hold(map(_optimised, sumo[cost])))

    def _honest(self, sumo: dict[int, list[Cell]]) -> Conclusion:
        runs = [run for one in sumo.values() for run in one]
        away = [abs(_off(run)) / _error(run) for run in runs]
        limit = student_quantile(1 - _DOUBT / 2 / len(runs), 1000)
        each = "; ".join(
            f"cost {cost}: {fmean(map(_off, one)):+.3f} ± {1.96 * math.hypot(*map(_error, one)) / len(one):.3f}"
            for cost, one in sumo.items()
        )
        text = f"estimate less truth, mean over runs, at {each}; no run is off by more than {max(away):.1f} standard errors"
        holds = False if max(away) > limit else None if max(map(_error, runs)) > _UNSURE else True
        claim = "SUMO's training estimate agrees with the true reverse KL"
        return Conclusion(claim, "SUMO's estimates are unbiased", text, holds)

    def _less_variance(self, sumo: dict[int, list[Cell]]) -> Conclusion:
        """By the median over the later checks, since a rare K may inflate any one of them."""
        later = {cost: [run["curve"][len(run["curve"]) // 2 :] for run in runs] for cost, runs in sumo.items()}
        errors = {cost: [median(r["estimate_stderr"] for r in records) for records in each] for cost, each in later.items()}
        each = ", ".join(f"{_spread(values)} at cost {cost}" for cost, values in errors.items())
        ordered = list(errors.values())
        separate = all(max(more) < min(less) for less, more in pairwise(ordered))
        falls = all(fmean(more) < fmean(less) for less, more in pairwise(ordered))
        text = f"standard error of the training estimate, the median of the later half of the checks: {each}"
        claim = "A higher expected cost lowers the variance of SUMO"
        holds = True if separate else None if falls else False
        return Conclusion(claim, "increasing the expected cost reduces variance", text, holds)

    def _minimax(self, minimax: dict[int, list[Cell]], sumo: dict[int, list[Cell]]) -> list[Conclusion]:
        most = max(minimax)
        claim = "IWAE trained as a minimax, its encoder climbing, works if k is large enough"
        text = f"true reverse KL at cost {most}: {_from_first(minimax[most])}; {_estimates(minimax[most])}"
        holds = all_hold(map(_optimised, minimax[most]))
        conclusions = [Conclusion(claim, "IWAE can work if k is sufficiently large", text, holds)]
        if shared := [cost for cost in minimax if cost in sumo]:
            cost = min(shared)
            at = f"at cost {cost}"
            claim = f"Minimax IWAE needs more compute than SUMO: {at} its estimate leaves the truth, and SUMO's does not"
            both = [f"{_kl(runs[cost])}, {_estimates(runs[cost])}" for runs in (minimax, sumo)]
            text = f"{at}: minimax IWAE's true reverse KL {both[0]}; SUMO's {both[1]}"
            left = [*map(_left, minimax[cost]), *(not _left(run) for run in sumo[cost])]
            holds = True if all(left) else None if any(map(_left, minimax[cost])) else False
            conclusions.append(Conclusion(claim, "this requires much more compute", text, holds))
        return conclusions

    def _later(self, later: dict[str, dict[int, list[Cell]]]) -> Conclusion:
        each = "; ".join(
            f"{NAMES[n]} at cost {cost} {_from_first(runs)}" for n, one in later.items() for cost, runs in one.items()
        )
        runs = [run for one in later.values() for each_cost in one.values() for run in each_cost]
        claim = f"{' and '.join(NAMES[n] for n in later)} optimise{'s' if len(later) == 1 else ''} the reverse KL as well"
        return Conclusion(claim, "", f"true reverse KL: {each}", all_hold(map(_optimised, runs)))


def _optimised(run: Cell) -> bool | None:
    """Whether the true reverse KL has fallen; None if it has neither fallen by much nor diverged: more steps might lower it."""
    if run["diverged"]:
        return False
    return True if run["reverse_kl"] + 2 * run["reverse_kl_stderr"] < _FALLS * run["curve"][0]["reverse_kl"] else None


def _left(run: Cell) -> bool:
    """Whether the training estimate has left the truth downwards."""
    return bool(run["diverged"] or -_off(run) > _BIAS + 4 * _error(run))


def _off(run: Cell) -> float:
    return float(run["training_estimate"] - run["reverse_kl"])


def _error(run: Cell) -> float:
    return math.hypot(run["training_estimate_stderr"], run["reverse_kl_stderr"])


def _kl(runs: Sequence[Cell]) -> str:
    if len(runs) == 1:
        return f"{runs[0]['reverse_kl']:.2g} ± {runs[0]['reverse_kl_stderr']:.1g}"
    return _spread([run["reverse_kl"] for run in runs])


def _from_first(runs: Sequence[Cell]) -> str:
    return f"{_spread([run['curve'][0]['reverse_kl'] for run in runs])} at the first check, {_kl(runs)} at the end"


def _estimates(runs: Sequence[Cell]) -> str:
    lost = sum(run["diverged"] for run in runs)
    each = " and ".join(f"{run['training_estimate']:.2g} ± {run['training_estimate_stderr']:.1g}" for run in runs)
    return f"training estimate {each}" + (f", {lost} of {len(runs)} diverged" if lost else "")


def _spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation over runs where there are several."""
    return f"{fmean(values):.2g}" + (f" ± {stdev(values):.1g}" if len(values) > 1 else "")
