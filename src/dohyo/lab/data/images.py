"""A folder of images of one size, grey or in colour; as in `readers`, errors do not name it."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dohyo.errors import DohyoError, in_one_line
from dohyo.lab.claims import check_memory
from dohyo.lab.data.dataset import Source

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
_MOST_FOLDERS, _MOST_FILES = 10_000, 5_000_000
_GREY, _COLOUR = ("1", "L"), ("RGB", "P", "RGBA", "LA", "PA", "CMYK", "YCbCr")


def read_images(folder: Path) -> Source:
    """The images in a folder and its subfolders, in the order of their names: (n, 1 or 3, height, width), uint8.
    Subfolders `train` and `test`, and perhaps `valid`, are the splits. If one image is in colour, all become so."""
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
    return Source(dict(zip(files, np.split(pixels, ends), strict=True)), white=255)


def _files(folder: Path) -> list[Path]:
    """The images below a folder; hidden files and folders are left out."""
    found, folders, seen = [], 0, 0
    for place, below, names in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".")]
        folders, seen = folders + 1, seen + len(names)
        if folders > _MOST_FOLDERS or seen > _MOST_FILES:
            what = f"{_MOST_FOLDERS} folders" if folders > _MOST_FOLDERS else f"{_MOST_FILES} files"
            raise DohyoError(f"has more than {what} below it; name the folder of the images themselves")
        paths = [Path(place, name) for name in names if name.lower().endswith(ENDINGS) and not name.startswith(".")]
        found += [path for path in paths if path.is_file()]
    return sorted(found)


def _opened(path: Path, folder: Path) -> NDArray[np.uint8]:
    """One image, (height, width) or (height, width, 3)."""
    from PIL import Image  # here, because it takes a while to import

    name = _shown(path, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow only warns about images so large that they may be meant to fill the memory
        try:
            with Image.open(path) as image:
                if image.mode not in _GREY + _COLOUR:
                    raise DohyoError(f"{name} has pixels of the kind {image.mode}; save it with 8 bits for grey or each colour")
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
    pixels = np.empty((0, 1, 0, 0), np.uint8)
    for i, path in enumerate(paths):
        image = _opened(path, folder)
        colour = image.ndim == 3
        if i == 0 or (colour and pixels.shape[1] == 1):
            check_memory(image.size * len(paths), image.itemsize, f"give fewer than these {len(paths)} images, or smaller ones")
        if i == 0:
            pixels = np.empty((len(paths), 3 if colour else 1, *image.shape[:2]), np.uint8)
        height, width = pixels.shape[2:]
        if image.shape[:2] != (height, width):
            sizes = f"{image.shape[1]} x {image.shape[0]} and {_shown(paths[0], folder)} {width} x {height}"
            raise DohyoError(f"{_shown(path, folder)} is {sizes}; all images must have one size: resize, or leave others out")
        if colour and pixels.shape[1] == 1:  # if one is in colour, all become so
            pixels = np.repeat(pixels, 3, axis=1)
        pixels[i] = image.transpose(2, 0, 1) if colour else image
    return pixels


def _shown(path: Path, folder: Path) -> str:
    """The name of a file in one line: on the disk it may hold anything."""
    return ascii(str(path.relative_to(folder)))[1:-1]
