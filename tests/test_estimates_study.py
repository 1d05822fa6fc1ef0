"""The study `estimates`: its claims, and the command killed and started again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from dohyo import IWAE, SUMO, Geometric, HarmonicTail, Law, PowerLaw, log_marginal
from dohyo.lab.plots.nll import plot_estimates
from dohyo.lab.studies.convergence import Toy, toy_data
from dohyo.lab.studies.estimates import Estimates, contribution, estimator_at, mean_over_every_k, strata
from dohyo.lab.studies.estimates_findings import LAWS, NAMES, Findings
from real import command, finished, killed_when, picture

from problems import FewPoints
from stats import errors_off

TRUTH = {
    "nll": 90.0, "stderr": 0.01, "iwae_terms": 2048, "iwae_nll": 90.1, "iwae_stderr": 0.01, "khat": {"share_above_0.7": 0.5}
}  # fmt: skip
COSTS = [6, 15, 50]


@pytest.mark.parametrize("m", [1, 5, 10, 20, 45])
def test_every_estimator_costs_five_more_than_m(m: int) -> None:
    for name in NAMES:
        estimator = estimator_at(name, m)
        off = abs(estimator.expected_cost - (m + 5))
        assert off <= (1.5 if name == "multilevel-rr" else 0.08), name
        assert (name == "iwae") == (estimator.kind == "lower bound")
        if name.startswith("sumo"):
            assert estimator.m == m  # type: ignore[attr-defined]
            assert not estimator.finite_variance


def cell(mean: float, sd: float, runs: int = 100) -> dict[str, Any]:
    """Runs with exactly this mean, and nearly this standard deviation."""
    return {"expected_cost": 15.0, "finite_variance": True, "nll": [mean + sd * (-1) ** i for i in range(runs)]}


def findings(offsets: dict[str, float], sds: dict[str, float], every_k: float = 90.1) -> list[bool | None]:
    places = [(name, f"{name}_{cost:03d}") for name in NAMES for cost in COSTS]
    cells = {place: cell(90.0 + offsets.get(name, 0.0), sds.get(name, 0.1)) for name, place in places}
    counted = {place: {"nll": every_k, "stderr": 0.02} for name, place in places if name in LAWS}
    return [one.holds for one in Findings({**cells, "truth": TRUTH, "every-k": counted}, COSTS).conclusions()]


def test_claims_follow_the_numbers() -> None:
    sds = {"iwae": 0.05, "symmetric-sumo": 0.05, "multilevel-rr": 0.05}
    assert findings({"iwae": 2.0}, sds) == [True, True, True, True]
    assert findings({"iwae": 2.0}, sds, every_k=90.3)[0] is False
    assert findings({"iwae": 0.02}, sds)[:2] == [None, None]  # no bias that could be seen
    assert findings({"iwae": -2.0}, sds)[0] is None  # a bound lies above the NLL
    assert findings({"iwae": 2.0, "sumo-harmonic": 0.1}, sds) == [True, False, True, True]
    assert findings({"iwae": 2.0}, {**sds, "sumo-power": 30.0})[1] is None  # noise that would hide a bias
    assert findings({"iwae": 2.0, "multilevel-rr": -0.2}, sds)[2] is False
    assert findings({"iwae": 2.0}, {**sds, "multilevel-rr": 0.2})[3] is False
    few = Findings({"iwae_006": cell(92.0, 0.1), "truth": TRUTH}, COSTS)
    assert few.conclusions() == []
    assert few.tables("x")[0].rows[0][:4] == ["IWAE", 15.0, 92.0, "+2.00 ± 0.03"]


@pytest.mark.parametrize("law", [HarmonicTail(3, 0.5), Geometric(0.4), PowerLaw(1.5, 2.0), Geometric(0.7, start=0)])
def test_every_k_counted_is_the_bound_with_all_terms(law: Law) -> None:
    """Exactly, over all outcomes: the strata together have the mean of IWAE with m + depth terms."""
    points, estimator, depth = FewPoints(), SUMO(2, law), 4
    assert strata(depth) == [(0, 0), (1, 1), (2, 3), (4, 4)]
    total = 0.0
    for first, last in strata(depth):
        log_w, probability = points.outcomes(estimator.m + last)
        total += float((contribution(estimator, log_w, first, last, last == depth) * probability).sum())
    assert total == pytest.approx(points.mean_iwae(estimator.m + depth), abs=1e-12)


def test_every_k_counted_agrees_with_the_exact_evidence() -> None:
    x = toy_data(3, 30, seed=0)
    model = Toy(x, 0.2, seed=1)
    torch.manual_seed(2)
    laws = {name: estimator_at(name, 1) for name in LAWS}
    exact = float(model.exact(x).detach().mean())
    for mean, stderr in mean_over_every_k(model, x, laws, 256, 500, lambda share: None).values():
        assert stderr < 0.03
        assert abs(mean - exact) < 4.9 * stderr
    with torch.no_grad():  # five terms are not enough
        few = torch.stack([log_marginal(model, x, IWAE(5)).mean() for _ in range(200)])
    assert errors_off(few, exact) > 4.9


def test_the_picture_shows_the_truth_and_what_is_beyond_the_axis() -> None:
    curves = {
        "iwae": {"cost": [6, 15, 50], "mean": [92.0, 91.0, 90.5], "sd": [0.1, 0.1, 0.1]},
        "sumo-harmonic": {"cost": [6.1, 15.1, 50.1], "mean": [150.0, 90.1, 90.0], "sd": [9.0, 1.0, 0.1]},
    }
    figure, numbers = plot_estimates(curves, NAMES, (90.0, 0.05), 100, 200)
    assert isinstance(figure, Figure)
    first = figure.axes[0]
    low, high = first.get_ylim()
    assert low < 89.9
    assert 92.1 < high < 100
    marks = [line for line in first.get_lines() if line.get_marker() == "^"]
    assert [list(line.get_xdata()) for line in marks] == [[6.1]]
    assert (numbers["truth"], numbers["iwae"]["mean"].tolist()) == (90.0, [92, 91, 90.5])


@pytest.fixture(scope="session")  # a worker may come back to this file
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], str]:
    """A run that was killed when some cells were done, and started again: folder, cells before, last words."""
    folder = tmp_path_factory.mktemp("estimates")
    line = command("reproduce", "estimates", "--scale", "smoke", "--device", "cpu", "--out", "e")
    killed_when(lambda: len(list((folder / "e/cells").glob("[a-z]*.json"))) >= 4, line, folder)
    before = {path.name: path.read_bytes() for path in (folder / "e/cells").glob("[a-z]*.json")}
    done = finished(line, folder)
    assert done.returncode == 0, done.stderr
    return folder / "e", before, done.stdout


def test_killed_it_goes_on_where_it_was(killed: tuple[Path, dict[str, bytes], str]) -> None:
    folder, before, words = killed
    assert 4 <= len(before) < 15  # in the order of the cells: no one before the last was left out
    assert set(before) == {f"{name}.json" for name in list(Estimates.at("smoke").cells())[: len(before)]}
    assert all((folder / "cells" / name).read_bytes() == content for name, content in before.items())
    report = json.loads((folder / "study.json").read_text())
    assert (report["cells_done"], report["cells_total"]) == (15, 15)
    assert "15 of 15 cells" in words


def test_the_smoke_preset(killed: tuple[Path, dict[str, bytes], str]) -> None:
    folder, *_ = killed
    report = json.loads((folder / "study.json").read_text())
    assert len(report["conclusions"]) == 4
    assert len(report["tables"][0]["rows"]) == 12
    numbers = picture(folder / "estimates.png")
    truth = report["cells"]["truth"]["result"]
    assert numbers["truth"] == truth["nll"]
    assert 15 < truth["nll"] < 35
    assert truth["stderr"] < 0.1
    nlls = report["cells"]["multilevel-rr_015"]["result"]["nll"]
    assert len(set(nlls)) == 20
    assert abs(sum(nlls) / 20 - truth["nll"]) < 0.2
