"""Pictures of runs: real files, and their numbers beside them."""

import json
import math
import resource
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

from dohyo.lab.plots.runs import plot_images, plot_learning_curves, plot_reconstructions
from dohyo.lab.plots.tables import plot_columns, plot_pairs
from real import picture

KEYS = {"epoch", "train_nll", "valid_nll", "learning_rate", "clipped_decoder", "clipped_encoder"}


def records(count: int) -> list[dict[str, Any]]:
    return [
        {
            "epoch": epoch,
            "train_nll": 90 + 60 * math.exp(-epoch / 5),
            "valid_nll": 92 + 60 * math.exp(-epoch / 5) + (epoch - count / 2) ** 2 / count**2,
            "learning_rate": 1e-3 * 0.8 ** (epoch // 10),
            "clipped_decoder": 0.4,
            "clipped_encoder": 0.0,
            "seconds": 1.5,
        }
        for epoch in range(1, count + 1)
    ]


def check(path: Path) -> dict[str, Any]:
    """The picture is one, nothing but it and its numbers is there; the numbers."""
    assert {file.name for file in path.parent.iterdir()} == {path.name, path.with_suffix(".json").name}
    return picture(path)


# --- learning curves


@pytest.mark.parametrize("count", [1, 2, 30, 400])
def test_learning_curves(count: int, tmp_path: Path) -> None:
    given = records(count)
    plot_learning_curves(given, tmp_path / "curves.png")
    numbers = check(tmp_path / "curves.png")
    assert set(numbers) == KEYS | {"best", "nll_axis"}
    for key in KEYS:
        assert numbers[key] == pytest.approx([record[key] for record in given], rel=1e-5)
    best = min(given, key=lambda record: record["valid_nll"])
    assert numbers["best"] == {"epoch": best["epoch"], "valid_nll": pytest.approx(best["valid_nll"], rel=1e-5)}
    low, high = numbers["nll_axis"]
    assert low < best["valid_nll"] < high < 160
    assert low > 80


@pytest.mark.parametrize("count", [4, 30, 400])
def test_outliers_do_not_set_the_axis(count: int, tmp_path: Path) -> None:
    given = records(count)
    plot_learning_curves(given, tmp_path / "clean.png")
    given[count // 2]["train_nll"] = 1e7
    given[-1]["train_nll"] = -1e5 if count > 4 else 1e9
    plot_learning_curves(given, tmp_path / "heavy.png")
    clean, heavy = (json.loads((tmp_path / f"{name}.json").read_text())["nll_axis"] for name in ("clean", "heavy"))
    assert clean[0] - 10 < heavy[0] < heavy[1] < clean[1] + 10
    assert json.loads((tmp_path / "heavy.json").read_text())["train_nll"][count // 2] == 1e7


def test_values_that_are_missing(tmp_path: Path) -> None:
    given = records(25)
    given[3]["valid_nll"], given[5]["train_nll"], given[7]["train_nll"] = None, math.nan, -math.inf
    plot_learning_curves(given, tmp_path / "curves.png")
    numbers = check(tmp_path / "curves.png")
    assert numbers["valid_nll"][3] is numbers["train_nll"][5] is numbers["train_nll"][7] is None
    for record in given:
        record["valid_nll"] = record["train_nll"] = None
    plot_learning_curves(given, tmp_path / "curves.png")
    assert check(tmp_path / "curves.png")["best"] is None


def test_records_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records"):
        plot_learning_curves([], tmp_path / "curves.png")
    with pytest.raises(ValueError, match="lacks learning_rate, valid_nll; each needs epoch"):
        plot_learning_curves([*records(2), {"epoch": 3, "train_nll": 1, "clipped_decoder": 0, "clipped_encoder": 0}], tmp_path)
    assert not list(tmp_path.iterdir())


# --- images


@pytest.mark.parametrize("shape", [(8, 8), (3, 9), (1, 4, 5), (3, 4, 5), (4, 5, 3)])
@pytest.mark.parametrize("count", [1, 7])
def test_images_and_reconstructions(count: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    images = torch.rand(count, math.prod(shape))
    plot_images(images, shape, tmp_path / "a" / "images.png", title="Samples")
    numbers = check(tmp_path / "a" / "images.png")
    assert numbers["shape"] == list(shape)
    assert numbers["columns"] == (1 if count == 1 else 3)
    torch.testing.assert_close(torch.tensor(numbers["images"], dtype=images.dtype), images, rtol=1e-5, atol=1e-6)
    plot_reconstructions(images.view(-1, *shape), images.mul(3).sub(1).requires_grad_(), shape, tmp_path / "b" / "pairs.png")
    numbers = check(tmp_path / "b" / "pairs.png")
    torch.testing.assert_close(torch.tensor(numbers["x"], dtype=images.dtype), images, rtol=1e-5, atol=1e-6)
    below = torch.tensor(numbers["reconstructions"], dtype=images.dtype)
    torch.testing.assert_close(below, 3 * images - 1, rtol=1e-5, atol=1e-5)


def test_each_image_is_where_it_belongs(tmp_path: Path) -> None:
    """The picture itself: black and white tiles in reading order, data above reconstructions."""
    images = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])[:, None].expand(-1, 64)
    plot_images(images, (8, 8), tmp_path / "images.png")
    assert brightness(tmp_path / "images.png", rows=2, columns=3) == [[0, 1, 1], [0, 0, 1]]  # white where there is none
    plot_reconstructions(torch.zeros(4, 64), torch.ones(4, 64), (8, 8), tmp_path / "pairs.png")
    assert brightness(tmp_path / "pairs.png", rows=2, columns=4) == [[0] * 4, [1] * 4]


def test_colours(tmp_path: Path) -> None:
    """Red, then green; channels first or last."""
    first = torch.zeros(2, 3, 16)
    first[0, 0] = first[1, 1] = 1
    for name, images, shape in (("first", first, (3, 4, 4)), ("last", first.mT, (4, 4, 3))):
        plot_images(images.reshape(2, 48), shape, tmp_path / f"{name}.png")
        pixels = matplotlib.image.imread(tmp_path / f"{name}.png")
        height, width = pixels.shape[:2]
        assert pixels[height // 2, width // 4, :3].tolist() == [1, 0, 0]
        assert pixels[height // 2, 3 * width // 4, :3].tolist() == [0, 1, 0]


def brightness(path: Path, rows: int, columns: int) -> list[list[int]]:
    """0 or 1 at the centre of each tile. The first dark pixel near the top, above the labels' letters, is the left end."""
    pixels = torch.from_numpy(matplotlib.image.imread(path))[..., :3].mean(-1)
    left = int((pixels[len(pixels) // 10] < 0.5).nonzero()[0])
    height, width = len(pixels) / rows, (pixels.shape[1] - left) / columns
    centres = [[pixels[int((i + 0.5) * height), left + int((j + 0.5) * width)] for j in range(columns)] for i in range(rows)]
    return [[round(float(value)) for value in row] for row in centres]


def test_pixels_that_are_not_finite(tmp_path: Path) -> None:
    images = torch.rand(2, 4)
    images[0, 0], images[1, 3] = math.nan, math.inf
    plot_images(images, (2, 2), tmp_path / "images.png")
    assert check(tmp_path / "images.png")["images"][0][0] is None
    plot_images(torch.full((2, 4), math.nan), (2, 2), tmp_path / "images.png")


@pytest.mark.parametrize(
    ("images", "shape", "message"),
    [
        (torch.rand(3, 64), (8, 9), r"\(3, 64\), shape \(8, 9\) needs \(n, 72\)"),
        (torch.rand(64), (8, 8), r"needs \(n, 64\)"),
        (torch.rand(3, 8, 9), (8, 8), r"needs \(n, 64\)"),
        (torch.rand(3, 40), (40,), r"must be \(height, width\)"),
        (torch.rand(3, 40), (2, 4, 5), r"must be \(height, width\)"),
        (torch.rand(0, 64), (8, 8), "n at least 1"),
        (torch.rand(3, 64), (-8, -8), r"must be \(height, width\)"),
        (torch.rand(3, 64), (), r"must be \(height, width\)"),
        (torch.rand(3, 0), (0,), r"must be \(height, width\)"),
    ],
)
def test_bad_shapes(images: torch.Tensor, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plot_images(images, shape, tmp_path / "images.png")
    with pytest.raises(ValueError, match=message):
        plot_reconstructions(images, images, shape, tmp_path / "images.png")
    assert not list(tmp_path.iterdir())


def test_other_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 data and 2 reconstructions"):
        plot_reconstructions(torch.rand(3, 4), torch.rand(2, 4), (2, 2), tmp_path / "images.png")
    for name in ("images", "images.json", "images.xyz"):
        with pytest.raises(ValueError, match="the ending of a picture must be"):
            plot_images(torch.rand(3, 4), (2, 2), tmp_path / name)
    assert not list(tmp_path.iterdir())


# --- tables


def table(rows: int) -> torch.Tensor:
    """A normal column, a skewed one, dice and coins, and a constant."""
    z = torch.randn(rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    whole = torch.arange(rows)
    return torch.stack([z, (3 * z).exp(), whole % 6 + 1, (whole % 4 == 0).double(), torch.ones(rows), 1e6 + z], 1)


def test_columns_of_a_table(tmp_path: Path) -> None:
    names = ["z", "$\\frac{1$ a very long name indeed", "die", "coin", "one", "far"]
    plot_columns(table(400), table(1000), names, tmp_path / "marginals.png")
    numbers = check(tmp_path / "marginals.png")
    assert [column["name"] for column in numbers["columns"]] == names
    assert (numbers["of"], numbers["rows"], numbers["samples"]) == (6, 400, 1000)
    for column in numbers["columns"]:
        widths = torch.tensor(column["edges"], dtype=torch.float64).diff()
        for who, heights in (("data", column["data"]), ("model", column["samples"])):
            assert float((widths * torch.tensor(heights)).sum()) == pytest.approx(1 - column["beyond"][who], abs=2e-3)
    skewed, die, coin = numbers["columns"][1:4]
    assert skewed["edges"][-1] < float(table(400)[:, 1].max()) / 5  # a few huge values do not set the axis
    assert die["edges"] == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
    assert coin["data"] == pytest.approx([0.75, 0.25])


def test_the_columns_that_are_shown_and_their_pairs(tmp_path: Path) -> None:
    plot_columns(torch.rand(30, 30), torch.rand(50, 5, 6), (), tmp_path / "marginals.png")
    numbers = check(tmp_path / "marginals.png")
    assert [column["name"] for column in numbers["columns"]] == [f"x{i}" for i in range(1, 25)]
    assert numbers["of"] == 30
    for count, shown in ((1, 1), (2, 2), (6, 4)):
        plot_pairs(table(20)[:, :count], table(900)[:, :count], (), tmp_path / "p" / "pairs.png")
        numbers = check(tmp_path / "p" / "pairs.png")
        assert len(numbers["columns"]) == len(numbers["dots"]["data"][0]) == shown
        assert (len(numbers["dots"]["data"]), len(numbers["dots"]["samples"])) == (20, 50)


def test_samples_that_are_not_finite_or_do_not_fit(tmp_path: Path) -> None:
    samples = torch.full((10, 2), 0.5)
    samples[:5, 0] = math.nan
    plot_columns(torch.rand(20, 2), samples, ("a", "b"), tmp_path / "marginals.png")
    assert check(tmp_path / "marginals.png")["columns"][0]["beyond"]["model"] == 0.5
    with pytest.raises(ValueError, match=r"the data are \(20, 2\), the samples \(10, 3\)"):
        plot_columns(torch.rand(20, 2), torch.rand(10, 3), (), tmp_path / "bad.png")
    with pytest.raises(ValueError, match="there are 1 names"):
        plot_pairs(torch.rand(20, 2), torch.rand(10, 2), ("a",), tmp_path / "bad.png")


# --- files


def test_a_picture_is_replaced_and_other_formats_work(tmp_path: Path) -> None:
    for images in (torch.rand(3, 4), torch.rand(5, 4)):
        plot_images(images, (2, 2), tmp_path / "images.png")
        assert len(check(tmp_path / "images.png")["images"]) == len(images)
    plot_images(torch.rand(3, 4), (2, 2), tmp_path / "other" / "images.pdf")
    assert (tmp_path / "other" / "images.pdf").read_bytes().startswith(b"%PDF")


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "images.png").mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(ValueError, match=r"images\.png: is a folder"):
        plot_images(torch.rand(3, 4), (2, 2), tmp_path / "images.png")
    assert [file.name for file in tmp_path.iterdir()] == ["images.png"]


def test_a_full_disk_leaves_the_old_picture(tmp_path: Path) -> None:
    """No file may be longer than 5,000 bytes: enough for the numbers, too little for the picture."""
    plot_images(torch.zeros(3, 4), (2, 2), tmp_path / "images.png")
    before = (tmp_path / "images.png").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            plot_columns(torch.rand(16, 2), torch.rand(16, 2), (), tmp_path / "images.png")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "images.png").read_bytes() == before
    assert check(tmp_path / "images.png")["images"] == [[0] * 4] * 3
