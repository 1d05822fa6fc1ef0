"""Real MNIST on two cores: minutes each. Run by `make test-slow`, with DOHYO_DATA pointing to a folder that has mnist/."""

import os
from pathlib import Path

import pytest

from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.training.processes import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("DOHYO_DATA" not in os.environ, reason="DOHYO_DATA is not set: point it to a folder with mnist/"),
]


@pytest.mark.parametrize(("estimator", "most"), [("iwae", 95.0), ("sumo", 97.0)])
def test_twenty_epochs_at_cost_five(tmp_path: Path, estimator: str, most: float) -> None:
    config = DensityConfig(data="mnist", estimator=estimator, cost=5, epochs=20, device="cpu")
    run = DensityRun(tmp_path / estimator, config)
    run.write_config()
    result = run.train(launch("cpu"))
    print(estimator, result["test_nll"], result["test_nll_stderr"], result["seconds"])
    assert result["test_terms"] == 5000
    assert result["test_nll"] < most
