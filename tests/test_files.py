"""A user's tables and folders of images: real files, good and bad."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dohyo
from dohyo.lab.data import load
from dohyo.lab.data.tables import column_names, read_csv

rng = np.random.default_rng(0)
TABLE = rng.normal(size=(40, 3)).round(6)


def text(rows: Any, delimiter: str = ",", end: str = "\n") -> str:
    return "".join(delimiter.join(map(str, row)) + end for row in rows)


def line(error: Any) -> str:
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    return str(error.value)


# --- tables


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        (text(TABLE), ("column 1", "column 2", "column 3")),
        (text([["height", "weight", "$x^2$"], *TABLE]), ("height", "weight", "$x^2$")),
        ("\ufeff" + text([["a", '"b, c"', ""], *TABLE]), ("a", "b, c", "column 3")),
        (text([["a", "b", "c"], *TABLE], ";", "\r\n") + "\r\n\r\n", ("a", "b", "c")),
        (text([["a", "a", "../../etc"], *TABLE], "\t"), ("a", "a", "../../etc")),
        (text([["a\x07\u202e", '"b\nc"', "d" * 100], *TABLE]), ("a", "b c", "d" * 37 + "...")),
    ],
)
def test_a_csv_file(content: str, columns: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(content, encoding="utf-8")
    data = load(str(tmp_path / "mine.csv"))
    assert (data.name, data.kind, data.shape) == ("mine.csv", "real", (3,))
    assert tuple(name.strip() for name in data.columns) == columns
    everything = torch.cat([data.train, data.valid, data.test])
    assert sorted(everything[:, 0].tolist()) == sorted(TABLE[:, 0].astype(np.float32).tolist())
    assert len(data.test) == 4
    assert "floats from" in data.about
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]  # names from a file are never paths


def test_what_the_numbers_of_a_table_are(tmp_path: Path) -> None:
    def loaded(array: Any, **options: Any) -> Any:
        (tmp_path / "t.csv").write_text(text(array))
        return load(str(tmp_path / "t.csv"), **options)

    levels = np.arange(80)[::-1].reshape(20, 4) % 17
    assert loaded(levels % 2).kind == "binary"
    assert loaded(levels * 1000 - 3).kind == "real"  # neither bits nor grey
    before, levels[0, 0] = levels[0, 0], 255
    assert (loaded(levels).kind, loaded(levels).about) == ("grey", "whole numbers from 0 to 255, divided by 255, read as grey")
    levels[0, 0] = before
    for ambiguous in (levels, levels.astype(float), levels * 15):
        with pytest.raises(dohyo.DohyoError, match=r"t.csv: these are whole numbers from 0 to .*--data-white .*--data-kind real"):
            loaded(ambiguous)
    with pytest.raises(dohyo.DohyoError, match=r"floats from 0 to 1: .*--data-white 1 .*--data-kind real"):
        loaded(levels / 16)
    white = loaded(levels, white=16)
    assert (white.kind, float(white.train.max()), white.about) == (
        "grey",
        1.0,
        "whole numbers from 0 to 16, divided by 16, read as grey",
    )
    assert (loaded(levels, kind="real").train.max(), loaded(levels / 16, kind="grey").kind) == (16, "grey")
    shaped = loaded(levels, kind="real", shape=(1, 2, 2))
    assert (shaped.train.shape, shaped.shape, shaped.columns) == ((16, 1, 2, 2), (1, 2, 2), ())
    assert torch.equal(shaped.flat().train, loaded(levels, kind="real").train)


ROWS = text([[1.5, 2]] * 20)
BAD_TABLES = {
    "empty": ("", "it is empty"),
    "blank lines": ("\n \n\n", "it is empty"),
    "only a header": ("a,b\n", "a header and no rows"),
    "ragged": (ROWS + "1,2,3\n" + ROWS, "line 21 has 3 cells, but the first line has 2"),
    "short": ("a,b\n" + ROWS + "1\n", "line 22 has 1 cells"),
    "words": ("name,b\n" + ROWS + "Ada,2\n", "line 22, name: the cell is 'Ada', not a number"),
    "empty cell": ("a,b\n" + ROWS + "1,\n", "line 22, b: the cell is empty"),
    "empty cells": ("a,b\n" + ROWS + ",\n", "line 22, a: the cell is empty"),
    "nan": ("a,b\n" + ROWS + "1,nan\n", "1 of 42 numbers in the table, first in datum 21, b, are NaN"),
    "inf": ("a,b\n" + ROWS + "1,1e99\n", "beyond float32"),
    "commas in numbers": ("a;b\n1,5;2\n" * 12, "line 2, a: the cell is '1,5', not a number"),
    "an index": (",a\n" + text((i, 0.5) for i in range(20)), "first column has no name and counts the rows"),
    "numbers as names": (text([range(5), *rng.normal(size=(20, 5))]), "first line counts 0, 1, 2"),
    "a gap in line 1": ("1,,3\n" + text([[1, 2, 3]] * 20), "first line has numbers and empty cells"),
    "few": ("a,b\n1,2\n", r"shape \(1, 2\) is 1 data"),
    "a huge field": ("a" * 200_000 + ",b\n" + ROWS, "field larger than field limit"),
    "a huge cell": ("a,b\n" + ROWS + "1," + "x" * 100_000 + "\n", r"line 22, b: the cell is 'x{37}\.\.\.', not a number"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables(case: str, tmp_path: Path) -> None:
    content, message = BAD_TABLES[case]
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(dohyo.DohyoError, match=message) as error:
        load(str(tmp_path / "bad.csv"))
    assert line(error).startswith(f"{tmp_path / 'bad.csv'}: ")


def test_bytes_that_are_no_table(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_bytes(b"a,b\n\xff\xfe,2\n")
    with pytest.raises(dohyo.DohyoError, match="not text in UTF-8") as error:
        load(str(tmp_path / "bad.csv"))
    line(error)
    for _ in range(100):  # anything at all: numbers or one line
        (tmp_path / "bad.csv").write_bytes(rng.integers(0, 256, 60, dtype=np.uint8).tobytes())
        try:
            read_csv(tmp_path / "bad.csv")
        except dohyo.DohyoError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def saved(**columns: Any) -> str:
        parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
        return str(tmp_path / "t.parquet")

    data = load(saved(a=TABLE[:, 0], b=np.arange(40)))
    assert (data.kind, data.shape, data.columns) == ("real", (2,), ("a", "b"))
    monkeypatch.setattr("dohyo.lab.claims._memory", lambda: 32 * 80.0)
    for columns, message in (
        ({"a": [0] * 50, "b": [0] * 50}, "100 numbers take up to"),
        ({"a": TABLE[:, 0], "b": ["x"] * 40}, "b holds string"),
        ({"a": [1.0, None] * 20}, "20 of 40 numbers in the table, first in datum 2, a, are NaN"),
        ({"a": [[1.0]] * 20}, "a holds list"),
        ({"a": []}, "it is empty"),
    ):
        with pytest.raises(dohyo.DohyoError, match=message) as error:
            load(saved(**columns))
        line(error)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(dohyo.DohyoError, match="is it a Parquet file") as error:
        load(str(tmp_path / "t.parquet"))
    line(error)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"")
    with pytest.raises(dohyo.DohyoError, match="pip install pyarrow"):
        load(str(tmp_path / "t.parquet"))


def test_columns_without_names_are_counted() -> None:
    assert column_names(["a", " ", ""]) == ("a", "column 2", "column 3")


# --- images


def images(folder: Path, count: int = 12, mode: str = "L", size: tuple[int, int] = (5, 4), ending: str = "png") -> np.ndarray:
    """`count` images of a width and height in a folder; their pixels, (count, height, width[, colours])."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (count, size[1], size[0], *([3] if mode == "RGB" else [])), dtype=np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{i:03}.{ending}")
    return pixels


def everything(data: Any) -> np.ndarray:
    """All data in an order of their own, as bytes."""
    return np.sort((torch.cat([data.train, data.valid, data.test]) * 255).round().numpy().astype(np.uint8).reshape(-1))


def test_a_folder_of_grey_images(tmp_path: Path) -> None:
    pixels = np.concatenate([images(tmp_path / "x/b"), images(tmp_path / "x/a", ending="bmp")])
    (tmp_path / "x/readme.txt").write_text("not an image")
    images(tmp_path / "x/.hidden", 1, size=(9, 9))
    data = load(str(tmp_path / "x"))
    assert (data.name, data.kind, data.shape) == ("x", "grey", (1, 4, 5))
    assert data.about == f"whole numbers from {pixels.min()} to {pixels.max()}, divided by 255, read as grey"
    assert np.array_equal(everything(load(str(tmp_path / "x"), kind="real")), np.sort(pixels.reshape(-1)))
    first = load(str(tmp_path / "x"), kind="real", seed=3)
    assert torch.equal(first.train, load(f"{tmp_path}/x/", kind="real", seed=3).train)
    assert any(torch.equal(row, torch.from_numpy(pixels[12]).float()[None] / 255) for row in torch.cat([first.train, first.test]))


def test_colour_and_splits(tmp_path: Path) -> None:
    parts = {split: images(tmp_path / "x" / split, 11, "RGB") for split in ("train", "valid", "test")}
    data = load(str(tmp_path / "x"))
    assert (data.kind, data.shape) == ("real", (3, 4, 5))
    for split, pixels in parts.items():
        assert torch.equal(getattr(data, split), torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32)) / 255)
    Image.fromarray(parts["train"][0][..., 0]).save(tmp_path / "x/train/000.png")  # one grey image among those in colour
    data = load(str(tmp_path / "x"))
    assert data.shape == (3, 4, 5)
    assert torch.equal(data.train[0, 0], data.train[0, 2])
    Image.fromarray(parts["train"][0]).convert("RGBA").save(tmp_path / "x/train/000.png")
    assert torch.equal(load(str(tmp_path / "x")).train[0], torch.from_numpy(parts["train"][0].transpose(2, 0, 1)).float() / 255)


def test_images_saved_in_other_ways(tmp_path: Path) -> None:
    for i in range(12):
        bits = Image.fromarray((rng.random((4, 5)) > 0.5).astype(np.uint8) * 255)
        (bits.convert("1") if i % 2 else bits.convert("RGB")).save(tmp_path / f"{i}.png")  # bits, and grey saved as colour
    assert set(load(str(tmp_path)).train.unique().tolist()) == {0.0, 1.0}


def spoiled(kind: str, folder: Path) -> None:
    images(folder)
    target = folder / "003.png"
    if kind == "size":
        Image.new("L", (6, 4)).save(target)
    elif kind == "truncated":
        target.write_bytes(target.read_bytes()[:40])
    elif kind == "no image":
        target.write_text("hello")
    elif kind == "16 bits":
        Image.fromarray(np.zeros((4, 5), np.uint16)).save(target)
    elif kind == "transparent":
        Image.new("RGBA", (5, 4), (1, 2, 3, 4)).save(target)
    elif kind == "a bomb":
        buffer = io.BytesIO()
        Image.new("1", (12_000, 12_000)).save(buffer, "PNG")
        target.write_bytes(buffer.getvalue())
    elif kind == "a strange name":
        target.rename(folder / "3\n\x1b[31m.png")
        Image.new("L", (6, 4)).save(folder / "3\n\x1b[31m.png")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("size", r"003.png is 6 x 4 and 000.png 5 x 4; all images must have one size"),
        ("truncated", "003.png cannot be read"),
        ("no image", "003.png cannot be read"),
        ("16 bits", "003.png has pixels of the kind I;16"),
        ("transparent", "003.png is partly transparent"),
        ("a bomb", "003.png cannot be read .*DecompressionBomb"),
        ("a strange name", r"3\\n\\x1b\[31m.png is 6 x 4"),
    ],
)
def test_bad_images(kind: str, message: str, tmp_path: Path) -> None:
    spoiled(kind, tmp_path / "x")
    with pytest.raises(dohyo.DohyoError, match=message) as error:
        load(str(tmp_path / "x"))
    assert line(error).startswith(f"{tmp_path / 'x'}: ")


def test_bad_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images(tmp_path / "few", 3)
    images(tmp_path / "half/train")
    for name in ("empty", "digits", "half/test"):
        (tmp_path / name).mkdir()
    assert load("digits").name == "digits"  # the name comes first
    cases = {
        "empty": "empty: it holds no images",
        "./digits": "digits: it holds no images",
        "half": "half: its subfolder test holds no images",
        "few": r"few: shape \(3, 1, 4, 5\) is 3 data",
    }
    for name, message in cases.items():
        with pytest.raises(dohyo.DohyoError, match=message) as error:
            load(name)
        line(error)
