"""Blocks of results in README and docs: tables in Markdown, made from study.json and never typed."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dohyo.errors import DohyoError
from dohyo.lab.folder import STUDY, VERDICTS, Conclusion
from dohyo.lab.report.entries import Entry
from dohyo.lab.report.grids import NOTHING, Grid
from dohyo.lab.report.studies import read_study
from dohyo.names import named

_BEGIN = r"<!-- results:([\w-]+) ?(.*?) ?-->"
_BLOCK = re.compile(rf"({_BEGIN}\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, results: Path, place: Path, more: Mapping[str, Callable[[], str]] = MappingProxyType({})) -> str:
    """The text with every block between `<!-- results:NAME -->` and `<!-- end -->` replaced.

    A block becomes the conclusions of the study in `results/NAME`; `<!-- results:NAME TITLE -->` becomes its table of that title,
    and `<!-- results:overview -->` a table of all studies there.

    Args:
        place: The folder that the text's links start from.
        more: What makes the blocks of other names.
    """

    def block(match: re.Match[str]) -> str:
        begin, name, title, end = match.groups()
        if name == "overview":
            return f"{begin}\n{overview(results, place)}\n{end}"
        if name in more:
            return f"{begin}\n{more[name]()}\n{end}"
        if not (results / name / STUDY).is_file():
            raise DohyoError(f"{begin.strip()}: there is no {results / name / STUDY}; make it with dohyo reproduce {name}")
        entry = read_study(results / name)
        made = table(named({one.title: one for one in entry.tables}, title, "table")) if title else conclusions(entry.findings)
        return f"{begin}\n{made}\n{provenance(entry, results, place)}\n\n{end}"

    if len(re.findall(_BEGIN, text)) != len(_BLOCK.findall(text)):
        raise DohyoError("a block of results has no end; write <!-- end --> on a line of its own after each")
    return _BLOCK.sub(block, text)


def overview(results: Path, place: Path) -> str:
    """Each study: how many of its claims hold, and which do not."""
    rows = []
    for path in sorted(results.glob(f"*/{STUDY}")):
        entry = read_study(path.parent)
        verdicts = [one.holds for one in entry.findings]
        counts = ", ".join(f"{VERDICTS[holds]}: {verdicts.count(holds)}" for holds in (True, False, None) if holds in verdicts)
        failed = "; ".join(escaped(one.claim) for one in entry.findings if one.holds is False) or NOTHING
        link = Path(os.path.relpath(path, place)).as_posix()
        rows.append([f"[`{entry.name}`]({link})", escaped(entry.title), counts, failed])
    return _lines(["study", "what", "claims", "what does not hold here"], [False] * 4, rows)


def conclusions(findings: Sequence[Conclusion]) -> str:
    texts = [(one.claim, one.paper or NOTHING, one.found) for one in findings]
    rows = [[*map(escaped, text), f"**{one.verdict}**"] for text, one in zip(texts, findings, strict=True)]
    return _lines(["claim", "the paper", "here", "verdict"], [False] * 4, rows)


def table(made: Grid) -> str:
    """A table in Markdown, with its note under it.

    Example:
        >>> from dohyo.lab.report.grids import grid
        >>> print(table(grid("", ["estimator", "NLL"], [["IWAE_5 | DReG", 84.784], ["SUMO", None]])))
        | estimator | NLL |
        |---|---:|
        | IWAE\\_5 \\| DReG | 84.78 |
        | SUMO | – |
        <BLANKLINE>
    """
    rows = [[escaped(cell.text) for cell in row] for row in made.rows]
    note = f"\n{escaped(made.note)}\n" if made.note else ""
    return _lines([*map(escaped, made.columns)], made.numeric, rows) + note


def provenance(entry: Entry, results: Path, place: Path) -> str:
    """Where a table's numbers come from, as a line under it."""
    link = Path(os.path.relpath(results / Path(entry.folder).name / STUDY, place)).as_posix()
    partial = "" if entry.state == "finished" else f", {entry.state} so far"
    return f"`dohyo reproduce {entry.name} --scale {entry.scale}`, {entry.seconds.text}{partial}; [every number]({link})."


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = re.sub(r"([\\`*_{}\[\]<>|$#~&])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^(\d*)([-+.)])(?=[\s-]|$)", r"\1\\\2", text)  # it would begin a list or a rule


def _lines(columns: list[str], numeric: list[bool], rows: list[list[str]]) -> str:
    rule = "|" + "|".join("---:" if one else "---" for one in numeric) + "|\n"
    head, *body = ("| " + " | ".join(row) + " |\n" for row in (columns, *rows))
    return head + rule + "".join(body)
