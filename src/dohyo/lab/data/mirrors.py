"""Where the files of public data sets are: in the user's folder, or in a cache that is filled from public mirrors."""

import http.client
import os
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from dohyo.errors import DohyoError
from dohyo.files import replacing
from dohyo.lab.data.dataset import Arrays
from dohyo.lab.data.readers import Reader, UnusableError, decoded

_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_STATIC = tuple(f"{scheme}://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/" for scheme in ("https", "http"))
_OMNIGLOT = ("https://github.com/yburda/iwae/raw/master/", "https://raw.githubusercontent.com/yburda/iwae/master/")

# For each file below the data folder its addresses, tried in turn. The reader checks what they send.
MIRRORS: dict[str, tuple[str, ...]] = {
    **{f"mnist/{name}": tuple(base + name for base in _MNIST)
       for name in ("train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz")},
    **{f"mnist_static/{name}": tuple(base + name for base in _STATIC)
       for name in (f"binarized_mnist_{split}.amat" for split in ("train", "valid", "test"))},
    "omniglot/chardata.mat": tuple(f"{base}datasets/OMNIGLOT/chardata.mat" for base in _OMNIGLOT),
}  # fmt: skip

TIMEOUT = 30.0  # seconds without a byte before the next mirror is tried
_CHUNK = 1 << 16
_FIX = "put the files into a folder and name it with --data-dir or the environment variable DOHYO_DATA"


def data_folder(data_dir: Path | None) -> tuple[Path, bool]:
    """The data folder, and whether it is the cache: the argument, else DOHYO_DATA, else the cache."""
    given = data_dir or os.environ.get("DOHYO_DATA")
    if not given:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dohyo", True
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise DohyoError(f"{folder}: there is no such data folder; correct --data-dir or DOHYO_DATA, or leave both out")
    return folder, False


def find(readers: Mapping[str, Reader], data_dir: Path | None) -> Arrays:
    """The content of the first of several equivalent files that exists; a download if none does and the folder is the cache.
    `readers` maps paths below the data folder to their readers."""
    folder, is_cache = data_folder(data_dir)
    for relative, read in readers.items():
        path = folder / relative
        if path.is_file():
            try:
                return decoded(read, path)
            except UnusableError as error:
                raise DohyoError(f"{path}: {error}; is it truncated or corrupted? Delete it and get it again") from error
    if not is_cache:
        raise DohyoError(f"{folder}: {' or '.join(readers)} is missing; put it there, or give no folder to download it")
    relative = next(relative for relative in readers if relative in MIRRORS)
    return download(folder / relative, MIRRORS[relative], readers[relative])


def download(path: Path, addresses: tuple[str, ...], read: Reader, timeout: float = TIMEOUT) -> Arrays:
    """Fill `path` from the first address that sends a complete and valid file, and return its content."""
    failures = []
    for address in addresses:
        try:
            with replacing(path) as temporary:
                with temporary.open("wb") as file:
                    for chunk in _stream(address, timeout):
                        file.write(chunk)
                return decoded(read, temporary)
        except UnusableError as error:
            failures.append(f"{address} {error}")
        except OSError as error:  # from the disk; the network's are UnusableError
            raise DohyoError(f"{path}: cannot be written ({error.strerror}); make room, or {_FIX}") from error
    raise DohyoError(f"{path}: could not be downloaded: {', '.join(failures)}; {_FIX}")


def _stream(address: str, timeout: float) -> Iterator[bytes]:
    """The bytes at an address in chunks; failures of the network are UnusableError."""
    request = urllib.request.Request(address, headers={"User-Agent": "dohyo"})
    done, total = 0, None
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            while chunk := response.read(_CHUNK):
                done += len(chunk)
                yield chunk
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnusableError(f"failed ({str(error).strip('<>')})") from error
    if total is not None and done != total:
        raise UnusableError(f"broke off after {done} of {total} bytes")
