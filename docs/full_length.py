"""The paper's table 1 at full length, from results/DATA_cost_COST.json: what is published, and ours by two yardsticks."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

from dohyo.lab.folder import Conclusion
from dohyo.lab.report.grids import Grid, grid
from dohyo.lab.studies.table1_findings import DATA, Entry, Findings
from dohyo.lab.studies.table1_rows import COSTS, PUBLISHED, ROWS
from dohyo.lab.studies.verdicts import Contrast

SETS = ("mnist", "omniglot")
CHAINS = "48_steps"  # of the annealed weights, whose values are shown
_LEFT_OUT = ("elbo", "jvi")  # published rows that are shown only beside ours
_NOT_RUN = "not finished"
_LOWER = ", by annealed weights"  # ends a claim by the other yardstick
_BESIDE = {
    "sumo-variance": "iwae", "sumo": "iwae-dreg", "symmetric-sumo": "iwae-dreg", "multilevel-rr": "iwae-dreg",
    "multilevel-each": "iwae-dreg", "sumo-ours": "iwae-ours",
}  # fmt: skip


class Cell:
    """The replicas of one row at one place: by IWAE with 5000 terms, and by annealed weights if they were computed."""

    def __init__(self, data: str, cost: int, row: str, run: dict[str, Any], chains: list[dict[str, Any]]) -> None:
        replicas = run["result"]["replicas"]
        self.epochs = [one["epochs"] for one in replicas]
        self.stopped = any("stopped" in one["ended"] for one in replicas)  # before its patience or the study's limit
        most = 0 if self.stopped else run["config"]["epochs"]
        options = {"data": data, "cost": cost, "estimator": row, "epochs": most}
        given: dict[str, Any] = {"epochs": self.epochs, "test_terms": run["result"]["test_terms"]}
        self.bound = Entry(options, {**given, "test_nll": [one["test_nll"] for one in replicas]})
        self.annealed = Entry(options, {**given, "test_nll": [one["nll"] for one in chains]}) if chains else None
        self.gaps = [one["sandwich"]["gap"] for one in chains if "sandwich" in one]

    def shown(self, entry: Entry | None) -> str:
        if entry is None:
            return _NOT_RUN
        return f"{entry.mean:.2f} ± {stdev(entry.nll):.2f}" + (f" ({min(self.epochs):,} epochs)" if self.stopped else "")


Cells = dict[tuple[str, str, int], Cell]  # by row, data and cost


def read(results: Path) -> Cells:
    """Every cell that the files hold."""
    cells: Cells = {}
    for data in SETS:
        for cost in COSTS:
            path = results / f"{data}_cost_{cost}.json"
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": {}}
            chains = content.get("annealed", {}).get(CHAINS, {}).get("replicas", {})
            for name, run in content["runs"].items():
                row = name.replace("_", "-")
                cells[row, data, cost] = Cell(data, cost, row, run, chains.get(row, []))
    return cells


def table(cells: Cells) -> Grid:
    """Published, the paper's, ours; a column for each data set and cost."""
    places = [(data, cost) for data in SETS for cost in COSTS]
    own = [row for row in ROWS if any((row, *place) in cells for place in places)]
    rows: list[list[str | None]] = []
    for published in PUBLISHED:
        if published.row not in _LEFT_OUT or published.row in own:
            at = {(data, cost): nll for data in SETS for cost, (nll, _) in published.at(data).items()}
            rows.append([published.objective, published.source, *(f"{at[p]:.2f}" if p in at else None for p in places)])
    for row in own:
        found = [cells.get((row, *place)) for place in places]
        for name, yardstick in (("IWAE-5000", "bound"), ("annealed weights", "annealed")):
            shown = [_NOT_RUN if cell is None else cell.shown(getattr(cell, yardstick)) for cell in found]
            rows.append([ROWS[row].label, f"ours, {name}", *shown])
    return grid(
        "", ["trained by", "whose, tested by", *(f"{DATA[data]}, {cost}" for data, cost in places)], rows, _note(cells, own)
    )


def _note(cells: Cells, own: list[str]) -> str:
    replicas = sorted({len(cell.epochs) for cell in cells.values()})
    epochs = [n for cell in cells.values() for n in cell.epochs]
    lengths = " to ".join(f"{n:,}" for n in sorted({min(epochs), max(epochs)}))
    texts = [
        "Test NLL in nats; a column is a data set and a cost, the expected log-weights for each image in a step. Published ones "
        f"are by IWAE-5000. Ours: {' or '.join(map(str, replicas))} replicas, {lengths} epochs, ± standard deviation over them."
    ]
    if gaps := [gap for cell in cells.values() for gap in cell.gaps]:
        where = ", ".join(dict.fromkeys(cell.bound.where for cell in cells.values() if cell.gaps))
        texts.append(
            "Both yardsticks are upper bounds of the NLL on average; on images that the models made themselves, bounds from both "
            f"sides by 16 annealed weights are {min(gaps):.1f} to {max(gaps):.1f} nats apart ({where})."
        )
    missing = [ROWS[row].label for row in ROWS if row not in own]
    return " ".join([*texts, f"At no cost were finished: {'; '.join(missing)}." if missing else ""])


def verdicts(cells: Cells) -> Grid:
    """The conclusions in a word each, a column for each yardstick."""
    found = {one.claim: one.verdict for one in conclusions(cells)}
    rows = [[claim, said, found.get(claim + _LOWER)] for claim, said in found.items() if not claim.endswith(_LOWER)]
    return grid("", ["claim", "by IWAE-5000", "by annealed weights"], rows)


def conclusions(cells: Cells) -> list[Conclusion]:
    """What follows, by both yardsticks."""
    bound = Findings([cell.bound for cell in cells.values()])
    annealed = Findings([cell.annealed for cell in cells.values() if cell.annealed is not None])
    lower = [replace(one, claim=one.claim + _LOWER) for one in annealed.conclusions(published=False)]
    order = bound.ordered_as(annealed)
    return [*bound.conclusions(), *lower, *([] if order is None else [order])]


def unbiased(results: Path) -> Grid:
    """Every unbiased row less IWAE at the same cost, wherever both were trained on MNIST or OMNIGLOT in several replicas."""
    rows: list[list[str | None]] = []
    content = json.loads((results / "mnist_300_epochs.json").read_text(encoding="utf-8"))
    nll = {name: [one["test_nll"] for one in run["result"]["replicas"]] for name, run in content["runs"].items()}
    configs = {name: run["config"] for name, run in content["runs"].items()}
    (iwae,) = (name for name, config in configs.items() if config["estimator"] == "iwae")
    for name, config in configs.items():
        if name != iwae:
            row = next(
                row for row, one in ROWS.items() if (one.estimator, one.encoder) == (config["estimator"], config["encoder"])
            )
            label = ROWS[row].label + (f", clip-datum {config['clip_datum']:g}" if config["clip_datum"] else "")
            where = f"{DATA[config['data']]}, {config['cost']:g}, {config['epochs']:,}"
            rows.append([where, label, ROWS["iwae-dreg"].label, _difference(nll[name], nll[iwae]), None])
    cells = read(results)
    for (row, data, cost), cell in cells.items():
        other = cells.get((_BESIDE.get(row, ""), data, cost))
        if other is not None:
            lengths = dict.fromkeys(f"{max(one.epochs):,}" for one in (cell, other))
            pairs = [(cell.bound, other.bound), (cell.annealed, other.annealed)]
            found = [_difference(one.nll, beside.nll) if one and beside else None for one, beside in pairs]
            rows.append([f"{DATA[data]}, {cost}, {' and '.join(lengths)}", ROWS[row].label, ROWS[_BESIDE[row]].label, *found])
    note = "Nats, negative is better than IWAE; ± half a 95% interval over three replicas (Welch), each row by itself."
    return grid("", ["data, cost, epochs", "unbiased", "less", "by IWAE-5000", "by annealed weights"], rows, note)


def _difference(one: list[float], other: list[float]) -> str:
    found = Contrast.of((1, one), (-1, other))
    return f"{found.mean:+.2f} ± {found.half():.2f}"
