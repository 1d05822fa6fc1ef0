"""The study `clipping`: its claims, and the command as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

from dohyo import DohyoError
from dohyo.lab.plots.nll import plot_clipping
from dohyo.lab.plots.picture import plain_numbers
from dohyo.lab.studies.clipping import NONE, Clipping
from dohyo.lab.training.loop import Diverged
from real import command, finished, picture

NORMS = ["1", "20", "100", NONE]


SHARES = {"1": 1.0, "20": 0.4, "100": 0.1, NONE: 0.0}


def result(nll: float, share: float = 0.5, spread: float = 0.01) -> dict[str, Any]:
    return {"test_nll": [nll - spread, nll, nll + spread], "clipped_decoder": [share] * 3, "epochs": [3] * 3}


def cells(nlls: dict[str, float], iwae: float = 90.0, spread: float = 0.01) -> dict[str, dict[str, Any]]:
    return {f"norm_{n}": result(nll, SHARES[n], spread) for n, nll in nlls.items()} | {"iwae": result(iwae)}


def holds(found: dict[str, dict[str, Any]]) -> list[bool | None]:
    study = Clipping.at("paper", norms=(1, 20, 100))
    assert set(study.cells()) == {*(f"norm_{norm}" for norm in NORMS), "iwae"}
    return [conclusion.holds for conclusion in study.summarise(found)[0]]


def test_claims_follow_the_numbers() -> None:
    def at(*nlls: float) -> dict[str, float]:
        return dict(zip(NORMS, nlls, strict=True))

    assert holds(cells(at(91.0, 90.0, 90.2, 92.0))) == [True, True, True]
    assert holds(cells(at(89.0, 90.0, 90.2, 92.0))) == [True, False, True]  # full clipping is best
    assert holds(cells(at(90.0, 90.0, 90.2, 92.0))) == [True, None, True]  # as good as any
    assert holds(cells(at(91.0, 90.0, 90.2, 89.0))) == [False, True, False]  # no clipping is best, and beats IWAE
    assert holds(cells(at(91.0, 90.0, 90.2, 90.0))) == [None, True, None]
    assert holds(cells(at(91.0, 90.0, 90.2, 92.0), spread=2.0)) == [None, None, None]  # the spread hides it
    assert holds(cells(at(91.0, 90.5, 90.6, 92.0))) == [True, True, False]  # clipped it is behind IWAE, too
    diverged = cells(at(91.0, 90.0, 90.2, 92.0)) | {f"norm_{NONE}": {"diverged": "training diverged in epoch 3"}}
    assert holds(diverged) == [True, True, True]
    partial = cells(at(91.0, 90.0, 90.2, 92.0)) | {"norm_1": result(91.0, 0.9)}
    assert holds(partial) == [True, None, True]  # no norm clips every step
    few = {"norm_1": result(91.0), f"norm_{NONE}": result(92.0, 0.0)}
    study = Clipping.at("paper", norms=(1, 20, 100))
    conclusions, (table,) = study.summarise(few)
    assert conclusions == []
    assert table.rows == [["SUMO, 1", 91.0, 0.01, "50.0%", 3], ["SUMO, none", 92.0, 0.01, "0.0%", 3]]
    assert "training diverged in epoch 3" in study.summarise(diverged)[1][0].note


def test_the_picture() -> None:
    curve = {"norm": [1.0, 20.0, None], "mean": [91.0, 90.0, 92.0], "sd": [0.1, 0.1, 0.3], "share": [1.0, 0.4, 0.0]}
    figure, numbers = plot_clipping(curve, (90.1, 0.05))
    left, right = figure.axes
    assert [label.get_text() for label in left.get_xticklabels()] == ["1", "20", "none"]
    assert list(right.get_lines()[1].get_xdata()) == [100.0, 40.0, 0.0]
    assert plain_numbers(numbers["norm"]) == [1, 20, None]
    assert numbers["iwae"] == {"mean": 90.1, "sd": 0.05}


def test_the_smoke_preset(tmp_path: Path) -> None:
    done = finished(command("reproduce", "clipping", "--scale", "smoke", "--device", "cpu", "--json", "--out", "c"), tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "c/study.json").read_text())
    assert (report["cells_done"], len(report["conclusions"])) == (4, 3)
    shares = [sum(report["cells"][f"norm_{n}"]["result"]["clipped_decoder"]) for n in ("0.1", "5", NONE)]
    assert shares[0] > 1.5
    assert shares[2] == 0
    assert picture(tmp_path / "c/clipping.png")["norm"] == [0.1, 5, None]
    assert [row[0] for row in report["tables"][0]["rows"]] == ["SUMO, 0.1", "SUMO, 5", "SUMO, none", "IWAE, 10"]


@pytest.mark.parametrize("norms", [(1,), (2, 1), (0, 1), (1, 1)])
def test_wrong_norms(norms: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="give two or more positive numbers that rise"):
        Clipping.at("paper", norms=norms)


def test_the_intervals_hold_together() -> None:
    """Differences at the edge of their error bars: 95% is for all pairs of a claim, and for the norm that was chosen."""

    def at(*nlls: float) -> dict[str, float]:
        return dict(zip(NORMS, nlls, strict=True))

    assert holds(cells(at(90.4, 90.0, 90.2, 90.4), spread=0.1)) == [True, True, True]
    assert holds(cells(at(90.27, 90.0, 90.2, 90.27), iwae=90.27, spread=0.1)) == [None, None, None]
    assert holds(cells(at(89.73, 90.0, 90.2, 89.73), iwae=89.73, spread=0.1)) == [None, None, None]
    assert holds(cells(at(91.0, 90.35, 90.6, 92.0), spread=0.1)) == [True, True, True]  # not behind IWAE for sure
    assert holds(cells(at(90.0, 90.0, 90.0, 89.0))) == [False, None, False]  # no clipping is not "some"


def test_the_epochs_are_the_longest_replicas() -> None:
    found = {"iwae": result(90.0) | {"epochs": [1, 3, 2]}}
    assert Clipping.at("paper").summarise(found)[1][0].rows == [["IWAE, 10", 90.0, 0.01, "50.0%", 3]]


@pytest.mark.parametrize("error", [Diverged("at step 3", [0]), DohyoError("training diverged from what was asked")])
def test_divergence_is_a_result_and_nothing_else_is(error: DohyoError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("dohyo.lab.studies.clipping.train_replicas", fails)
    study = Clipping.at("smoke")
    options = study.cells()[f"norm_{NONE}"]
    if isinstance(error, Diverged):
        assert study.run_cell("", options, tmp_path, lambda share: None) == {"diverged": "at step 3"}
        return
    with pytest.raises(DohyoError, match="from what was asked"):
        study.run_cell("", options, tmp_path, lambda share: None)


def test_seeds_and_replicas() -> None:
    assert Clipping.at("paper", seed=5).seeds == [5, 6, 7]
    with pytest.raises(ValueError, match="replicas is 1; it must be at least 2"):
        Clipping.at("paper", replicas=1)


def test_the_bars_of_the_picture() -> None:
    curve = {"norm": [1.0, None], "mean": [91.0, 92.0], "sd": [0.1, 0.3], "share": [1.0, 0.0]}
    for axis in plot_clipping(curve, (90.1, 0.05))[0].axes:
        (bars,) = axis.containers[0][2]
        assert [high - low for (_, low), (_, high) in bars.get_segments()] == pytest.approx([0.2, 0.6])
        assert list(axis.patches[0].get_bbox().intervaly) == pytest.approx([90.05, 90.15])
