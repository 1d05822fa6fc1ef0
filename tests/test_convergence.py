"""The study `convergence`: its differences, its rates, its claims, and the command as a user runs it."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dohyo.lab.studies.convergence import Convergence, Toy, toy_data
from dohyo.lab.studies.convergence_findings import Findings
from dohyo.lab.studies.differences import SERIES, coefficients, cross_moments, difference, second_moments, weights_needed
from dohyo.lab.studies.verdicts import Rate, cross_rate, rate
from real import command, finished, picture

from problems import FewPoints, LinearGaussian

KS = [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_each_difference_has_the_mean_of_a_step_between_bounds(series: str, k: int) -> None:
    points, needed = FewPoints(), weights_needed(series, k)
    log_w, probability = points.outcomes(needed)
    found = float((difference(series, log_w, k) * probability).sum())
    assert found == pytest.approx(points.mean_iwae(needed) - points.mean_iwae(k), abs=1e-12)


@pytest.mark.parametrize("series", SERIES)
def test_coefficients_are_the_derivative(series: str) -> None:
    log_w = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value, coefficient = coefficients(series, log_w, 5)
    assert torch.equal(value, difference(series, log_w, 5))
    assert coefficient[:, weights_needed(series, 5) :].abs().max() == 0
    assert coefficient.sum(-1).abs().max() < 1e-12  # the same shift of all weights moves no difference
    step = 1e-6 * torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = difference(series, log_w + step, 5) - difference(series, log_w - step, 5)
    assert torch.allclose(moved, 2 * (coefficient * step).sum(-1), rtol=1e-6, atol=1e-14)


def test_second_moments_are_those_of_each_datums_own_gradient() -> None:
    """Against the whole chain differentiated at once, with the same noise."""
    x = toy_data(3, 5, seed=0)
    model = Toy(x, 0.3, seed=1)
    torch.manual_seed(2)
    found = second_moments(model, x, [1, 2, 4])

    def terms(theta: Tensor) -> Tensor:
        torch.manual_seed(2)
        with torch.nn.utils.parametrize.cached():
            values = []
            for datum in x:
                copy = dict(model.named_parameters()) | {"theta": theta}
                row = torch.zeros(8, dtype=torch.int64)
                log_w = torch.func.functional_call(Weights(model), {f"model.{k}": v for k, v in copy.items()}, (datum[None], row))
                values.append(torch.stack([difference(s, log_w[None], k)[0] for s in SERIES for k in (1, 2, 4)]))
            return torch.stack(values)

    values = terms(model.theta.detach()).square().mean(0).view(3, 3)
    slopes = torch.autograd.functional.jacobian(terms, model.theta.detach()).square().sum(-1).mean(0).view(3, 3)
    for i, series in enumerate(SERIES):
        assert torch.allclose(found[series][0], values[i], rtol=1e-9)
        assert torch.allclose(found[series][1], slopes[i], rtol=1e-9)


class Weights(torch.nn.Module):
    def __init__(self, model: Toy) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.model.log_weights(x, rows)


def test_cross_terms_by_enumeration() -> None:
    """Less noise, the same mean: exact over all outcomes, and not with a wrong p(x)."""
    points = FewPoints(probability=(1 / 3, 1 / 3, 1 / 3))
    log_w, _ = points.outcomes(5)
    log_px = log_w[:, 0].exp().mean().log().expand(len(log_w))
    exact = torch.zeros(3, 3, dtype=torch.float64)
    for i, k in enumerate((1, 2, 4)):
        for j, later in enumerate((1, 2, 4)):
            if i < j:
                exact[i, j] = (difference("sumo", log_w, k) * difference("sumo", log_w, later)).mean()
    found = cross_moments(log_w, log_px, [1, 2, 4])
    assert torch.allclose(found["sumo"], exact, rtol=0, atol=1e-14)
    wrong = cross_moments(log_w, log_px + 0.3, [1, 2, 4])
    assert (wrong["sumo"] - exact).abs().max() > 1e-3
    for series, size in (("leave-one-out", 3), ("multilevel", 2)):  # 8 weights are not there for the last multilevel one
        direct = torch.stack([difference(series, log_w, k) for k in (1, 2, 4)[:size]])
        assert torch.allclose(found[series], torch.triu(direct @ direct.T / len(log_w), 1), rtol=0, atol=1e-14)


def test_the_toy_is_the_papers() -> None:
    x = toy_data(20, 1000, seed=3)
    model, other = Toy(x, 0.01, seed=4), LinearGaussian()
    other.theta = model.theta.detach()
    assert torch.allclose(model.exact(x[:5]), other.exact(x[:5]))
    other.A, other.b = model.encoder.weight.detach(), model.encoder.bias.detach()
    rows = torch.arange(5).repeat_interleave(3)
    torch.manual_seed(0)
    ours = model.log_weights(x, rows)
    torch.manual_seed(0)
    assert torch.allclose(ours, other.log_weights(x, rows))
    assert float((other.theta - x.mean(0)).std()) == pytest.approx(0.01, rel=0.6)
    assert float((other.A - torch.eye(20) / 2).std()) == pytest.approx(0.01, rel=0.2)


def test_slopes_of_power_laws_are_found() -> None:
    k = torch.tensor(KS, dtype=torch.float64)
    curve = 3 * k**-2.5
    found = rate(torch.stack([curve, 2 * curve, 3 * curve]), KS)
    assert (found.slope, found.half) == (pytest.approx(-2.5), pytest.approx(0, abs=1e-9))
    bent = torch.where(k < 4, 1.0, curve)
    assert rate(torch.stack([bent, bent]), KS, start=4).slope == pytest.approx(-2.5)
    assert rate(torch.stack([bent, bent]), KS).slope > -2.4
    table = torch.triu(k[:, None] ** -1.5 * k**-3, 1)
    in_i, in_j = cross_rate(torch.stack([table, 2 * table]), KS, start=2)
    assert (in_i.slope, in_j.slope) == (pytest.approx(-1.5), pytest.approx(-3.0))


def test_intervals_of_slopes_hold_the_slope_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.tensor(KS, dtype=torch.float64)
    missed = 0
    for _ in range(400):
        noise = 1 + 0.1 * torch.randn(10, len(KS), dtype=torch.float64, generator=generator)
        found = rate(noise * k**-2, KS)
        missed += abs(found.slope + 2) > found.half
    assert 5 <= missed <= 43  # binomial, 5% of 400, within 1e-6 on either side


def test_a_slope_that_cannot_be_known_is_not() -> None:
    one = torch.ones(1, 6, dtype=torch.float64)
    for unknown in (rate(one, KS), rate(-one.expand(3, 6), KS), rate(one.expand(3, 6), KS, start=32)):
        assert math.isnan(unknown.slope)
        assert str(unknown) == "unknown"
        assert unknown.close_to(-2) is None
        assert unknown.below(-2) is None
    assert (Rate(-2.05, 0.1).close_to(-2), Rate(-2.05, 0.5).close_to(-2), Rate(-2.5, 0.1).close_to(-2)) == (True, None, False)
    assert (Rate(-2.3, 0.1).below(-2.1), Rate(-2.3, 0.3).below(-2.1), Rate(-2.0, 0.05).below(-2.1)) == (True, None, False)


def made_cells(squares: dict[str, float], cross: float, trials: int = 3) -> dict[str, Any]:
    """Cells with these exponents of the squares, and this one of the cross terms of SUMO."""
    k = torch.tensor(KS, dtype=torch.float64)
    cells: dict[str, Any] = {}
    for trial in range(trials):
        scale = 1 + 0.001 * trial
        moments = {s: {"value": (scale * k**e).tolist(), "gradient": (scale * k**e).tolist()} for s, e in squares.items()}
        cells[f"toy_{trial}"] = cells[f"vae_{trial}"] = {"k": KS, **moments}
        tables = {s: 0.5 * scale * torch.triu((k[:, None] * k) ** (e / 2), 1) for s, e in squares.items()}
        tables["sumo"] = 0.5 * scale * torch.triu((k[:, None] * (k[:, None] + 1) * k * (k + 1)) ** (cross / 2), 1)
        cells[f"cross_{trial}"] = {"k": KS, **{s: table.tolist() for s, table in tables.items()}}
    return cells


def test_claims_follow_the_numbers() -> None:
    rates = {"sumo": -2.0, "leave-one-out": -4.0, "multilevel": -2.0}
    found = Findings(made_cells(rates, -2.0), 4)
    verdicts = [(c.claim, c.holds) for c in found.conclusions()]
    assert [holds for _, holds in verdicts] == [True, False, True, False, True, True, True, True, True, True, True, True]
    assert "faster" in verdicts[1][0]
    assert "faster" in verdicts[3][0]
    slow = {"sumo": -1.0, "leave-one-out": -3.0, "multilevel": -1.0}
    holds = [c.holds for c in Findings(made_cells(slow, -1.0), 4).conclusions()]
    assert holds == [False, False, False, False, False, False, False, False, True, False, False, True]
    assert [c.holds for c in Findings(made_cells({**rates, "sumo": -3.0}, -2.0), 4).conclusions()][:4] == [
        False,
        True,
        False,
        True,
    ]
    unknown = Findings(made_cells(rates, -2.0, trials=1), 4).conclusions()
    assert {c.holds for c in unknown if "may" not in c.claim} == {None}
    assert Findings({}, 4).conclusions() == Findings({}, 4).tables() == []
    only = {name: cell for name, cell in made_cells(rates, -2.0).items() if name.startswith("cross")}
    assert len(Findings(only, 4).conclusions()) == 1


@pytest.fixture(scope="session")  # a worker may come back to this file
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convergence")
    begun = time.monotonic()
    done = finished(command("reproduce", "convergence", "--scale", "smoke", "--device", "cpu", "--out", "out/c"), folder)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 60  # 20 s on a machine that does nothing else
    assert "everything is in out/c" in done.stdout
    return folder / "out/c"


def test_the_smoke_preset(smoke: Path) -> None:
    report = json.loads((smoke / "study.json").read_text())
    assert (report["study"], report["scale"], report["cells_done"], report["cells_total"]) == ("convergence", "smoke", 9, 9)
    assert len(report["conclusions"]) == 12
    assert [drawn["file"] for drawn in report["pictures"]] == ["convergence.png", "cross_terms.png"]
    for drawn in report["pictures"]:
        assert picture(smoke / drawn["file"])
        assert (smoke / drawn["file"]).with_suffix(".svg").exists()
        assert drawn["alt"]
    slopes = {tuple(row[:3]): row[4] for row in report["tables"][0]["rows"]}
    value = float(slopes["toy", "leave-one-out", "value"].split(" ± ")[0])
    assert -4.5 < value < -3.5
    assert picture(smoke / "convergence.png")["Gaussian toy"]["sumo"]["value"]["slope"] == slopes["toy", "SUMO", "value"]


def test_a_run_folder_stands_in_for_the_vae(smoke: Path, tmp_path: Path) -> None:
    stored = json.loads((smoke / "cells/vae_02.json").read_text())["result"]
    study = Convergence.at("smoke", run=smoke / "work/vae", device="cpu")
    options = study.cells()["vae_02"]
    assert options["run"] == str(smoke / "work/vae")
    found = study.run_cell("vae_02", options, tmp_path / "none", lambda share: None)
    assert found["sumo"]["value"] == pytest.approx(stored["sumo"]["value"], rel=1e-6)
    assert not (tmp_path / "none").exists()
