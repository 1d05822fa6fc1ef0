"""`dohyo compare`: which model makes the data more probable, and by how much."""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

import dohyo
from dohyo.errors import DohyoError
from dohyo.lab.cli.screen import answer, measured, say, show_table
from dohyo.lab.evaluations import Saved, of_encoders, saved_evaluations
from dohyo.lab.experiments.run import config_of
from dohyo.lab.folder import CONFIG
from dohyo.lab.parsing import Parser

_EXAMPLES = """examples:
  dohyo compare runs/a runs/b runs/c
  dohyo compare a.npz b.npz --json                # files of dohyo evaluate --out

Each is compared with the first, datum by datum, so that the variation between data cancels. Of runs it takes what dohyo evaluate
left in all of them, else the test NLL of dohyo train. All must be evaluations of the same data.
"""


def parser() -> Parser:
    made = Parser(description="Differences of log p(x) between models on the same data, with intervals.", epilog=_EXAMPLES)
    made.add_argument("places", type=Path, nargs="+", metavar="RUN", help="folders of runs or .npz files of dohyo evaluate --out")
    made.add_argument("--confidence", type=float, default=0.95, help="the confidence level of the intervals")
    made.add_json()
    return made


def run(options: Namespace) -> int:
    if len(options.places) < 2:
        raise DohyoError("give at least two runs or saved evaluations to compare")
    if not 0 < options.confidence < 1:
        raise DohyoError(f"--confidence is {options.confidence}; it must lie strictly between 0 and 1")
    for place in options.places:
        if (place / CONFIG).is_file():
            config_of(place, "train")
    first, *others = saved = saved_evaluations(options.places)
    differences = [difference(other, first, options.confidence) for other in others]
    each = [{"name": one.name, "estimator": dohyo.to_dict(one.estimator), **one.evaluation.to_dict()} for one in saved]
    report = {"evaluations": each, "confidence": options.confidence, "differences": differences}
    answer(report, options.json, lambda: _show(saved, differences, options.confidence))
    return 0


def difference(a: Saved, b: Saved, confidence: float = 0.95) -> dict[str, Any]:
    """log p(x) of a minus that of b, as JSON can hold it."""
    found = dohyo.compare(a.evaluation, b.evaluation, confidence, names=(a.name, b.name))
    low, high = found.interval
    better = a.name if low > 0 else b.name if high < 0 else None
    return {"a": a.name, "b": b.name, "difference": found.difference, "stderr": found.stderr, "interval": [low, high],
            "better": better, "warnings": [*of_encoders([a, b]), *found.warnings]}  # fmt: skip


def _show(saved: list[Saved], differences: list[dict[str, Any]], confidence: float) -> None:
    rows = []
    for one, against in zip(saved, [None, *differences], strict=True):
        mean = measured(one.evaluation.mean, one.evaluation.stderr)
        cells = ["", "", ""]
        if against is not None:
            low, high = against["interval"]
            verdict = "cannot tell" if against["better"] is None else "better" if against["difference"] > 0 else "worse"
            cells = [measured(against["difference"], against["stderr"]), f"{low:.3f} to {high:.3f}", verdict]
        rows.append([one.name, mean, one.estimator.name, one.evaluation.kind, *cells])
    columns = ["run", "log p(x)", "estimator", "kind", "minus the first", f"{confidence:.0%} interval", "verdict"]
    title = f"{len(saved[0].evaluation.per_datum)} data, nats for each"
    show_table(title, columns, rows, words=("run", "estimator", "kind", "verdict"))
    for line in dict.fromkeys(warning for one in differences for warning in one["warnings"]):
        say(f"warning: {line}")
