"""Log-weights that come in pieces: the numbers of all at once, in memory that does not grow; data that are too large for it."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import dohyo
import real
from dohyo import marginal
from dohyo.lab import claims
from dohyo.lab.bank import load_log_weights
from dohyo.lab.data import images, load

FOLDS: list[dohyo.Estimator] = [
    dohyo.ELBO(700),
    dohyo.IWAE(700),
    dohyo.SUMO(10),
    dohyo.SUMO(300, centre=(0.1, -0.2, 0.05)),
    dohyo.SUMO(1, dohyo.PowerLaw(1.5, 4.0, 500)),
    dohyo.MultilevelRR(3),
    dohyo.MultilevelRR(64, centre=(0.1, 0.2)),
    dohyo.MultilevelRR(1, r=0.3, max_level=8),
    dohyo.MultilevelSS(5),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FOLDS), st.integers(0, 2**31), st.lists(st.integers(1, 200), min_size=1, max_size=4),
       st.sampled_from([0.0, 0.3, 0.99]))  # fmt: skip
def test_a_fold_is_the_reduction(estimator: dohyo.Estimator, seed: int, sizes: list[int], zeros: float) -> None:
    """Whatever the pieces are, and where weights are zero too."""
    generator = torch.Generator().manual_seed(seed)
    count = int(estimator.plan(1, generator))
    log_w = 3 * torch.randn(count, generator=generator, dtype=torch.float64) - 80
    log_w[torch.rand(count, generator=generator) < zeros] = -math.inf
    fold, start = estimator.fold(count), 0
    assert fold is not None
    while start < count:
        for size in sizes:
            if start < count:
                fold.add(log_w[start : start + size])
            start += size
    expected = float(estimator.reduce(log_w[None], torch.tensor([count])))
    assert float(fold.value()) == pytest.approx(expected, rel=1e-11)


def source(sd: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: sd * torch.randn(len(rows)) + 0.1 * rows


@pytest.mark.parametrize(
    "estimator", [*FOLDS, dohyo.SymmetricSUMO(4), dohyo.JVI(20)], ids=lambda e: f"{e.name}-{e.expected_cost:.0f}"
)
def test_streamed_estimates_are_the_same(estimator: dohyo.Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise, the same K and, up to rounding, the same numbers, also where the sum of a group ends within a chunk."""

    def estimates() -> torch.Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            return dohyo.estimate(source(2.0), 30, estimator, torch.Generator().manual_seed(1), max_rows=33)

    whole = estimates()
    monkeypatch.setattr(marginal, "AT_ONCE", 100 if estimator.fold(1000) is not None else 400)
    streamed = estimates()
    assert torch.allclose(streamed, whole, rtol=1e-12, atol=0)
    assert streamed.dtype == torch.float64


def test_what_needs_all_at_once_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marginal, "AT_ONCE", 100)
    with torch.no_grad(), pytest.raises(dohyo.DohyoError, match="JVI needs all 101 log-weights of a datum at once, and 100 is"):
        dohyo.estimate(source(1.0), 2, dohyo.JVI(101))
    assert dohyo.estimate(source(1.0), 2, dohyo.JVI(101)).shape == (2,)  # with gradients everything is kept anyway


def test_a_bad_log_weight_is_found_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marginal, "AT_ONCE", 100)
    bad = lambda rows: torch.full((len(rows),), math.nan)  # noqa: E731
    with torch.no_grad(), pytest.raises(dohyo.DohyoError, match="are NaN or"):
        dohyo.estimate(bad, 2, dohyo.IWAE(1000), max_rows=10)


def test_tables_are_measured_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the beginning of a file promises fewer numbers than follow."""
    monkeypatch.setattr(claims, "_memory", lambda: 32 * 5000.0)
    (tmp_path / "x.csv").write_text(f"{'0' * 200}1.5,2\n" * 400 + "0,1\n" * 2000)
    assert len(load_log_weights(tmp_path / "x.csv")) == 2400
    assert len(load(str(tmp_path / "x.csv"), kind="real").train) == 1920
    monkeypatch.setattr(claims, "_memory", lambda: 32 * 4000.0)
    for read in (load_log_weights, lambda path: load(str(path), kind="real")):
        with pytest.raises(dohyo.DohyoError, match=r"x\.csv: 4002 numbers take up to 0\.0 GB of memory"):
            read(tmp_path / "x.csv")


def test_images_are_counted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}").mkdir()
        Image.new("RGB" if i == 11 else "L", (10, 10), (i, 3, 3) if i == 11 else i).save(tmp_path / f"{i:02}/x.png")
    monkeypatch.setattr(claims, "_memory", lambda: 12 * 6000.0)
    assert load(str(tmp_path)).shape == (3, 10, 10)
    for memory, numbers in ((12 * 5999.0, 6000), (12 * 1999.0, 2000)):  # refused at the first in colour, and at the first of all
        monkeypatch.setattr(claims, "_memory", lambda memory=memory: memory)
        with pytest.raises(dohyo.DohyoError, match=f"{numbers} numbers take .* give fewer than these 20 images"):
            load(str(tmp_path))
    monkeypatch.setattr(images, "_MOST_FILES", 19)
    with pytest.raises(dohyo.DohyoError, match="has more than 19 files below it"):
        load(str(tmp_path))
    monkeypatch.setattr(images, "_MOST_FOLDERS", 19)
    with pytest.raises(dohyo.DohyoError, match="has more than 19 folders below it"):
        load(str(tmp_path))


def test_a_container_has_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("123000\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(claims, "_LIMITS", [tmp_path / "none", tmp_path / "missing"])
    assert claims._memory.__wrapped__() > 2**27
    monkeypatch.setattr(claims, "_LIMITS", [tmp_path / "none", tmp_path / "max"])
    assert claims._memory.__wrapped__() == 123000


PEAK = """
import re, sys, torch, dohyo

def megabytes(what):  # of this program; what getrusage says includes the process that started it
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

class Model:
    def log_weights(self, x, rows):
        return torch.randn(len(rows))

torch.set_num_threads(1)
dohyo.evaluate(Model(), torch.zeros(2, 1), dohyo.IWAE(1000), khat_data=0)
before = megabytes("VmRSS")
found = dohyo.evaluate(Model(), torch.zeros(1, 1), eval(sys.argv[1], {"dohyo": dohyo}), max_rows=200_000, khat_data=0)
print(megabytes("VmHWM") - before, found.cost, found.mean)
"""


def peak(estimator: str) -> tuple[float, float, float]:
    """Megabytes above the start, log-weights and the estimate, in a process of its own."""
    done = real.finished([sys.executable, "-c", PEAK, estimator], Path.cwd())
    assert done.returncode == 0, done.stderr
    megabytes, cost, mean = done.stdout.split()
    return float(megabytes), float(cost), float(mean)


def test_the_peak_of_memory() -> None:
    megabytes, cost, mean = peak("dohyo.MultilevelRR(10_000_000, max_level=0)")
    assert (megabytes < 100, cost) == (True, 1e7)
    assert mean == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    ["dohyo.ELBO(10**8)", "dohyo.IWAE(10**8)", "dohyo.SUMO(1, dohyo.Geometric(0.1, start=10**8))",
     "dohyo.MultilevelRR(1, r=1e-9, max_level=26)", "dohyo.MultilevelSS(7, r=1e-9, max_level=24)"],
)  # fmt: skip
def test_the_peak_of_memory_at_a_hundred_million(estimator: str) -> None:
    megabytes, cost, _ = peak(estimator)
    print(f"{estimator}: {megabytes:.0f} MB above the start for {cost:.3g} log-weights")
    assert cost > 6e7
    assert megabytes < 200
