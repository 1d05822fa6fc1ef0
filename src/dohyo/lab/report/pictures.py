"""Pictures inside a page."""

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from dohyo.errors import DohyoError
from dohyo.files import read_whole, resolved


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
