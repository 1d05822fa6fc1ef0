"""What the cells of the study `qpbo` show."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean, stdev

from dohyo.lab.experiments.qpbo import PATIENT_STEPS
from dohyo.lab.folder import Conclusion, Table
from dohyo.lab.studies.study import Cell, Row
from dohyo.lab.studies.verdicts import all_hold

NAMES = {"sumo": "latent, SUMO", "iwae": "latent, IWAE", "independent": "independent", "nade": "NADE", "gru": "GRU"}
KINDS = {"plain": "without entropy", "entropy": "with entropy"}
_MANY = 10.0  # times as slow is much slower
_DECENT = 0.9  # of the best policy's reward
_RISING = 0.01  # a best reward that rose by a larger share in the last quarter of the time has not ended its rise
_SLACK = 0.01  # an estimated entropy within this share above the largest possible may be noise


class Findings:
    """The finished runs, and what follows.

    A policy is above another if each of its runs is above each of the other's, and there are two runs of each at least.

    Args:
        cells: The results by name; a name is POLICY_VARIABLES_KIND_REPLICA.
        seconds: How long the policies were trained, by the number of variables.
        patience: For what share of its steps a policy must not have risen to end earlier; None if each took all the time.
    """

    def __init__(self, cells: dict[str, Cell], seconds: Mapping[int, float], patience: float | None = None) -> None:
        self.groups: dict[tuple[str, int, str], list[Cell]] = {}
        for name, cell in cells.items():
            policy, size, kind, _ = name.split("_")
            self.groups.setdefault((policy, int(size), kind), []).append(cell)
        self.sizes, self.patience = sorted({size for _, size, _ in self.groups}), patience
        self.seconds = {size: f"{'' if patience is None else 'at most '}{each:g} s" for size, each in seconds.items()}

    def runs(self, policy: str, size: int, kind: str) -> list[Cell]:
        return self.groups.get((policy, size, kind), [])

    def rewards(self, policy: str, size: int, kind: str) -> list[float]:
        return [run["best_reward"] for run in self.runs(policy, size, kind)]

    def ranking(self, size: int, kind: str) -> str:
        """The policies in the order of their mean best reward, from the highest."""
        found = {policy: self.rewards(policy, size, kind) for policy in NAMES if self.runs(policy, size, kind)}
        order = sorted(found, key=lambda policy: -fmean(found[policy]))
        return ", ".join(f"{NAMES[policy]} {_spread(found[policy])}" for policy in order)

    def conclusions(self) -> list[Conclusion]:
        found = []
        faster = "latent policies explore faster than an autoregressive one"
        expressive = "latent policies are more expressive than an independent one, which ends in a local minimum"
        better = "with entropy IWAE performs like the independent policy, SUMO better"
        for size in self.sizes:
            found += [
                self._above("independent", size, "plain", expressive, ended=True),
                self._above("gru", size, "plain", faster),
                self._above("nade", size, "plain", faster),
                self._decent(size),
                self._entropy_helps(size),
                self._above("iwae", size, "entropy", "SUMO works with entropy, IWAE is unstable", ended=True),
                self._above("independent", size, "entropy", better, ended=True),
                self._slower("gru", size),
                self._slower("nade", size),
                *(self._ended(size, kind) for kind in KINDS),
            ]
        return [one for one in [*found, self._possible("iwae"), self._possible("sumo")] if one is not None]

    def tables(self) -> list[Table]:
        columns = ["variables", "entropy", "policy", "runs", "best reward", "in the last quarter", "mean reward", "ms a step"]
        rows: list[Row] = []
        for size, kind, policy in product(self.sizes, KINDS, NAMES):
            if runs := self.runs(policy, size, kind):
                speed = _spread([1000 * run["seconds_per_step"] for run in runs])
                steps = f"{fmean(run['steps'] for run in runs):.0f}"
                entropy = _spread([run["highest_entropy"] for run in runs if run["highest_entropy"] is not None])
                best, mean = (_spread([run[key] for run in runs]) for key in ("best_reward", "mean_reward"))
                row: Row = [size, KINDS[kind].split()[0], NAMES[policy], len(runs), best, f"{_late_gain(runs):+.1%}", mean, speed]
                rows.append([*row, steps, entropy, round(size * math.log(2), 1)])
        times = ", ".join(f"{self.seconds[size]} with {size}" for size in self.sizes if size in self.seconds)
        same = f"Each policy for the same time ({times} variables), so that the steps it gets depend on the machine."
        if self.patience is not None:
            same = (
                f"Each policy until its best reward had not risen for {self.patience:.0%} of its steps, {PATIENT_STEPS} or more, "
                f"or for {times} variables; one that has ended counts as it ended."
            )
        note = (
            f"{same} ± is the "
            "standard deviation over runs. In the last quarter of the time the best reward still rose by the share given. The "
            "mean reward is that of 1,000 samples of the trained policy; the highest entropy is that of any check, as estimated "
            "in training, and the limit is that of any distribution of so many bits."
        )
        columns += ["steps", "highest entropy", "limit"]
        return [Table("What each policy reached", columns, rows, note)] if rows else []

    def _above(self, rival: str, size: int, kind: str, said: str, ended: bool = False) -> Conclusion | None:
        """Whether SUMO finds better than a rival; if both must have ended their rise, None where the lower one has not."""
        own, other = self.rewards("sumo", size, kind), self.rewards(rival, size, kind)
        if not own or not other:
            return None
        holds = _above(own, other)
        gains = {policy: _late_gain(self.runs(policy, size, kind)) for policy in ("sumo", rival)}
        claim = f"With {size} variables the latent policy with SUMO finds better than the {NAMES[rival]} in the same time"
        if ended:
            claim = f"With {size} variables, {KINDS[kind]}, the latent policy with SUMO ends above '{NAMES[rival]}'"
            holds = None if gains[rival if holds else "sumo"] > _RISING else holds
        both = ", ".join(
            f"{NAMES[policy]} {_spread(self.rewards(policy, size, kind))} ({gain:+.1%} in the last quarter of it)"
            for policy, gain in gains.items()
        )
        text = f"best reward after {self.seconds[size]}, {len(own)} runs of each: {both}"
        return Conclusion(claim, said, text, holds)

    def _decent(self, size: int) -> Conclusion | None:
        own = self.rewards("iwae", size, "plain")
        best = max((fmean(r) for p in NAMES if (r := self.rewards(p, size, "plain"))), default=None)
        if not own or best is None or best <= 0:
            return None
        shares = [reward / best for reward in own]
        claim = f"Without entropy IWAE does decently with {size} variables: {_DECENT:.0%} of the best policy's reward at least"
        text = f"best reward {_spread(own)}, {fmean(shares):.0%} of the best policy's {best:.5g}"
        holds = None if len(own) < 2 else True if min(shares) >= _DECENT else False if max(shares) < _DECENT else None
        return Conclusion(claim, "results in decent performance when no entropy regularization is present", text, holds)

    def _entropy_helps(self, size: int) -> Conclusion | None:
        texts, verdicts = [], []
        for policy, name in NAMES.items():
            without, with_it = (self.rewards(policy, size, kind) for kind in KINDS)
            if without and with_it:
                texts.append(f"{name} {_spread(without)} to {_spread(with_it)}")
                verdicts.append(_above(with_it, without))
        if not verdicts:
            return None
        claim = f"With entropy every policy finds better with {size} variables, in the same time"
        return Conclusion(claim, "all policies improve significantly", f"best reward: {'; '.join(texts)}", all_hold(verdicts))

    def _ended(self, size: int, kind: str) -> Conclusion | None:
        gains = {policy: _late_gain(runs) for policy in NAMES if (runs := self.runs(policy, size, kind))}
        if not gains:
            return None
        claim = f"With {size} variables, {KINDS[kind]}, no policy's best reward rises any more after {self.seconds[size]}"
        each = ", ".join(f"{NAMES[policy]} {gain:+.1%}" for policy, gain in gains.items())
        text = f"its rise in the last quarter of the time, {_RISING:.0%} at most where it has ended: {each}"
        return Conclusion(claim, "", text, max(gains.values()) <= _RISING)

    def _slower(self, policy: str, size: int) -> Conclusion | None:
        own, other = ([run["seconds_per_step"] for run in self.runs(name, size, "plain")] for name in (policy, "sumo"))
        if not own or not other:
            return None
        ratios = [a / b for a, b in zip(own, other, strict=False)]  # seeds of the same turn, under the same load
        claim = f"With {size} variables a training step of the {NAMES[policy]} takes {_MANY:g} times as long as SUMO's, or more"
        text = f"{_spread(ratios)} times as long"
        return Conclusion(claim, "the autoregressive policy is 19.2 times slower", text, _above(ratios, [_MANY] * len(ratios)))

    def _possible(self, policy: str) -> Conclusion | None:
        """Whether estimates of the entropy stay below d log 2, with and without a reward for it."""
        runs = [(size, run) for (name, size, _), one in self.groups.items() if name == policy for run in one]
        excess = [run["highest_entropy"] / (size * math.log(2)) for size, run in runs if run["highest_entropy"] is not None]
        if not excess:
            return None
        beyond = [share > 1 + _SLACK for share in excess]
        each = "; ".join(
            f"{size} variables {KINDS[kind]} {_spread([run['highest_entropy'] for run in one])}, limit {size * math.log(2):.1f}"
            for (name, size, kind), one in self.groups.items()
            if name == policy and all(run["highest_entropy"] is not None for run in one)
        )
        text = f"the highest in nats: {each}; {sum(beyond)} of {len(beyond)} runs above it by more than {_SLACK:.0%}"
        if policy == "iwae":
            claim = "IWAE's estimate of the entropy grows beyond d log 2, which no distribution of d bits has"
            holds = True if all(beyond) else None if any(beyond) else False
            return Conclusion(claim, "IWAE is unstable with entropy", text, holds)
        return Conclusion("SUMO's estimate of the entropy stays below d log 2", "", text, not any(beyond))


def _above(own: Sequence[float], other: Sequence[float]) -> bool | None:
    if min(len(own), len(other)) < 2:
        return None
    return True if min(own) > max(other) else False if max(own) < min(other) else None


def _late_gain(runs: Sequence[Cell]) -> float:
    """By what share the best reward rose in the last quarter of the time, the mean over runs."""
    gains = []
    for run in runs:
        last = run["curve"][-1]
        early = [record["best_reward"] for record in run["curve"] if record["seconds"] <= 0.75 * last["seconds"]]
        gains.append((last["best_reward"] - early[-1]) / abs(last["best_reward"]) if early and last["best_reward"] else 0.0)
    return fmean(gains)


def _spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation over runs where there are several."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.4g}"
    sd = stdev(values)
    return f"{fmean(values):.4g} ± " + (f"{sd:.0f}" if 100 <= sd < 10_000 else f"{sd:.2g}")
