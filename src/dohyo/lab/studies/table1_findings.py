"""What the cells of the study `table1` show."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, stdev

from dohyo.lab.folder import Conclusion, Table
from dohyo.lab.studies.runs import SHARED_K
from dohyo.lab.studies.study import Cell, Row
from dohyo.lab.studies.table1_rows import COSTS, PUBLISHED, ROWS, SOURCES
from dohyo.lab.studies.verdicts import Contrast, all_below, all_hold, is_close, listed, pooled, pooled_text

DATA = {"digits": "digits", "mnist": "MNIST", "mnist-static": "MNIST, binarised once", "omniglot": "OMNIGLOT"}
_DOUBT = 0.05  # the level of the paper's t-test
_CLOSE = 0.3  # nats: a mean within this of the published one, interval and all, agrees with it
_WHOLE = 2000  # epochs: a run must be trained this long, or to its early stop, to be compared with the paper's
_PAPER = {  # the paper's NLL by row, and there by data and cost
    published.row: {(data, cost): nll for data in DATA for cost, (nll, _) in published.at(data).items()}
    for published in PUBLISHED
    if published.in_paper
}


class Entry:
    """A finished cell."""

    def __init__(self, options: Cell, result: Cell) -> None:
        self.data, self.cost, self.row = str(options["data"]), int(options["cost"]), str(options["estimator"])
        self.nll, self.epochs, self.result = [float(nll) for nll in result["test_nll"]], list(result["epochs"]), result
        self.whole = all(epochs >= _WHOLE or epochs < options["epochs"] for epochs in self.epochs)

    @property
    def mean(self) -> float:
        return fmean(self.nll)

    @property
    def where(self) -> str:
        return f"{DATA[self.data]} at {self.cost}"


class Findings:
    """The finished cells, beside what others report, and what follows."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self.groups: dict[tuple[str, int], dict[str, Entry]] = {}
        for entry in entries:
            self.groups.setdefault((entry.data, entry.cost), {})[entry.row] = entry
        self.best = {place: min(group.values(), key=lambda entry: entry.mean) for place, group in self.groups.items()}

    def _short(self, sets: Iterable[str]) -> str:
        """The beginning of a finding: how long the runs on these sets were, unless they ended by themselves."""
        used = [entry for data in dict.fromkeys(sets) for entry in self.entries if entry.data == data and not entry.whole]
        lengths = {DATA[entry.data]: max(entry.epochs) for entry in used}
        return f"in short runs (epochs: {', '.join(f'{data} {n}' for data, n in lengths.items())}): " if lengths else ""

    def against_best(self, entry: Entry) -> Contrast:
        """The distance to the best of the same data and cost; like the paper's, Welch's test of it is unpaired."""
        return Contrast.of((1, entry.nll), (-1, self.best[entry.data, entry.cost].nll))

    def conclusions(self, published: bool = True) -> list[Conclusion]:
        """What the numbers say; `published` if they are by the yardstick of what is published, IWAE with 5000 terms."""
        gaps = [_PAPER["iwae"][place] - nll for place, nll in _PAPER["sumo-variance"].items()]
        paper = f"lower in all {len(gaps)} cases, by {min(gaps):.2f} to {max(gaps):.2f}"
        return [
            *self._lower("SUMO's models have a lower test NLL than IWAE's at the same cost", ["sumo-variance"], "iwae", paper),
            *self._lower("SUMO's models have a lower test NLL than IWAE's if both encoders follow DReG", ["sumo"], "iwae-dreg"),
            *self._lower("A DReG encoder gives IWAE models with a lower test NLL", ["iwae-dreg"], "iwae"),
            *self._more_terms(),
            *self._more_than_elbo(),
            *self._lower("Later unbiased estimators have a lower NLL than SUMO", ["symmetric-sumo", "multilevel-rr"], "sumo"),
            *self._lower("Our recipe gives IWAE a lower test NLL than the paper's", ["iwae-ours"], "iwae-dreg"),
            *self._lower("By our recipe SUMO's models have a lower test NLL than IWAE's", ["sumo-ours"], "iwae-ours"),
            *self._lower(
                "Chains in the last quarter, at rates of their own, give a lower test NLL than IWAE by our recipe",
                ["chains"],
                "iwae-ours",
            ),
            *self._lower(
                "Chains from a quarter of the epochs on give a lower test NLL than IWAE, both by our recipe",
                ["chains-early"],
                "iwae-ours",
            ),
            *self._lower(
                "MultilevelRR over chains, which is unbiased, gives a lower test NLL than IWAE over chains",
                ["chains-unbiased"],
                "chains-early",
            ),
            *([*self._as_published(), *self._best_published()] if published else []),
        ]

    def _lower(self, claim: str, rows: Sequence[str], than: str, paper: str = "") -> list[Conclusion]:
        """Whether these rows are below another one wherever both are finished."""
        pairs = [(group[row], group[than]) for row in rows for group in self.groups.values() if row in group and than in group]
        found = {
            (f"{ROWS[one.row].label}, " if len(rows) > 1 else "") + f"{one.where}:": Contrast.of((1, one.nll), (-1, other.nll))
            for one, other in pairs
        }
        short = self._short(one.data for one, _ in pairs)
        text = f"{short}difference in nats from {ROWS[than].label} (negative is better): {listed(found)}"
        if len(pairs) > 1:
            means = [contrast.mean for contrast in found.values()]
            interval = " (Student's t over them)" if pooled(means) else ""
            text += f"; their mean {pooled_text(means)}{interval}"
        return _below(claim, paper, text, found)

    def _ends(self, row: str) -> dict[str, tuple[Entry, Entry]]:
        """The entries of a row at the least and at the largest cost, by data."""
        found: dict[str, list[Entry]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.cost):
            if entry.row == row:
                found.setdefault(entry.data, []).append(entry)
        return {data: (own[0], own[-1]) for data, own in found.items() if len(own) > 1}

    def _more_terms(self) -> list[Conclusion]:
        ends = {row: self._ends(row) for row in ("iwae", "sumo-variance", "sumo")}
        found = {
            f"{ROWS[row].label} on {DATA[data]}, {few.cost} to {many.cost}:": Contrast.of((1, many.nll), (-1, few.nll))
            for row, by_data in ends.items()
            for data, (few, many) in by_data.items()
        }
        text = self._short(data for by_data in ends.values() for data in by_data) + listed(found)
        return _below("More terms give better models, by IWAE and by SUMO", _paper_gains("iwae", "sumo-variance"), text, found)

    def _more_than_elbo(self) -> list[Conclusion]:
        elbo, iwae = self._ends("elbo"), self._ends("iwae")
        both = {data: (*iwae[data], *elbo[data]) for data in iwae if data in elbo}
        found = {
            f"{DATA[data]}:": Contrast.of((1, many.nll), (-1, few.nll), (-1, elbo_many.nll), (1, elbo_few.nll))
            for data, (few, many, elbo_few, elbo_many) in both.items()
        }
        beyond = "what IWAE gains from more terms beyond what the ELBO gains (negative is more)"
        text = f"{self._short(both)}{beyond}: {listed(found)}"
        return _below("More terms help IWAE more than the ELBO", _paper_gains("iwae", "elbo"), text, found)

    def _as_published(self) -> list[Conclusion]:
        texts, verdicts = [], []
        pairs = [(e, at[e.data, e.cost]) for e in self.entries if (e.data, e.cost) in (at := _PAPER.get(e.row, {}))]
        for entry, value in pairs:
            own = Contrast.of((1, entry.nll))
            half = own.half(len(pairs))
            verdicts.append(is_close(own.mean - value, half, _CLOSE) if entry.whole else None)
            texts.append(f"{ROWS[entry.row].label} {entry.where}: {own.mean:.2f} ± {half:.2f} (epochs: {max(entry.epochs)}), "
                         f"the paper's is {value:.2f}")  # fmt: skip
        claim, paper = f"Our test NLL are the paper's, to {_CLOSE} nats", "trained until 300 epochs bring no gain"
        return [Conclusion(claim, paper, "; ".join(texts), all_hold(verdicts))] if pairs else []

    def _best_published(self) -> list[Conclusion]:
        """Our best model against the best that is published, at each place where we have trained as long as the paper."""
        found = {}
        for (data, cost), best in self.best.items():
            known = {f"{p.objective}, {p.source}": p.at(data)[cost][0] for p in PUBLISHED if cost in p.at(data)}
            if known and best.whole:
                least = min(known, key=known.__getitem__)
                contrast = Contrast.of((1, [nll - known[least] for nll in best.nll]))
                found[f"{best.where}, {ROWS[best.row].label} less {known[least]:.2f} ({least}):"] = contrast
        return _below("Our best models have a lower test NLL than the best published", "", listed(found), found)

    def ordered_as(self, other: "Findings") -> Conclusion | None:
        """Whether two yardsticks, this and the other, put the same models in the same order."""
        texts, verdicts = [], []
        for place, group in self.groups.items():
            theirs = other.groups.get(place, {})
            rows = sorted((row for row in group if row in theirs), key=lambda row: group[row].mean)
            if len(rows) < 2:
                continue
            again = sorted(rows, key=lambda row: theirs[row].mean)
            names = [" < ".join(ROWS[row].label for row in order) for order in (rows, again)]
            texts.append(f"{group[rows[0]].where}: {' against '.join(dict.fromkeys(names))}")
            verdicts += [_agree(group[a], group[b], theirs[a], theirs[b]) for a, b in combinations(rows, 2)]
        if not verdicts:
            return None
        told = f"of {len(verdicts)} pairs {verdicts.count(True)} told apart alike by both, {verdicts.count(False)} the other way"
        claim = "IWAE with 5000 terms puts the models in the order of annealed weights"
        return Conclusion(claim, "", f"{told}; {'; '.join(texts)}", all_hold(verdicts))

    def tables(self) -> list[Table]:
        sets = dict.fromkeys([*("mnist", "omniglot"), *(entry.data for entry in self.entries)])
        return [*(self._beside(data) for data in sets), self._details()]

    def _beside(self, data: str) -> Table:
        """Laid out as in the paper, with what others report."""
        own = [entry for entry in self.entries if entry.data == data]
        others = [published for published in PUBLISHED if published.at(data)]
        costs = sorted({*(COSTS if others else ()), *(entry.cost for entry in own)})
        rows: list[Row] = []
        for published in others:
            at = published.at(data)
            values = [None if k not in at else f"{at[k][0]:.2f}" + (f" ± {at[k][1]:.2f}" if at[k][1] else "") for k in costs]
            rows.append([published.objective, f"published: {published.source}", *values])
        for row in ROWS:
            entries = {entry.cost: entry for entry in own if entry.row == row}
            if entries:
                length = max(epochs for entry in entries.values() for epochs in entry.epochs)
                rows.append([ROWS[row].label, f"ours, epochs: {length}", *(self._value(entries.get(cost)) for cost in costs)])
        notes = ["± is the standard deviation over the runs."]
        if own:
            replicas, terms = len(own[0].nll), own[0].result["test_terms"]
            notes.append(
                f"Ours: {replicas} replicas, NLL by IWAE with {terms} terms; * marks the best of a column and those that Welch's "
                f"t-test does not tell from it (p > {_DOUBT})."
            )
            if not all(entry.whole for entry in own):
                than = ", far shorter than the published ones" if others else ""
                notes.append(f"Ours are short runs{than}: compare them with one another only.")
        if others:
            sources = dict.fromkeys(published.source for published in others)
            notes.append(f"Published, NLL by IWAE with 5000 terms: {'; '.join(f'{name}: {SOURCES[name]}' for name in sources)}.")
        columns = ["objective", "whose", *(f"k = {cost}" for cost in costs)]
        return Table(f"Test NLL on {DATA[data]}", columns, rows, " ".join(notes))

    def _value(self, entry: Entry | None) -> str | None:
        if entry is None:
            return None
        star = " *" if self.best[entry.data, entry.cost] is entry or self.against_best(entry).p > _DOUBT else ""
        return f"{entry.mean:.2f} ± {stdev(entry.nll):.2f}{star}"

    def _details(self) -> Table:
        columns = ["data", "k", "objective", "test NLL", "sd", "behind the best", "p", "expected cost", "steps clipped", "epochs"]
        rows: list[Row] = []
        for e in self.entries:
            behind, best = self.against_best(e), self.best[e.data, e.cost] is e
            tested: Row = [None, None] if best else [f"{behind.mean:.2f} ± {behind.half():.2f}", float(f"{behind.p:.2g}")]
            numbers = [round(e.result["expected_cost"], 2), f"{fmean(e.result['clipped_decoder']):.0%}", max(e.epochs)]
            rows.append([DATA[e.data], e.cost, ROWS[e.row].label, round(e.mean, 3), round(stdev(e.nll), 3), *tested, *numbers])
        note = (
            "Behind the best of the same data and k, with half a 95% interval; p is that of Welch's unpaired t-test, and not "
            "corrected for the number of rows nor for the choice of the best. The replicas of each row begin with the same "
            f"parameters and data orders as those of the others. {SHARED_K} SymmetricSUMO and MultilevelRR are "
            "capped, so that they are unbiased for IWAE with "
            f"{ROWS['symmetric-sumo'].max_terms} and {ROWS['multilevel-rr'].max_terms} terms at most."
        )
        return Table("Ours in detail", columns, rows, note)


def _below(claim: str, paper: str, text: str, contrasts: Mapping[str, Contrast]) -> list[Conclusion]:
    """Whether all contrasts are below zero; nothing where there are none."""
    return [Conclusion(claim, paper, text, all_below(list(contrasts.values())))] if contrasts else []


def _agree(a: Entry, b: Entry, other_a: Entry, other_b: Entry) -> bool | None:
    """Whether two yardsticks tell two models apart (p < 0.05 by each) in the same way; None if one of them does not."""
    one, other = Contrast.of((1, a.nll), (-1, b.nll)), Contrast.of((1, other_a.nll), (-1, other_b.nll))
    return None if max(one.p, other.p) > _DOUBT else (one.mean < 0) == (other.mean < 0)


def _paper_gains(*rows: str) -> str:
    few, many = ("mnist", COSTS[0]), ("mnist", COSTS[-1])
    gains = [f"{ROWS[row].estimator.upper()} {_PAPER[row][many] - _PAPER[row][few]:+.2f}" for row in rows]
    return f"MNIST, {few[1]} to {many[1]}: {', '.join(gains)}"
