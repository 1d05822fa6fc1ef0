"""How every picture is written: whole, with its numbers beside it."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dohyo.files import plain, replacing


def check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"{path}: the ending of a picture must be .png, .pdf or .svg")


def write_picture(figure: Figure, numbers: dict[str, Any], path: Path) -> None:
    """The picture, and its numbers as JSON: both are written in full before either takes its place."""
    path = Path(path)
    check_picture(path)
    with replacing(path.with_suffix(".json")) as text, replacing(path) as picture:
        text.write_text(json.dumps(plain(numbers), allow_nan=False) + "\n", encoding="utf-8")
        figure.savefig(picture, dpi=150)
