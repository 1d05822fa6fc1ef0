"""What docs/guides/better-model.md says in numbers: pooled differences, and sentences that hold whichever sign comes out.

The rule for pooling was written down when MNIST at 5 and 15 and OMNIGLOT at 5 were known, and no other place:

- A place is a data set and a cost where both rows were trained to their end, to the limit or to that of their patience.
- Its difference is that of the means over the replicas. The replicas of an unbiased row share their K and are not independent, so
  it is places that are counted: the mean over them, with Student's t (`verdicts.pooled`), and no interval for fewer than three.
- The answer is yes or no if the intervals by both yardsticks are on the same side of zero, and open otherwise.
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from dohyo.lab.report.grids import Grid, grid
from dohyo.lab.studies.table1_findings import DATA, Entry
from dohyo.lab.studies.table1_rows import COSTS, ROWS
from dohyo.lab.studies.verdicts import LEAST_PLACES, pooled, pooled_text
from full_length import SETS, Cells, read

YARDSTICKS = {"bound": "by IWAE-5000", "annealed": "by annealed weights"}
_PAIRS = (("sumo", "iwae-dreg"), ("sumo-variance", "iwae"), ("iwae-dreg", "iwae"))
_CHAINS = "chains", "iwae-ours"
_OURS = (  # where they were run
    ("iwae-ours", "iwae-dreg"),
    ("sumo-ours", "iwae-ours"),
    _CHAINS,
    ("chains-early", "iwae-ours"),
    ("chains-unbiased", "chains-early"),
)
_SWITCHED = "IWAE-5, then 8 chains of 8 leapfrogs", "IWAE-5, then IWAE-50"
_AT_THE_END = "8 chains of 8", "IWAE-50"


def differences(cells: Cells, row: str, other: str, yardstick: str) -> dict[str, float]:
    """The difference of two rows at each place, by its name."""
    found = {}
    for data, cost in product(SETS, COSTS):
        pair = [_ended(cells, one, data, cost, yardstick) for one in (row, other)]
        if pair[0] and pair[1]:
            found[f"{DATA[data]} at {cost}"] = pair[0].mean - pair[1].mean
    return found


def _ended(cells: Cells, row: str, data: str, cost: int, yardstick: str = "bound") -> Entry | None:
    cell = cells.get((row, data, cost))
    found: Entry | None = getattr(cell, yardstick, None)
    return found if found is not None and found.whole else None


def table(cells: Cells) -> Grid:
    """The mean of each difference over the places."""
    rows: list[list[str | None]] = []
    for pair in _PAIRS + _OURS:
        found = {name: differences(cells, *pair, name) for name in YARDSTICKS}
        if pair in _OURS and not found["bound"]:
            continue
        shown = [text for one in found.values() for text in (_shown(one), _p(one), _lower(one))]
        rows.append([*(ROWS[row].label for row in pair), ", ".join(found["bound"]) or None, *shown])
    columns = [text for name in YARDSTICKS.values() for text in (name, "p", "lower at")]
    note = (
        "Nats, negative is better than the other row; means over the places, which are data sets and costs at full length. ± is "
        f"half a 95% interval by Student's t over the places, from {LEAST_PLACES} of them on, and p is that of no difference. "
        "The replicas at one place are not counted, since those of an unbiased row share their K. The sequences of K at "
        "different places begin with the same seed, which no interval here accounts for."
    )
    return grid("", ["row", "less", "places", *columns], rows, note)


def _shown(found: Mapping[str, float]) -> str | None:
    return pooled_text(list(found.values())) if found else None


def _p(found: Mapping[str, float]) -> str | None:
    contrast = pooled(list(found.values()))
    return f"{contrast.p:.2f}" if contrast else None


def _lower(found: Mapping[str, float]) -> str | None:
    return f"{sum(value < 0 for value in found.values())} of {len(found)}" if found else None


def answer(cells: Cells) -> str:
    """The verdict on SUMO against IWAE, both with DReG, and what exchanging the encoder does beside it."""
    found = {name: differences(cells, *_PAIRS[0], name) for name in YARDSTICKS}
    contrasts = [pooled(list(one.values())) for one in found.values()]
    signs = [(c.mean > 0) - (c.mean < 0) if c and abs(c.mean) > c.half() else 0 for c in contrasts]
    verdict = {-2: "Yes, in these runs", 2: "No, a worse one in these runs"}.get(sum(signs), "These runs cannot tell")
    texts = [
        f"**{verdict}.** With the DReG encoder on both sides and at full length, SUMO less IWAE is {_both(found)}, the mean of "
        f"{_count(found['bound'])}; it is below zero at {_each(_lower, found)}."
    ]
    if any(signs) and abs(sum(signs)) < 2:
        texts.append("One yardstick can tell that from zero, and the other cannot or says the opposite.")
    paper = {name: differences(cells, *_PAIRS[1], name) for name in YARDSTICKS}
    if paper["bound"]:
        texts.append(
            f"With the encoder of the paper, which lowers the variance, SUMO less a plain IWAE is {_both(paper)}, the mean of "
            f"{_count(paper['bound'])}; the paper has SUMO ahead everywhere."
        )
    return " ".join(texts) + "\n"


def encoder(cells: Cells) -> str:
    """What the encoder changes, and what the estimator does where both are known."""
    by_encoder, by_estimator = ({n: differences(cells, *pair, n) for n in YARDSTICKS} for pair in (_PAIRS[2], _PAIRS[0]))
    same = {n: {at: by_estimator[n][at] for at in by_encoder[n] if at in by_estimator[n]} for n in YARDSTICKS}
    larger = [abs(_mean(by_encoder[n], same[n])) > abs(_mean(same[n], same[n])) for n in YARDSTICKS if same[n]]
    verdict = "more than" if all(larger) else "no more than" if not any(larger) else "by one yardstick more than"
    return (
        f"**The encoder matters {verdict} the estimator.** The DReG encoder changes the test NLL of IWAE's models by "
        f"{_both(by_encoder)}, the mean of {_count(by_encoder['bound'])}. At the same places exchanging IWAE for SUMO under "
        f"the DReG encoder changes it by {_both(same)}.\n"
    )


def _mean(found: Mapping[str, float], places: Mapping[str, float]) -> float:
    return fmean(found[at] for at in places)


def _both(found: Mapping[str, Mapping[str, float]]) -> str:
    """By each yardstick, with its places where they are others than those of the first."""
    first, *_ = found.values()
    only = {name: f" (at {', '.join(one)} alone)" if one.keys() != first.keys() else "" for name, one in found.items()}
    return " and ".join(f"{_shown(one)} nats {YARDSTICKS[name]}{only[name]}" for name, one in found.items() if one)


def _each(text: Any, found: Mapping[str, Mapping[str, float]]) -> str:
    return " and ".join(f"{text(one)} {YARDSTICKS[name]}" for name, one in found.items() if one)


def _count(found: Mapping[str, float]) -> str:
    return f"{len(found)} place{'s' if len(found) != 1 else ''} ({', '.join(found)})"


def missing(cells: Cells) -> str:
    """The cells at full length that the answer lacks."""
    names = dict.fromkeys(row for pair in _PAIRS for row in pair)
    lacking = {
        f"{DATA[data]} at {cost}": [ROWS[row].label for row in names if not _ended(cells, row, data, cost)]
        for data, cost in product(SETS, COSTS)
    }
    texts = [f"{at}: {'all four' if len(rows) == len(names) else '; '.join(rows)}" for at, rows in lacking.items() if rows]
    if not texts:
        return "All four rows above were trained to their end at every place.\n"
    return f"Of the four rows above, these were not trained to their end: {'. '.join(texts)}.\n"


def chains(results: Path) -> str:
    """What chains late in training have gained over IWAE's best schedule, by both yardsticks."""
    content = json.loads((results / "chains_mnist.json").read_text(encoding="utf-8"))
    found = [_less(content[group], *pair) for group, pair in (("switched", _SWITCHED), ("longer_at_the_end", _AT_THE_END))]
    unbiased = json.loads((results / "chain_encoders.json").read_text(encoding="utf-8"))["rows"]["multilevel-rr"]["less_dreg"]
    (halfway, error, bound), (late, late_error, late_bound) = found
    cells = read(results)
    table1 = {name: differences(cells, *_CHAINS, name) for name in YARDSTICKS}
    texts = [
        f"{', '.join(f'{value:+.2f} ({at})' for at, value in one.items())} {YARDSTICKS[n]}" for n, one in table1.items() if one
    ]
    return (
        f"Annealed chains less the best schedule of IWAE that we know, in the same time: {halfway:+.2f} ± {error:.2f} nats with "
        f"chains in the second half of training, {late:+.2f} ± {late_error:.2f} with chains at the end of 3,500 epochs, by "
        f"annealed weights; {bound:+.2f} and {late_bound:+.2f} by IWAE-5000. MultilevelRR over chains, which is unbiased, less "
        "IWAE over chains, in short training on the digits: {:+.2f} ± {:.2f}.\n".format(*unbiased)
    ) + (f"\nAt full length, chains in the last quarter less IWAE throughout: {'; '.join(texts)}.\n" if texts else "")


def _less(group: dict[str, Any], one: str, other: str) -> tuple[float, float, float]:
    """The difference by annealed weights, its standard error, over replicas or over images, and the difference by IWAE-5000."""
    found, runs = group["differences"][f"{one} less {other}"], group["runs"]
    bound = runs[one]["mean_iwae_5000"] - runs[other]["mean_iwae_5000"]
    return found["mean"], max(found["stderr_over_replicas"], found["stderr_over_images"]), bound
