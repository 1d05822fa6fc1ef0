"""What a page says of one folder, be it a study's or a run's, and how such folders are read."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dohyo.errors import DohyoError
from dohyo.lab.report.grids import Cell, Grid
from dohyo.lab.report.pictures import Figure, PictureError

STUDY, CONFIG, RESULT = "study.json", "config.yaml", "result.json"
VERDICTS = {True: "holds", False: "does not hold", None: "cannot tell"}


@dataclass(frozen=True)
class Finding:
    """A conclusion of a study as study.json holds it. The class in `dohyo.lab.studies` would bring all of training with it."""

    claim: str
    paper: str
    found: str
    holds: bool | None

    @property
    def verdict(self) -> str:
        return VERDICTS[self.holds]


@dataclass(frozen=True)
class Entry:
    """One folder, ready to be shown.

    Attributes:
        kind: study, or the command that made the run: train, reverse-kl or qpbo.
        name: The study's name, or the run's folder.
        question: What was asked.
        outcome: What came out, in a few words.
        state: finished, or what is missing.
        notices: What a reader must know before the numbers.
        headline: The numbers that matter most, with their names.
        facts: Seeds, versions and the like, with their names.
        config: What the run was told, as YAML.
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
    findings: list[Finding] = field(default_factory=list)
    tables: list[Grid] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    config: str = ""
    more: list[tuple[str, list[Grid], list[Figure]]] = field(default_factory=list)
    compared: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        keys = ("kind", "name", "folder", "title", "scale", "state", "outcome")
        found = {key: getattr(self, key) for key in keys} | {"seconds": self.seconds.key}
        verdicts = [{"claim": finding.claim, "found": finding.found, "holds": finding.holds} for finding in self.findings]
        return found | ({"conclusions": verdicts} if self.kind == "study" else {})


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DohyoError(f"{path}: is damaged ({error}); run the command that made it again") from error
    if not isinstance(found, dict):
        raise DohyoError(f"{path}: holds a {type(found).__name__}, not the object that it should; is it of dohyo?")
    return found


@contextlib.contextmanager
def blaming(place: str, remedy: str) -> Iterator[None]:
    """Says where it was, if what was read is not what this version of dohyo writes."""
    try:
        yield
    except PictureError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DohyoError(f"{place}: {reason}; {remedy}") from error


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100).rstrip()


def versions(found: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items()) if isinstance(found, dict) else ""
