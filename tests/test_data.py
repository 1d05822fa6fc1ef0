"""Data: the digits in the package, and a user's own files."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dohyo.lab.data import NAMES, Dataset, load


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


def test_names() -> None:
    assert NAMES == ("digits", "mnist", "mnist-static", "omniglot")
