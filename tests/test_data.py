"""Data: real files, a real HTTP server on this machine, and the real data sets where DOHYO_DATA names their folder."""

import contextlib
import gzip
import hashlib
import http.server
import math
import os
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from torch import Tensor

from dohyo.lab.data import NAMES, Dataset, load
from dohyo.lab.data.mirrors import MIRRORS, download, find
from dohyo.lab.data.public import SHA256
from dohyo.lab.data.readers import read_amat, read_chardata, read_idx, read_mat

REAL = os.environ.get("DOHYO_DATA")
real_files = pytest.mark.skipif(
    not REAL, reason="needs the real files: set DOHYO_DATA to the folder that holds mnist/ and others"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no folder that happens to be set outside."""
    monkeypatch.delenv("DOHYO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "dohyo"


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def line_of(error: pytest.ExceptionInfo[ValueError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# --- digits, and what every data set does ---


def test_digits() -> None:
    digits = load("digits")
    assert [len(digits.train), len(digits.valid), len(digits.test)] == [1297, 200, 300]
    assert (digits.name, digits.kind, digits.shape) == ("digits", "grey", (1, 8, 8))
    assert digits.train.dtype == digits.valid.dtype == digits.test.dtype == torch.float32
    assert torch.equal(digits.train * 16, (digits.train * 16).round())
    assert (digits.train.min(), digits.train.max()) == (0, 1)
    assert set(digits.valid.unique().tolist()) == set(digits.test.unique().tolist()) == {0.0, 1.0}


def test_digits_are_a_fixed_permutation_of_the_bundled_ones() -> None:
    first, other = load("digits", kind="real", seed=0), load("digits", kind="real", seed=5)
    assert all(torch.equal(getattr(first, split), getattr(other, split)) for split in ("train", "valid", "test"))
    with np.load(Path(load.__code__.co_filename).with_name("digits.npz")) as file:
        bundled = file["x"]
    everything = (torch.cat([first.train, first.valid, first.test]).numpy() * 16).astype(np.uint8)
    assert sorted(map(bytes, everything)) == sorted(map(bytes, bundled))
    assert not np.array_equal(everything, bundled)
    # Frozen: another permutation would make old results and new ones different experiments.
    assert digest(everything) == "3f675585b8a81366905a8ac238acc2ef7daec76b6448c0de16fe7c0d25734dce"


def test_valid_and_test_are_binarised_once_with_the_seed() -> None:
    first, again, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    for split in ("valid", "test"):
        assert torch.equal(getattr(first, split), getattr(again, split))
        assert not torch.equal(getattr(first, split), getattr(other, split))
    assert torch.equal(first.train, other.train)
    assert (
        digest(first.test.numpy().astype(np.uint8)) == "aa11dec50868798e7722029dc8d6adefb0800fb8051276bf4a3a4edcf0d661bd"
    )  # the same on every machine and version


def standard_errors(drawn: Tensor, probability: Tensor) -> float:
    drawn, probability = drawn.double(), probability.double()
    return float((drawn - probability).sum().abs() / (probability * (1 - probability)).sum().sqrt())


def test_binarisation_has_the_right_mean() -> None:
    grey, binary = load("digits", kind="real"), load("digits")
    torch.manual_seed(0)
    assert standard_errors(binary.train_batch(torch.arange(1297)), binary.train) < 4.9
    assert standard_errors(binary.valid, grey.valid) < 4.9
    assert standard_errors(binary.test, grey.test) < 4.9
    assert standard_errors((grey.test > 0.5).float(), grey.test) > 4.9  # the power twin: thresholding
    certain = (grey.test == 0) | (grey.test == 1)
    assert torch.equal(binary.test[certain], grey.test[certain])


def test_training_batches_are_binarised_anew() -> None:
    digits, index = load("digits"), torch.tensor([7, 3, 7])
    torch.manual_seed(0)
    first, second = digits.train_batch(index), digits.train_batch(index)
    assert first.shape == (3, 1, 8, 8)
    assert set(first.unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[2])
    torch.manual_seed(0)
    assert torch.equal(first, digits.train_batch(index))
    certain = (digits.train[index] == 0) | (digits.train[index] == 1)
    assert torch.equal(first[certain], digits.train[index][certain])


def test_valid_and_test_have_noise_of_their_own(tmp_path: Path) -> None:
    half = np.full((100, 20), 0.5)
    np.savez(tmp_path / "half.npz", train=half, valid=half, test=half)
    data = load(str(tmp_path / "half.npz"))
    assert not torch.equal(data.valid, data.test)


@pytest.mark.parametrize("kind", ["binary", "real"])
def test_other_batches_are_the_data_and_use_no_randomness(kind: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40).reshape(20, 2) % 2)
    data = load(str(tmp_path / "x.npy"), kind=kind)
    before = torch.random.get_rng_state()
    assert torch.equal(data.train_batch(torch.tensor([1, 0])), data.train[[1, 0]])
    assert torch.equal(before, torch.random.get_rng_state())


def test_loading_leaves_the_global_generators_alone() -> None:
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    load("digits")
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002


def test_to_moves_all_splits() -> None:
    there = load("digits").to("meta")
    assert {split.device.type for split in (there.train, there.valid, there.test)} == {"meta"}
    assert (there.kind, there.shape, there.name) == ("grey", (1, 8, 8), "digits")


# --- a user's files ---

rng = np.random.default_rng(0)
UNIFORM = rng.random((50, 4, 3))


@pytest.mark.parametrize(
    ("array", "forced", "kind", "train"),
    [
        ((UNIFORM > 0.5).astype(np.uint8), "auto", "binary", {0.0, 1.0}),
        ((UNIFORM > 0.5).astype(np.float64), "auto", "binary", {0.0, 1.0}),
        (UNIFORM > 0.5, "auto", "binary", {0.0, 1.0}),
        ((UNIFORM > 0.5).astype(np.uint8), "grey", "grey", {0.0, 1.0}),  # already probabilities: not divided by 255
        ((UNIFORM > 0.5) * np.uint8(255), "auto", "grey", {0.0, 1.0}),
        ((UNIFORM > 0.5) * np.int64(300) - 7, "auto", "real", {-7.0, 293.0}),
        ((UNIFORM > 0.5) * np.float16(0.25), "auto", "grey", {0.0, 0.25}),
        ((UNIFORM > 0.5) * 255.0, "auto", "real", {0.0, 255.0}),
        ((UNIFORM > 0.5) * 1.5 - 1, "auto", "real", {-1.0, 0.5}),
        ((UNIFORM > 0.5) * 0.5, "real", "real", {0.0, 0.5}),
        ((UNIFORM > 0.5) * 7 - 3, "real", "real", {-3.0, 4.0}),
    ],
)
def test_kinds(array: np.ndarray, forced: str, kind: str, train: set[float], tmp_path: Path) -> None:
    np.save(tmp_path / "mine.npy", array)
    data = load(str(tmp_path / "mine.npy"), kind=forced)
    assert (data.kind, data.shape, data.name) == (kind, (4, 3), "mine.npy")
    assert set(data.train.unique().tolist()) == train
    assert [len(data.train), len(data.valid), len(data.test)] == [40, 5, 5]
    assert data.train.dtype == torch.float32
    if kind == "grey":
        assert set(torch.cat([data.valid, data.test]).unique().tolist()) == {0.0, 1.0}


def rows(data: Dataset, *splits: str) -> list[float]:
    return [float(row[0]) for split in splits for row in getattr(data, split)]


def test_one_array_is_split_at_random_with_the_seed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(137.0) + 0.5)  # a vector: data of one number
    np.savez(tmp_path / "x.npz", anything=np.arange(137.0) + 0.5)
    data = load(str(tmp_path / "x.npy"))
    assert data.shape == (1,)
    assert [len(data.train), len(data.valid), len(data.test)] == [111, 13, 13]
    assert sorted(rows(data, "train", "valid", "test")) == [i + 0.5 for i in range(137)]
    assert rows(data, "test") != sorted(rows(data, "test"))
    assert rows(data, "train", "valid", "test") == rows(load(str(tmp_path / "x.npz")), "train", "valid", "test")
    assert set(rows(data, "test")) != set(rows(load(str(tmp_path / "x.npy"), seed=1), "test"))


def test_named_splits_are_kept(tmp_path: Path) -> None:
    x = np.arange(60.0).reshape(20, 3)
    np.savez(tmp_path / "a.npz", train=x[:12], valid=x[12:15], test=x[15:], labels=np.zeros(20))
    data = load(str(tmp_path / "a.npz"))
    assert torch.equal(torch.cat([data.train, data.valid, data.test]), torch.from_numpy(x).float())
    np.savez(tmp_path / "b.npz", train=x[:15], test=x[15:], train_labels=np.array([{}], dtype=object))
    data = load(str(tmp_path / "b.npz"))
    assert [len(data.train), len(data.valid)] == [14, 1]
    assert sorted(rows(data, "train", "valid")) == x[:15, 0].tolist()
    assert rows(data, "test") == x[15:, 0].tolist()


def with_bad(value: float) -> np.ndarray:
    array = np.zeros((20, 2, 2))
    array[4, 1, 0] = value
    return array


GREY = np.full((20, 2), 0.5)
BAD_ARRAYS = {
    "nan": (with_bad(math.nan), {}, "1 of 80 numbers in the array, first in datum 5, place 3, are NaN"),
    "inf": (with_bad(-math.inf), {}, "infinite"),
    "beyond float32": (with_bad(1e300), {}, "beyond float32"),
    "empty": (np.zeros((0, 4)), {}, r"the array is empty, of shape \(0, 4\)"),
    "no numbers": (np.zeros((20, 0)), {}, r"the array is empty, of shape \(20, 0\)"),
    "a number": (np.float32(3), {}, r"the array is empty, of shape \(\)"),
    "nine": (np.zeros((9, 4)), {}, "is 9 data; at least 10"),
    "words": (np.array(["a"] * 20), {}, "the array holds <U1; data are real numbers"),
    "complex": (np.zeros(20, complex), {}, "the array holds complex128"),
    "objects": (np.array([{}] * 20, dtype=object), {}, "cannot be read .*numpy.save"),
    "unclear integers": (np.arange(17), {}, "whole numbers from 0 to 16: grey values .* --data-white 16 .* --data-kind real"),
    "unclear grey integers": (np.arange(17), {"kind": "grey"}, "give --data-white 16"),
    "too dark a white": (np.arange(17), {"white": 15}, "white is 15, but these are whole numbers from 0 to 16"),
    "negative grey": (-np.arange(17), {"white": 15}, "black is 0"),
    "another shape": (GREY, {"shape": (3, 1)}, r"a datum is \(2,\), 2 numbers, and the shape asked for is \(3, 1\)"),
    "not binary": (np.full((20, 2), 0.5), {"kind": "binary"}, r"0 and 1 only, but these are floats from 0.5 to 0.5; threshold"),
    "not grey": (np.full((20, 2), 255.0), {"kind": "grey"}, r"\[0, 1\], .* floats from 255 to 255; rescale"),
    "not grey integers": (np.arange(300), {"kind": "grey"}, "0 to 255, but these are whole numbers from 0 to 299"),
    "wrong kind": (GREY, {"kind": "gray"}, "unknown kind of data 'gray': did you mean 'grey'"),
    "wrong seed": (GREY, {"seed": -1}, "seed of the data is -1"),
    "several": ({"a": GREY, "b": GREY}, {}, r"2 arrays \(a, b\); keep one, or name them train, valid and test"),
    "no test": ({"train": GREY, "valid": GREY}, {}, "holds 2 arrays"),
    "nothing": ({}, {}, "holds 0 arrays"),
    "few to train on": ({"train": GREY[:5], "valid": GREY, "test": GREY}, {}, "is 5 data"),
    "empty test": ({"train": GREY, "test": GREY[:0]}, {}, "test is empty"),
    "unequal shapes": ({"train": GREY, "test": GREY[:, :1]}, {}, r"shape \(1,\) in test and \(2,\) in train"),
    "mixed types": ({"train": GREY, "test": GREY > 0}, {}, "test holds bool and train float64"),
    "nan in test": ({"train": with_bad(0), "test": with_bad(math.nan)}, {}, "80 numbers in test, first in datum 5, place 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays(case: str, tmp_path: Path) -> None:
    content, arguments, match = BAD_ARRAYS[case]
    path = tmp_path / ("bad.npz" if isinstance(content, dict) else "bad.npy")
    if isinstance(content, dict):
        np.savez(path, **content)
    else:
        np.save(path, content)
    with pytest.raises(ValueError, match=match) as error:
        load(str(path), **arguments)
    assert arguments.keys() & {"seed"} or case == "wrong kind" or line_of(error).startswith(f"{path}: ")


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_damaged_files(ending: str, tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", UNIFORM)
    np.savez_compressed(tmp_path / "whole.npz", UNIFORM)
    whole = (tmp_path / f"whole.{ending}").read_bytes()
    path = tmp_path / f"bad.{ending}"
    for content in (b"", b"hello\n" * 100, b"\x80\x04]\x94.", whole[:5], whole[:100], whole[:-1], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read") as error:
            load(str(path))
        assert line_of(error).startswith(f"{path}: ")
        assert "read ()" not in line_of(error)  # a reason is given
        assert "pickle" not in line_of(error)


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_flipped_bytes_are_an_error_or_other_data(ending: str, tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", UNIFORM[:12])
    np.savez_compressed(tmp_path / "whole.npz", UNIFORM[:12])
    whole = (tmp_path / f"whole.{ending}").read_bytes()
    random = np.random.default_rng(1)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[random.integers(min(len(whole), 200))] = random.integers(256)  # the header is what decides
        (tmp_path / f"bad.{ending}").write_bytes(damaged)
        try:
            load(str(tmp_path / f"bad.{ending}"))
        except ValueError as error:
            assert str(error).startswith(str(tmp_path))  # noqa: PT017


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("minst", "did you mean 'mnist'"),
        ("mnist_static", "did you mean 'mnist-static'"),
        ("qqq", "unknown data set 'qqq': the names are digits, mnist, mnist-static, omniglot; your own is a file"),
        ("", "unknown data set ''"),
        ("absent.npy", "absent.npy: there is no such file"),
        ("nowhere/digits", "nowhere/digits: there is no such file or folder"),
        ("folder.npz", "folder.npz: it holds no images"),
        ("table.xlsx", "table.xlsx: the ending must be .npy, .npz, .csv"),
    ],
)
def test_bad_names(name: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.xlsx").write_text("1,2\n")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ValueError, match=match) as error:
        load(name)
    line_of(error)


# --- how files are read ---

PIXELS = (rng.random((20, 784)) > 0.5).astype(np.uint8)


def amat(pixels: np.ndarray) -> bytes:
    return "".join(" ".join(map(str, row)) + " \n" for row in pixels.tolist()).encode()


def idx(pixels: np.ndarray) -> bytes:
    return np.array([2051, len(pixels), 28, 28], ">i4").tobytes() + pixels.astype(np.uint8).tobytes()


def test_mat_and_amat_agree(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "x.mat", {"X": np.asfortranarray(PIXELS)}, do_compression=True)
    scipy.io.savemat(tmp_path / "double.mat", {"X": PIXELS.astype(np.float64)})
    (tmp_path / "x.amat").write_bytes(amat(PIXELS))
    (tmp_path / "crlf.amat").write_bytes(amat(PIXELS).replace(b" \n", b"\r\n"))
    for name, read in (("x.mat", read_mat), ("double.mat", read_mat), ("x.amat", read_amat), ("crlf.amat", read_amat)):
        assert np.array_equal(read(tmp_path / name, digest(PIXELS))["x"], PIXELS.reshape(-1, 28, 28))
        with pytest.raises(ValueError, match="sha256"):
            read(tmp_path / name, digest(PIXELS[::-1]))
    for wrong in (b"0 1 2 " * 784, b"0 1 0\n", b"0.0 " * 784):
        (tmp_path / "x.amat").write_bytes(wrong)
        with pytest.raises(ValueError, match="784 zeros and ones"):
            read_amat(tmp_path / "x.amat", digest(PIXELS))


def test_chardata_is_turned_upright(tmp_path: Path) -> None:
    pictures = rng.random((7, 28, 28))
    columns = pictures.transpose(0, 2, 1).reshape(7, 784).T
    scipy.io.savemat(tmp_path / "chardata.mat", {"data": columns[:, :5], "testdata": columns[:, 5:]})
    arrays = read_chardata(tmp_path / "chardata.mat", train=5, test=2)
    assert np.array_equal(np.concatenate([arrays["train"], arrays["test"]]), pictures)
    with pytest.raises(ValueError, match="testdata is not a matrix of 784 by 3"):
        read_chardata(tmp_path / "chardata.mat", train=5, test=3)
    for bad in (math.nan, 255.0):
        columns[3, 1] = bad
        scipy.io.savemat(tmp_path / "chardata.mat", {"data": columns[:, :5], "testdata": columns[:, 5:]})
        with pytest.raises(ValueError, match=r"data is not a matrix of 784 by 5 numbers in \[0, 1\]"):
            read_chardata(tmp_path / "chardata.mat", train=5, test=2)


@pytest.fixture
def small_mnist_static(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The .amat files of a data set with few pictures, whose checksums take the place of the real ones."""
    content = {}
    for i, split in enumerate(("train", "valid", "test")):
        pixels = np.roll(PIXELS, i, axis=1)
        monkeypatch.setitem(SHA256, f"mnist-static {split}", digest(pixels))
        content[f"mnist_static/binarized_mnist_{split}.amat"] = amat(pixels)
    return content


def put(folder: Path, content: dict[str, bytes]) -> None:
    for relative, body in content.items():
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        (folder / relative).write_bytes(body)


def test_folders_in_order(
    small_mnist_static: dict[str, bytes], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that lacks the file is an error with its name in it, so the message tells which one was taken."""
    for name in ("argument", "environment"):
        (tmp_path / name).mkdir()
    put(cache, small_mnist_static)
    assert torch.equal(load("mnist-static").flat().valid, torch.from_numpy(np.roll(PIXELS, 1, axis=1)).float())
    assert load("mnist-static").kind == "binary"
    monkeypatch.setenv("DOHYO_DATA", str(tmp_path / "environment"))
    with pytest.raises(ValueError, match=r"environment: mnist_static/binarized_mnist_train.mat or .*amat is missing") as error:
        load("mnist-static")
    line_of(error)
    with pytest.raises(ValueError, match=r"argument: mnist_static/binarized_mnist_train.mat or .*amat is missing"):
        load("mnist-static", tmp_path / "argument")
    put(tmp_path / "argument", small_mnist_static)
    assert load("mnist-static", tmp_path / "argument").shape == (1, 28, 28)
    with pytest.raises(ValueError, match="nowhere: there is no such data folder"):
        load("mnist-static", tmp_path / "nowhere")
    monkeypatch.setenv("DOHYO_DATA", "")
    assert len(load("mnist-static").test) == 20


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_public_file_in_a_folder(damage: str, small_mnist_static: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path, small_mnist_static)
    path = tmp_path / "mnist_static/binarized_mnist_valid.amat"
    body = path.read_bytes()
    flipped = body[:-3] + (b"0" if body[-3:-2] == b"1" else b"1") + body[-2:]
    path.write_bytes({"truncated": body[: len(body) // 2], "changed": flipped, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"cannot be read .*Delete it and get it again") as error:
        load("mnist-static", tmp_path)
    assert line_of(error).startswith(f"{path}: ")


def test_damaged_mat_and_gz(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "x.mat", {"X": PIXELS}, do_compression=True)
    (tmp_path / "x.gz").write_bytes(gzip.compress(idx(PIXELS), mtime=0))
    sha256 = {"x.mat": digest(PIXELS), "x.gz": hashlib.sha256(idx(PIXELS)).hexdigest()}
    random = np.random.default_rng(2)
    for name, read in (("x.mat", read_mat), ("x.gz", read_idx)):
        whole = (tmp_path / name).read_bytes()
        reader = partial(read, sha256=sha256[name])
        expected = find({name: reader}, tmp_path)["x"]
        for cut in (0, 1, 20, 127, 140, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:cut])
            with pytest.raises(ValueError, match="Delete it") as error:
                find({name: reader}, tmp_path)
            line_of(error)
        for _ in range(50):
            damaged = bytearray(whole)
            damaged[random.integers(len(whole))] ^= 1 << random.integers(8)
            (tmp_path / name).write_bytes(damaged)
            try:
                found = find({name: reader}, tmp_path)["x"]
            except ValueError as error:
                assert str(error).startswith(str(tmp_path / name))  # noqa: PT017
            else:  # a byte that carries no content, such as a date
                assert np.array_equal(found, expected)


def test_mnist_has_its_splits_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 70,000 pictures, each with its number in its first three pixels."""
    for name, count, key in (("train", 60_000, "mnist train"), ("t10k", 10_000, "mnist test")):
        pixels = np.zeros((count, 784), np.uint8)
        pixels[:, :3] = np.stack([np.arange(count) // 256, np.arange(count) % 256, np.full(count, 255)], 1)
        monkeypatch.setitem(SHA256, key, hashlib.sha256(idx(pixels)).hexdigest())
        put(tmp_path, {f"mnist/{name}-images-idx3-ubyte.gz": gzip.compress(idx(pixels), 1)})
    data = load("mnist", tmp_path, kind="real")
    for split, numbers in (("train", range(50_000)), ("valid", range(50_000, 60_000)), ("test", range(10_000))):
        x = (getattr(data.flat(), split)[:, :2].double() * 255).round()
        assert torch.equal(x[:, 0] * 256 + x[:, 1], torch.tensor(numbers).double())
    assert data.train.max() == 1


# --- downloads ---


class Server(http.server.ThreadingHTTPServer):
    """Serves `bodies`, a way of failing for each first folder of the address."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: dict[str, bytes] = {}
        self.asked: list[str] = []

    def addresses(self, relative: str, *ways: str) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{self.server_port}/{way}/{relative}" for way in ways)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        way, relative = self.path[1:].split("/", 1)
        body = self.server.bodies[relative]
        if way == "missing":
            self.send_error(404)
            return
        if way == "slow":
            time.sleep(0.4)
        sent = {"truncated": body[: len(body) // 2], "corrupted": body[::-1], "page": b"<html>log in</html>"}.get(way, body)
        self.send_response(200)
        if way != "unsized":
            self.send_header("Content-Length", str(len(body) if way == "truncated" else len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # who asked did not wait
            super().handle()


@pytest.fixture
def server(small_mnist_static: dict[str, bytes]) -> Iterator[Server]:
    with Server() as server:
        server.bodies = small_mnist_static
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


TRAIN = "mnist_static/binarized_mnist_train.amat"
READ = partial(read_amat, sha256=digest(PIXELS))


def test_download_fills_the_cache_once(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for relative in server.bodies:
        monkeypatch.setitem(MIRRORS, relative, server.addresses(relative, "good"))
    first = load("mnist-static")
    assert server.asked == [f"/good/{relative}" for relative in server.bodies]
    assert {relative: (cache / relative).read_bytes() for relative in files_in(cache)} == server.bodies
    again = load("mnist-static")
    assert len(server.asked) == 3
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.flat().train, torch.from_numpy(PIXELS).float())


@pytest.mark.parametrize("way", ["missing", "truncated", "corrupted", "page", "slow"])
def test_the_next_mirror_is_tried(way: str, server: Server, tmp_path: Path) -> None:
    addresses = server.addresses(TRAIN, way, "good", "never")
    x = download(tmp_path / "x.amat", addresses, READ, timeout=0.2)["x"]
    assert np.array_equal(x.reshape(-1, 784), PIXELS)
    assert server.asked == [f"/{way}/{TRAIN}", f"/good/{TRAIN}"]
    assert files_in(tmp_path) == ["x.amat"]
    assert (tmp_path / "x.amat").read_bytes() == server.bodies[TRAIN]


def test_all_mirrors_fail(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = "http://127.0.0.1:1/x"
    monkeypatch.setitem(MIRRORS, TRAIN, (*server.addresses(TRAIN, "missing", "truncated", "corrupted", "page"), closed))
    with pytest.raises(ValueError, match="--data-dir or the environment variable DOHYO_DATA") as error:
        load("mnist-static")
    message = line_of(error)
    assert message.startswith(f"{cache / TRAIN}: could not be downloaded: ")
    half, whole = len(server.bodies[TRAIN]) // 2, len(server.bodies[TRAIN])
    for part in ("HTTP Error 404", f"broke off after {half} of {whole} bytes", "sha256", "zeros and ones", "refused"):
        assert part in message
    assert files_in(cache) == []


def test_in_chunks_and_without_the_size(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dohyo.lab.data.mirrors._CHUNK", 10_000)
    for way in ("good", "unsized"):
        download(tmp_path / way, server.addresses(TRAIN, way), READ)
        assert (tmp_path / way).read_bytes() == server.bodies[TRAIN]


def test_an_interrupted_download_leaves_nothing(server: Server, tmp_path: Path) -> None:
    def interrupt(path: Path) -> dict[str, Any]:
        assert path.stat().st_size > 0  # something is there to clean up
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(tmp_path / "x.amat", server.addresses(TRAIN, "good"), interrupt)
    assert files_in(tmp_path) == []


def test_a_failed_download_keeps_the_old_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x.amat").write_text("old")
    with pytest.raises(ValueError, match="could not be downloaded"):
        download(tmp_path / "x.amat", server.addresses(TRAIN, "corrupted"), READ)
    assert (tmp_path / "x.amat").read_text() == "old"


def test_a_full_disk_is_no_failure_of_the_mirror(server: Server, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a file of more than 1,000 bytes cannot be written
    try:
        with pytest.raises(ValueError, match=r"x.amat: cannot be written \(File too large\); make room") as error:
            download(tmp_path / "x.amat", server.addresses(TRAIN, "good", "never"), READ)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    line_of(error)
    assert len(server.asked) == 1
    assert files_in(tmp_path) == []


def test_every_public_file_has_several_mirrors() -> None:
    assert len(MIRRORS) == 6
    for relative, addresses in MIRRORS.items():
        assert len(set(addresses)) >= 2
        assert all(address.endswith(relative.split("/")[1]) for address in addresses)


# --- the real files ---


@real_files
@pytest.mark.parametrize(
    ("name", "kind", "sizes", "sha256"),
    [
        ("mnist", "grey", [50_000, 10_000, 10_000], "60130709e284feec18db9fc0a71abdd21cabc5994ded3561a706af06c90e91c9"),
        ("mnist-static", "binary", [50_000, 10_000, 10_000], "f53c8930b2d4d9d5c22e7c14483e832ccf9dd7374cd78709deb35a8060de15e0"),
        ("omniglot", "grey", [23_000, 1_345, 8_070], "aeb42e5f1b6e3d14f573a7d1fdc1b293928c61552fd40b4d82925b1ba8463d67"),
    ],
)
def test_real_sets(name: str, kind: str, sizes: list[int], sha256: str) -> None:
    data = load(name, Path(str(REAL)), seed=3)
    assert (data.kind, data.shape) == (kind, (1, 28, 28))
    assert [len(data.train), len(data.valid), len(data.test)] == sizes
    for split in ("train", "valid", "test"):
        x = getattr(data, split)
        assert (x.shape[1:].numel(), x.dtype, float(x.min()), float(x.max())) == (784, torch.float32, 0, 1)
        assert len(x.unique()) == (256 if kind == "grey" and split == "train" else 2)
    everything = torch.cat([data.train, data.valid, data.test]).mul_(255).round_()
    assert digest(everything.numpy().astype(np.uint8)) == sha256  # splits, order and binarisation, to the bit


@real_files
def test_real_mnist_and_its_fixed_binarisation() -> None:
    """The fixed binarisation is one draw from each grey picture, in another order: train and valid mixed, test apart."""
    grey, binary = load("mnist", Path(str(REAL)), kind="real").flat(), load("mnist-static", Path(str(REAL))).flat()
    ones = {split: int(getattr(binary, split).sum(dtype=torch.float64)) for split in ("train", "valid", "test")}
    assert ones == {"train": 5_118_041, "valid": 1_028_036, "test": 1_038_896}
    assert standard_errors(binary.test, grey.test) < 4.9
    drawn = binary.test[:50]
    log_p, log_q = grey.test.clamp_min(1e-9).log(), (1 - grey.test).clamp_min(1e-9).log()
    log_likelihood, origin = (drawn @ log_p.T + (1 - drawn) @ log_q.T).max(1)
    assert len(origin.unique()) == 50
    expected = (grey.test * log_p + (1 - grey.test) * log_q).sum(1)[origin]  # minus the entropy
    assert bool((log_likelihood - expected > -40).all())


@real_files
def test_real_static_files_as_text(tmp_path: Path) -> None:
    pixels = load("mnist-static", Path(str(REAL))).flat().test.numpy().astype(np.uint8)
    (tmp_path / "test.amat").write_bytes(amat(pixels))
    assert np.array_equal(read_amat(tmp_path / "test.amat", SHA256["mnist-static test"])["x"].reshape(-1, 784), pixels)


@real_files
def test_real_mnist_over_http(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for relative in (f"mnist/{stem}-images-idx3-ubyte.gz" for stem in ("train", "t10k")):
        server.bodies[relative] = (Path(str(REAL)) / relative).read_bytes()
        monkeypatch.setitem(MIRRORS, relative, server.addresses(relative, "truncated", "good"))
    downloaded, local = load("mnist"), load("mnist", Path(str(REAL)))
    assert torch.equal(downloaded.train, local.train)
    assert torch.equal(downloaded.test, local.test)
    assert files_in(cache) == ["mnist/t10k-images-idx3-ubyte.gz", "mnist/train-images-idx3-ubyte.gz"]


@real_files
def test_real_omniglot_as_chardata(tmp_path: Path) -> None:
    """The same pictures in Burda's layout give the same data set."""
    with np.load(Path(str(REAL)) / "omniglot/omniglot28.npz") as file:
        pictures = {split: file[split].reshape(-1, 28, 28) for split in ("train", "test")}
    columns = {split: x.transpose(0, 2, 1).reshape(len(x), 784).T / np.float32(255) for split, x in pictures.items()}
    (tmp_path / "omniglot").mkdir()
    scipy.io.savemat(tmp_path / "omniglot/chardata.mat", {"data": columns["train"], "testdata": columns["test"]})
    ours, burda = load("omniglot", Path(str(REAL))), load("omniglot", tmp_path)
    assert all(torch.equal(getattr(ours, split), getattr(burda, split)) for split in ("train", "valid", "test"))


def test_names() -> None:
    assert NAMES == ("digits", "mnist", "mnist-static", "omniglot")
