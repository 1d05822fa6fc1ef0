"""What `dohyo evaluate` and `dohyo sandwich` have left beside a run."""

from dataclasses import dataclass, field
from pathlib import Path

from dohyo.lab.folder import EVALUATION, SANDWICH, Values, beyond_verdict, check_values, read_json
from dohyo.lab.report.grids import number, with_error

_REMEDY = "remove it, or make it again"
_NUMBER = float | int | None
_EVALUATION = {"estimator": str, "steps": int, "best_epoch": _NUMBER, "mean": _NUMBER, "stderr": _NUMBER, "split": str,
               "verdict": dict, "warnings": list}  # fmt: skip
_SANDWICH = {"lower": _NUMBER, "upper": _NUMBER, "gap": _NUMBER, "gap_stderr": _NUMBER, "crosses": bool, "verdict": str}
_TRUSTED = {True: "trusted", False: "not to be trusted"}


@dataclass
class Beside:
    """Numbers that matter, with their names, and notices."""

    headline: list[tuple[str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def read_beside(folder: Path, result: Values) -> Beside:
    """The last evaluation, unless the run has found better parameters since, and the last sandwich."""
    found = Beside()
    path = folder / EVALUATION
    if path.is_file():
        values = check_values(read_json(path, _REMEDY), _EVALUATION, path, _REMEDY)
        if values.get("best_epoch") == result.get("best_epoch"):
            by = f"chains of {values['steps']} leapfrogs" if values["steps"] else "the encoder's weights"
            name = f"log p(x) of {values['split']} data by {values['estimator']}, {by}, nats"
            found.headline.append((name, judged(with_error(values.get("mean"), values.get("stderr")), values)))
            found.notices += [f"dohyo evaluate: {line}" for line in notices(values)]
    path = folder / SANDWICH
    if path.is_file():
        values = check_values(read_json(path, _REMEDY), _SANDWICH, path, _REMEDY)
        between = f"{number(values.get('lower'))} to {number(values.get('upper'))}"
        found.headline.append(("log p(x) of its own samples, nats", between))
        found.notices += [f"dohyo sandwich: {values['verdict']}"] if values["crosses"] else []
    return found


def judged(text: str, found: Values) -> str:
    """A number with its error bar, and whether that can be trusted."""
    verdict = found.get("verdict")
    if not verdict:
        return text
    words = next((words for value, words in _TRUSTED.items() if verdict.get("trusted") is value), "not judged")
    return f"{text}, {words}"


def notices(found: Values) -> list[str]:
    """The verdict, unless all is well, and every warning that is not in it."""
    verdict = found.get("verdict") or {}
    doubted = str(verdict.get("reason") or "") if verdict.get("trusted") is not True else ""
    return [*([doubted] if doubted else []), *beyond_verdict(found)]
