"""Evaluations in ArviZ: what is there, a file and back, and its own comparison beside ours and the exact one."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dohyo
from dohyo.evaluation import summarise

from problems import LinearGaussian

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # once a day ArviZ announces its next version
    arviz = pytest.importorskip("arviz")
    from dohyo.integrations.arviz import elpd, to_inference_data

pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")  # pandas deprecates what ArviZ uses
PROBLEM = LinearGaussian(dimension=4)
ESTIMATOR = dohyo.MultilevelRR.at_cost(15)


def data() -> Tensor:
    torch.manual_seed(0)
    return PROBLEM.sample(200)


def shifted(by: float) -> LinearGaussian:
    other = LinearGaussian(dimension=4)
    other.theta = other.theta + by
    return other


def test_inference_data(tmp_path: Path) -> None:
    found = dohyo.evaluate(PROBLEM, data(), ESTIMATOR, replicates=8, khat_data=30)
    group = to_inference_data(found).log_marginal
    assert torch.equal(torch.from_numpy(group.log_px.values), found.per_datum)
    assert torch.equal(torch.from_numpy(group.khat.values[:30]), found.khat.double())
    assert bool(group.khat[30:].isnull().all())
    assert found.noise_stderr == pytest.approx(float((group.noise**2).sum()) ** 0.5 / 200)
    off = (torch.from_numpy(group.log_px.values) - PROBLEM.exact(data())) / torch.from_numpy(group.noise.values)
    assert 0.5 < float(off.square().median()) / 0.5 < 2  # the noise of each datum is about what it says
    assert (group.attrs["kind"], group.attrs["replicates"], group.attrs["cost"]) == ("unbiased", 8, found.cost)
    to_inference_data(found).to_netcdf(str(tmp_path / "found.nc"))
    again = arviz.from_netcdf(str(tmp_path / "found.nc")).log_marginal
    assert again.equals(group)
    assert again.attrs["mean"] == pytest.approx(found.mean)


def test_one_replicate_has_no_noise_and_warnings_are_kept() -> None:
    found = dohyo.evaluate(PROBLEM, data(), dohyo.SUMO(2), khat_samples=0)
    group = to_inference_data(found).log_marginal
    assert bool(group.noise.isnull().all())
    assert bool(group.khat.isnull().all())
    assert "variance is infinite" in group.attrs["warnings"]
    assert bool(elpd(found)["warning"])


def test_their_comparison_is_ours_and_near_the_exact_one() -> None:
    x, models = data(), {"true": shifted(0.0), "shifted": shifted(0.5)}
    found = {name: dohyo.evaluate(model, x, ESTIMATOR, replicates=8) for name, model in models.items()}
    table = arviz.compare({name: elpd(each) for name, each in found.items()})
    ours = dohyo.compare(found["true"], found["shifted"])
    assert list(table.index) == ["true", "shifted"]
    assert table.elpd_diff["shifted"] == pytest.approx(200 * ours.difference)
    assert table.dse["shifted"] == pytest.approx(200 * ours.stderr, rel=0.01)  # they divide by n, we by n - 1
    exact = models["true"].exact(x).sum() - models["shifted"].exact(x).sum()
    noise = 200 * math.hypot(*(each.noise_stderr or 0 for each in found.values()))
    assert abs(float(table.elpd_diff["shifted"]) - float(exact)) < 4 * noise
    assert not table.warning.any()
    bounds = {name: elpd(dohyo.evaluate(model, x, dohyo.IWAE(5))) for name, model in models.items()}
    assert arviz.compare(bounds).warning.all()  # a difference of bounds is no difference of log p(x)


def test_their_khat_is_ours() -> None:
    log_w = 1.5 * torch.randn(5, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = arviz.psislw(log_w.numpy())[1]
    assert torch.allclose(dohyo.diagnostics.khat(log_w), torch.from_numpy(theirs), atol=1e-3)


def test_bad_input() -> None:
    values = torch.randn(5, 1, dtype=torch.float64)
    with pytest.raises(dohyo.DohyoError, match="1 datum gives no error bar"):
        elpd(summarise(values[:1], dohyo.IWAE(3), 1, torch.empty(0)))
    with pytest.raises(dohyo.DohyoError, match="are -inf"):
        elpd(summarise(torch.full((5, 1), -math.inf, dtype=torch.float64), dohyo.IWAE(3), 1, torch.empty(0)))
