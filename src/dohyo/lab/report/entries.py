"""What a page says about one folder, be it a study's or a run's, with the pictures in it."""

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
from dohyo.lab.folder import Conclusion
from dohyo.lab.report.grids import Cell, Grid


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
        question: What was asked.
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
