"""What a page says about one folder, be it a study's or a run's, with the pictures in it and what was found of a run later."""

import base64
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from dohyo.errors import DohyoError
from dohyo.files import read_whole, resolved
from dohyo.lab.folder import EVALUATION, SANDWICH, Conclusion, Values, beyond_verdict, check_values, read_json
from dohyo.lab.report.grids import Cell, Grid, number, with_error

_REMEDY = "remove it, or make it again"
_NUMBER = float | int | None
_EVALUATION = {"estimator": str, "steps": int, "best_epoch": _NUMBER, "mean": _NUMBER, "stderr": _NUMBER, "split": str,
               "verdict": dict, "warnings": list}  # fmt: skip
_SANDWICH = {"lower": _NUMBER, "upper": _NUMBER, "gap": _NUMBER, "gap_stderr": _NUMBER, "crosses": bool, "verdict": str}
_TRUSTED = {True: "trusted", False: "not to be trusted"}


@dataclass(frozen=True)
class Figure:
    """A picture as a data URI, with a text for where it cannot be seen."""

    title: str
    alt: str
    uri: str
    width: int
    height: int

    @property
    def wide(self) -> bool:
        """Whether it needs a row of its own: from eight inches at dohyo's resolution, or if it is flat."""
        return self.width >= 1200 or self.width > 1.5 * self.height


@dataclass(frozen=True)
class Entry:
    """One folder, ready to be shown.

    Attributes:
        kind: study, or the command that made the run: train, reverse-kl or qpbo.
        name: The study's name, or the run's folder.
        outcome: The result in a few words.
        state: finished, or what is missing.
        notices: What a reader must know before the numbers.
        headline: The numbers that matter most, with their names.
        facts: Seeds, versions and the like, with their names.
        config: The options, as YAML.
        more: Tables and pictures that are shown on demand, by their headings.
        compared: The cells of a run's row in the table of all runs of its kind.
    """

    kind: str
    name: str
    folder: str
    title: str
    question: str
    outcome: str
    state: str
    seconds: Cell
    scale: str = ""
    notices: list[str] = field(default_factory=list)
    headline: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Conclusion] = field(default_factory=list)
    tables: list[Grid] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    config: str = ""
    more: list[tuple[str, list[Grid], list[Figure]]] = field(default_factory=list)
    compared: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        keys = ("kind", "name", "folder", "title", "scale", "state", "outcome")
        found = {key: getattr(self, key) for key in keys} | {"seconds": self.seconds.key}
        verdicts = [{"claim": finding.claim, "found": finding.found, "holds": finding.holds} for finding in self.findings]
        return found | ({"conclusions": verdicts} if self.kind == "study" else {})


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100).rstrip()


def versions(found: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (found or {}).items())


def read_beside(folder: Path, result: Values) -> tuple[list[tuple[str, str]], list[str]]:
    """Numbers with their names, and notices: of the last `dohyo evaluate`, unless the run has found better parameters since, and
    of the last `dohyo sandwich`."""
    headline, said = list[tuple[str, str]](), list[str]()
    path = folder / EVALUATION
    if path.is_file():
        values = check_values(read_json(path, _REMEDY), _EVALUATION, path, _REMEDY)
        if values.get("best_epoch") == result.get("best_epoch"):
            by = f"chains of {values['steps']} leapfrogs" if values["steps"] else "the encoder's weights"
            name = f"log p(x) of {values['split']} data by {values['estimator']}, {by}, nats"
            headline.append((name, judged(with_error(values.get("mean"), values.get("stderr")), values)))
            said += [f"dohyo evaluate: {line}" for line in notices(values)]
    path = folder / SANDWICH
    if path.is_file():
        values = check_values(read_json(path, _REMEDY), _SANDWICH, path, _REMEDY)
        between = f"{number(values.get('lower'))} to {number(values.get('upper'))}"
        headline.append(("log p(x) of its own samples, nats", between))
        said += [f"dohyo sandwich: {values['verdict']}"] if values["crosses"] else []
    return headline, said


def notices(found: Values) -> list[str]:
    """The verdict, unless all is well, and every warning that is not in it."""
    verdict = found.get("verdict") or {}
    doubted = str(verdict.get("reason") or "") if verdict.get("trusted") is not True else ""
    return [*([doubted] if doubted else []), *beyond_verdict(found)]


def judged(text: str, found: Values) -> str:
    """A number with its error bar, and whether that can be trusted."""
    verdict = found.get("verdict")
    if not verdict:
        return text
    words = next((words for value, words in _TRUSTED.items() if verdict.get("trusted") is value), "not judged")
    return f"{text}, {words}"


def figure(path: Path, title: str, alt: str) -> Figure:
    """The picture, or the .svg of the same name where that is smaller: it is sharper, but huge if it has many points."""
    sharp = path.with_suffix(".svg")
    for each in (path, sharp):
        if resolved(each).parent != resolved(path.parent):
            raise DohyoError(f"{each}: leads out of the folder by a symbolic link; put the picture itself there")
    data, kind = read_whole(path), "png"
    size = _png_size(path, data)
    if sharp.is_file() and sharp.stat().st_size < len(data):
        data, kind = read_whole(sharp), "svg+xml"
        size = _svg_size(sharp, data)
    return Figure(title, alt, f"data:image/{kind};base64,{base64.b64encode(data).decode()}", *size)


def _png_size(path: Path, data: bytes) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.load()  # reads all of it: a file that a full disk cut short begins well
            return image.size
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
        raise DohyoError(f"{path}: is not a whole PNG picture ({error}); plot it again") from error


def _svg_size(path: Path, data: bytes) -> tuple[int, int]:
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise DohyoError(f"{path}: is not a whole SVG picture ({error}); plot it again") from error
    number = r"(-?\d{1,6}(?:\.\d*)?)"
    box = re.fullmatch(rf"\s*{number}[\s,]+{number}[\s,]+{number}[\s,]+{number}\s*", root.get("viewBox", ""))
    if not root.tag.endswith("svg") or box is None:
        raise DohyoError(f"{path}: is not an SVG picture with a view box; plot it again")
    return round(float(box[3]) * 150 / 72), round(float(box[4]) * 150 / 72)  # points, at the dots per inch of the PNG
