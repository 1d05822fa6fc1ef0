"""The gallery: what stands in results/, added to gallery.md when Sphinx reads it."""

import re
from pathlib import Path
from typing import Any

from blocks import conclusions, escaped, provenance, table

from dohyo.lab.folder import STUDY, read_json
from dohyo.lab.report import find
from dohyo.lab.report.studies import read_study

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results"


def gallery(results: Path = RESULTS, place: Path = DOCS) -> str:
    """Every study with its conclusions, pictures and tables, then the other pictures and conclusions."""
    studies = [study(folder, results, place) for folder in find([results]) if (folder / STUDY).is_file()]
    numbers = (path for path in sorted(results.glob("*.json")) if not path.with_suffix(".png").exists())
    others = [*sorted(results.glob("*.png")), *numbers]
    measured = [text for path in others if (text := measurement(path))]
    return "\n".join(studies) + ("\n## Other measurements\n\n" + "\n".join(measured) if measured else "")


def study(folder: Path, results: Path, place: Path) -> str:
    entry, found = read_study(folder), read_json(folder / STUDY, "make it again with dohyo reproduce")
    parts = [f"## {escaped(entry.title)}", escaped(entry.question)]
    parts += [f"**Not finished: {entry.state}.**"] if entry.state != "finished" else []
    parts += [conclusions(entry.findings)] if entry.findings else []
    for picture in found["pictures"]:
        parts.append(f"![{escaped(picture['alt'])}](../results/{folder.name}/{picture['file']})")
        parts.append(f"*{escaped(picture['title'])}*")
    for made in entry.tables:
        parts += [f"**{escaped(made.title)}**", table(made)]
    return "\n\n".join([*parts, provenance(entry, results, place)]) + "\n"


def measurement(path: Path) -> str:
    """A picture or a file of numbers that no study made, with what its numbers say of themselves."""
    numbers = path.with_suffix(".json")
    found = read_json(numbers, "make it again") if numbers.exists() else {}
    said = [escaped(found[key]) for key in ("what", "conclusion") if isinstance(found.get(key), str)]
    if path.suffix != ".png" and not said:
        return ""
    words = " ".join(word.upper() if word in ("qpbo", "mnist", "kl") else word for word in path.stem.split("_"))
    title = words[0].upper() + words[1:]
    parts = [f"### {title}", *said]
    if path.suffix == ".png":
        parts.append(f"![{escaped(_alt(path, title, found))}](../results/{path.name})")
    return "\n\n".join([*parts, f"[Every number](../results/{numbers.name})."]) + "\n"


def _alt(path: Path, title: str, found: dict[str, Any]) -> str:
    """What README says of the picture, or else what it compares."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    said = re.search(rf"!\[([^\]]+)\]\(results/{re.escape(path.name)}\)", readme)
    names = [*found.get("runs", {}), *found.get("draws", {}), *dict.fromkeys(curve["label"] for curve in found.get("curves", []))]
    return said[1] if said else f"{title}: {', '.join(names)}" if names else title


def setup(app: Any) -> dict[str, Any]:
    def add(app: Any, name: str, source: list[str]) -> None:
        if name == "gallery":
            source[0] += "\n" + gallery()

    app.connect("source-read", add)
    app.connect("env-get-outdated", lambda *_: ["gallery"])  # a new study may have come since the last build
    return {"parallel_read_safe": True}
