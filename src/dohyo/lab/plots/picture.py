"""How every picture is written: whole, with its numbers beside it."""

import json
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from numpy.typing import NDArray

from dohyo.errors import DohyoError
from dohyo.files import plain, replacing


def check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise DohyoError(f"{path}: the ending of a picture must be .png, .pdf or .svg")


def write_picture(figure: Figure, numbers: dict[str, Any], path: Path) -> None:
    """The picture, and its numbers as JSON: both are written in full before either takes its place."""
    path = Path(path)
    check_picture(path)
    with replacing(path.with_suffix(".json")) as text, replacing(path) as picture:
        text.write_text(json.dumps(plain(numbers), allow_nan=False) + "\n", encoding="utf-8")
        figure.savefig(picture, dpi=150)


def padded(low: float, high: float, share: float) -> tuple[float, float]:
    """Limits of an axis: a share of the span more on either side, or half a unit where there is no span."""
    pad = share * (high - low) if high > low else 0.5
    return low - pad, high + pad


def plain_numbers(values: NDArray[Any]) -> list[float | int | None]:
    """Numbers for JSON: six digits, whole ones as integers, and null for what is not finite."""
    rounded = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
    return [int(value) if value is not None and value.is_integer() else value for value in rounded]
