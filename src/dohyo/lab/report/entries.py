"""What a page says about one folder, be it a study's or a run's."""

from dataclasses import dataclass, field
from typing import Any

import yaml

from dohyo.lab.folder import Conclusion
from dohyo.lab.report.grids import Cell, Grid
from dohyo.lab.report.pictures import Figure


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
