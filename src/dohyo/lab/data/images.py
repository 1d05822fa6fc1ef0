"""A folder of images of one size, grey or in colour.

As in `readers`, errors do not name the folder; the caller does.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dohyo.errors import DohyoError, in_one_line
from dohyo.lab.data.readers import Arrays

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
_GREY, _COLOUR = ("1", "L"), ("RGB", "P", "RGBA", "LA", "PA", "CMYK", "YCbCr")


def read_images(folder: Path) -> Arrays:
    """The images in a folder and its subfolders, in the order of their names: (n, 1 or 3, height, width), uint8.

    Subfolders `train` and `test`, and perhaps `valid`, are the splits. If one image is in colour, all become so.
    """
    splits = [split for split in ("train", "valid", "test") if (folder / split).is_dir()]
    if not {"train", "test"} <= set(splits):
        splits = []
    files = {split: _files(folder / split) for split in splits} or {"the images": _files(folder)}
    for split, paths in files.items():
        if not paths:
            where = f"its subfolder {split}" if splits else "it"
            raise DohyoError(f"{where} holds no images; those are files that end in {', '.join(ENDINGS)}")
    pixels = _stacked([path for own in files.values() for path in own], folder)
    ends = np.cumsum([len(own) for own in files.values()])[:-1]
    return dict(zip(files, np.split(pixels, ends), strict=True))


def _files(folder: Path) -> list[Path]:
    """The images below a folder; hidden files and folders are left out."""
    found = [path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file()]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _opened(path: Path, folder: Path) -> NDArray[np.uint8]:
    """One image, (height, width) or (height, width, 3)."""
    from PIL import Image  # here, because it takes a while to import

    name = _shown(path, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow only warns about images so large that they may be meant to fill the memory
        try:
            with Image.open(path) as image:
                if image.mode not in _GREY + _COLOUR:
                    raise DohyoError(
                        f"{name} has pixels of the kind {image.mode}; save it with 8 bits for grey or for each colour"
                    )
                if image.mode in _GREY:
                    return np.asarray(image.convert("L"))
                pixels = np.asarray(image.convert("RGBA"))
        except DohyoError:
            raise
        except Exception as error:  # Pillow raises almost anything on damaged bytes
            raise DohyoError(f"{name} cannot be read ({in_one_line(error):.200}); remove or replace it") from error
    if (pixels[..., 3] != 255).any():
        raise DohyoError(f"{name} is partly transparent; put it on a background first")
    rgb = pixels[..., :3]
    return rgb[..., 0] if (rgb == rgb[..., :1]).all() else rgb  # grey saved as colour is grey


def _stacked(paths: Sequence[Path], folder: Path) -> NDArray[np.uint8]:
    """(n, 1 or 3, height, width)."""
    images: list[NDArray[np.uint8]] = []
    for path in paths:
        image = _opened(path, folder)
        height, width = (images or [image])[0].shape[:2]
        if image.shape[:2] != (height, width):
            sizes = f"{image.shape[1]} x {image.shape[0]} and {_shown(paths[0], folder)} {width} x {height}"
            raise DohyoError(
                f"{_shown(path, folder)} is {sizes}; all images must have one size: resize them, or keep those of one size"
            )
        images.append(image)
    colour = any(image.ndim == 3 for image in images)
    pixels = np.empty((len(images), 3 if colour else 1, height, width), np.uint8)
    for i, image in enumerate(images):
        pixels[i] = image.transpose(2, 0, 1) if image.ndim == 3 else image
    return pixels


def _shown(path: Path, folder: Path) -> str:
    """The name of a file in one line: on the disk it may hold anything."""
    return ascii(str(path.relative_to(folder)))[1:-1]
