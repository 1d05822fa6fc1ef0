"""Pictures that a page carries within itself."""

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from dohyo.errors import DohyoError


class PictureError(DohyoError):
    """A picture is damaged; the message names its file."""


@dataclass(frozen=True)
class Figure:
    """A picture as a data URI, with what to say where it cannot be seen."""

    title: str
    alt: str
    uri: str
    width: int
    height: int

    @property
    def wide(self) -> bool:
        """Whether it needs a row of its own: eight inches, at the resolution that dohyo draws with, or a flat one."""
        return self.width >= 1200 or self.width > 1.5 * self.height


def figure(path: Path, title: str, alt: str) -> Figure:
    """The picture, or the .svg of the same name where that is smaller: it is sharper, but huge if it draws many points."""
    sharp = path.with_suffix(".svg")
    data, kind, size = path.read_bytes(), "png", _png_size(path)
    if sharp.is_file() and sharp.stat().st_size < len(data):
        data, kind, size = sharp.read_bytes(), "svg+xml", _svg_size(sharp)
    return Figure(title, alt, f"data:image/{kind};base64,{base64.b64encode(data).decode()}", *size)


def _png_size(path: Path) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(path.read_bytes()), formats=["PNG"]) as image:
            image.load()  # reads all of it: a file that a full disk cut short has a good beginning
            return image.size
    except (OSError, SyntaxError, ValueError) as error:
        raise PictureError(f"{path}: is not a whole PNG picture ({error}); draw it again") from error


def _svg_size(path: Path) -> tuple[int, int]:
    try:
        root = ElementTree.fromstring(path.read_bytes())
        box = [float(part) for part in re.split(r"[\s,]+", root.get("viewBox", "").strip())]
        if not root.tag.endswith("svg") or len(box) != 4:
            raise DohyoError("no viewBox")
    except (ElementTree.ParseError, ValueError) as error:
        raise PictureError(f"{path}: is not a whole SVG picture ({error}); draw it again") from error
    return round(box[2] * 150 / 72), round(box[3] * 150 / 72)  # points, at the dots per inch of the PNG beside it
