"""Reverse KL at full size: minutes each. Run by `make test-slow`."""

from pathlib import Path
from typing import Any

import pytest

from dohyo.experiments.reverse_kl import ReverseKLConfig, ReverseKLRun
from dohyo.training.processes import launch

pytestmark = pytest.mark.slow


def result_of(folder: Path, **options: Any) -> dict[str, Any]:
    return ReverseKLRun(folder, ReverseKLConfig(device="cpu", **options)).train(launch("cpu"))


@pytest.mark.parametrize("estimator", ["sumo", "multilevel-rr"])
def test_the_funnel(tmp_path: Path, estimator: str) -> None:
    result = result_of(tmp_path / "run", target="funnel", estimator=estimator, cost=15)
    assert not result["diverged"]
    assert -4 * result["reverse_kl_stderr"] < result["reverse_kl"] < 0.05
    assert result["by_encoder"] == pytest.approx(result["by_prior"], abs=0.05)


def test_plain_iwae_fails_on_the_funnel(tmp_path: Path) -> None:
    result = result_of(tmp_path / "run", target="funnel", estimator="iwae", cost=15)
    assert result["diverged"]
    assert result["training_estimate"] < -10
    assert result["steps"] < 10_000  # it was stopped


def test_eight_schools(tmp_path: Path) -> None:
    """Non-centred, against quadrature: 0.1 posterior standard deviations by importance weights, 0.2 for raw draws."""
    result = result_of(tmp_path / "run", target="eight-schools", estimator="multilevel-rr", cost=15)
    assert result["khat"] < 0.7
    assert set(result["moments"]) == {"mu", "tau", *(f"theta{i}" for i in range(1, 9))}
    for name, found in result["moments"].items():
        sd = found["exact_sd"]
        for kind, most in (("", 0.1), ("raw_", 0.2)):
            assert found[f"{kind}mean"] == pytest.approx(found["exact_mean"], abs=most * sd), name
            assert found[f"{kind}sd"] == pytest.approx(sd, abs=most * sd), name
