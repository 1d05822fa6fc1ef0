"""The named data sets: their files, checksums and splits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from dohyo.lab.data.dataset import Arrays, random_state
from dohyo.lab.data.mirrors import find
from dohyo.lab.data.readers import read_amat, read_chardata, read_idx, read_mat, read_omniglot

# Of the content, not of the file: see the readers.
SHA256 = {
    "mnist train": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist test": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist-static train": "43490d4d6ac9002727af4426d8748609fdb7e4094fa65ad8d681ea60082a7a5a",
    "mnist-static valid": "069b4f0beb389b776478c3e872b4df71c95ac4be64d7cbe6d32e24ebac8e6d5e",
    "mnist-static test": "ca0294c3b8d984c7a1dc891015a8eea6f37bae59a34e35ea0fc8c47110a8dd86",
    "omniglot": "98f5410aebad4b4eb938d8289ea5c4daacb5617cd9f059e22b4bcc0599bc2d74",
}


def _digits(data_dir: Path | None) -> Arrays:
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        x = (file["x"] / np.float32(16)).reshape(-1, 8, 8)
    x = x[random_state(0, 0).permutation(len(x))]
    return {"train": x[:1297], "valid": x[1297:1497], "test": x[1497:]}


def _mnist(data_dir: Path | None) -> Arrays:
    arrays = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        readers = {f"mnist/{stem}-images-idx3-ubyte.gz": partial(read_idx, sha256=SHA256[f"mnist {split}"])}
        arrays[split] = find(readers, data_dir)["x"]
    x = arrays["train"]
    return {"train": x[:50_000], "valid": x[50_000:], "test": arrays["test"]}


def _mnist_static(data_dir: Path | None) -> Arrays:
    arrays = {}
    for split in ("train", "valid", "test"):
        stem, sha256 = f"mnist_static/binarized_mnist_{split}", SHA256[f"mnist-static {split}"]
        readers = {f"{stem}.mat": partial(read_mat, sha256=sha256), f"{stem}.amat": partial(read_amat, sha256=sha256)}
        arrays[split] = find(readers, data_dir)["x"]
    return arrays


def _omniglot(data_dir: Path | None) -> Arrays:
    readers = {
        "omniglot/omniglot28.npz": partial(read_omniglot, sha256=SHA256["omniglot"]),
        "omniglot/chardata.mat": partial(read_chardata, train=24_345, test=8_070),
    }
    arrays = find(readers, data_dir)
    x = arrays["train"]
    x = x[np.random.RandomState(123).permutation(len(x))]  # the shuffle of Burda et al.: on their file, their split
    return {"train": x[:23_000], "valid": x[23_000:], "test": arrays["test"]}


SETS: dict[str, Callable[[Path | None], Arrays]] = {
    "digits": _digits,
    "mnist": _mnist,
    "mnist-static": _mnist_static,
    "omniglot": _omniglot,
}
