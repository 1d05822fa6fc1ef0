"""The study `funnel`: its claims, and the command as people run it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dohyo.errors import DohyoError
from dohyo.lab.folder import CHECKPOINT, METRICS
from dohyo.lab.studies.funnel import Funnel
from dohyo.lab.studies.funnel_findings import Findings
from real import command, finished, picture


def cell(kl: float, estimate: float | None = None, error: float = 0.02, diverged: bool = False) -> dict[str, Any]:
    """A run that ended so; its training estimate is right unless told."""
    estimate = kl if estimate is None else estimate
    curve = [{"step": step, "estimate_stderr": error, "reverse_kl": 1.0} for step in (100, 200, 300, 400)]
    return {
        "reverse_kl": kl, "reverse_kl_stderr": 0.005, "training_estimate": estimate, "training_estimate_stderr": error,
        "diverged": diverged, "steps": 400, "curve": curve, "expected_cost": 15.078,
    }  # fmt: skip


def good_runs() -> dict[str, dict[str, Any]]:
    """What the paper says."""
    cells = {}
    for replica in (0, 1):
        for cost in (5, 15, 50):
            cells[f"iwae_{cost:03d}_{replica}"] = cell(20.0, -1e8, 1e5, diverged=True)
            cells[f"sumo_{cost:03d}_{replica}"] = cell(0.02 + 0.001 * replica, error=0.5 / cost)
        cells[f"minimax-iwae_015_{replica}"] = cell(5.0, -40.0, diverged=True)
        cells[f"minimax-iwae_200_{replica}"] = cell(0.03)
        cells[f"symmetric-sumo_015_{replica}"] = cells[f"multilevel-rr_015_{replica}"] = cell(0.01)
    return cells


def verdicts(**changes: dict[str, Any]) -> list[bool | None]:
    return [found.holds for found in Findings({**good_runs(), **changes}).conclusions()]


def test_claims_follow_the_numbers() -> None:
    assert verdicts() == [True] * 8
    assert verdicts(iwae_015_1=cell(0.02)) == [False, False, *[True] * 6]
    assert verdicts(iwae_015_1=cell(0.6))[:2] == [False, None]  # it may yet diverge
    assert verdicts(iwae_015_1=cell(20.0, -1e8, 1e8, diverged=True))[0] is None  # an error bar as large as the estimate
    assert verdicts(sumo_005_0=cell(9.0, diverged=True, error=0.1))[1:3] == [False, False]
    assert verdicts(sumo_005_0=cell(0.6, error=0.1))[1:3] == [None, None]  # it may yet fall
    assert verdicts(sumo_015_0=cell(0.02, -0.2, error=0.033))[3] is False
    assert verdicts(sumo_015_0=cell(0.02, 1.0, error=2.0))[3] is None  # so wide that it says nothing
    assert verdicts(sumo_015_0=cell(0.02, error=0.2))[4] is False
    assert verdicts(sumo_015_0=cell(0.02, error=0.11))[4] is None  # less on average, not in each run
    assert verdicts(**{"minimax-iwae_200_0": cell(3.0, diverged=True)})[5] is False
    assert verdicts(**{"minimax-iwae_015_0": cell(0.09, -0.4)})[6] is True  # it need not diverge
    assert verdicts(**{"minimax-iwae_015_0": cell(0.02)})[6] is None
    assert verdicts(**{f"minimax-iwae_015_{replica}": cell(0.02) for replica in (0, 1)})[6] is False
    assert verdicts(sumo_015_0=cell(0.02, -0.4))[6] is None
    assert verdicts(**{"multilevel-rr_015_1": cell(0.3, diverged=True)})[7] is False


def test_what_is_said_of_few_cells() -> None:
    assert Findings({}).conclusions() == []
    assert Findings({}).tables() == []
    few = Findings({"sumo_015_0": cell(0.0213, 0.05)})
    assert [found.holds for found in few.conclusions()] == [True, True]
    assert few.tables()[0].rows == [["SUMO", 15, 15.08, 1, "0.021 ± 0.005", "0.05", "0.02", "0 of 1", "400"]]
    assert few.diverged() == ""
    found = Findings(good_runs())
    assert found.diverged() == "IWAE 5 (2 of 2), IWAE 15 (2 of 2), IWAE 50 (2 of 2), minimax IWAE 15 (2 of 2)"
    assert "cost 15: IWAE 20 ± 0, SUMO 0.021 ± 0.0007" in found.conclusions()[1].found
    assert next(iter(found.groups)) == ("iwae", 5)


def test_cells_are_all_that_was_asked_for() -> None:
    paper = Funnel.at("paper")
    cells = paper.cells()
    assert len(cells) == 3 * (6 * 3 + 1)
    assert paper.seeds == [0, 1, 2]
    assert cells["minimax-iwae_200_2"]["seed"] == 2
    assert list(Funnel.at("paper", seed=5, replicas=1, iwae=(7,)).cells())[3] == "iwae_007_0"
    assert Funnel.at("paper", program="captured").run_of("", cells["sumo_015_0"], Path("none")).config.program == "captured"
    for wrong, words in ({"iwae": (0,)}, "iwae is"), ({"check_draws": 9}, "check_draws is 9"), ({"replicas": 0}, "replicas is 0"):
        with pytest.raises(ValueError, match=words):
            Funnel.at("small", **wrong)


@pytest.fixture(scope="session")  # a worker may come back to this file
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("funnel")
    done = finished(command("reproduce", "funnel", "--scale", "smoke", "--device", "cpu", "--out", "f"), folder)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 cells" in done.stdout
    return folder / "f"


def test_the_smoke_preset(smoke: Path) -> None:
    report = json.loads((smoke / "study.json").read_text())
    iwae, sumo = (report["cells"][f"{name}_015_0"]["result"] for name in ("iwae", "sumo"))
    assert iwae["diverged"]
    assert iwae["training_estimate"] < -100
    assert report["conclusions"][0]["holds"] is True
    assert not sumo["diverged"]
    assert sumo["curve"][-1]["reverse_kl"] < sumo["curve"][0]["reverse_kl"]
    assert sumo["curve"][-1]["step"] == sumo["steps"] == Funnel.SCALES["smoke"].steps
    curves = picture(smoke / "curves.png")["curves"]
    assert [(curve["label"], curve["cost"]) for curve in curves] == [("IWAE", 15), ("SUMO", 15)]
    assert list(picture(smoke / "densities.png")["log_density"]) == ["target", "IWAE, cost 15", "SUMO, cost 15"]
    assert [each["file"] for each in report["pictures"]] == ["curves.png", "densities.png"]
    assert "IWAE 15 (1 of 1)" in report["pictures"][0]["alt"]
    assert all((smoke / each["file"]).with_suffix(".svg").exists() for each in report["pictures"])


def test_a_run_that_ends_in_nan_is_a_result(tmp_path: Path) -> None:
    study = Funnel.at("smoke", sumo=(), device="cpu")
    ((name, options),) = study.cells().items()

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run_cell(name, options, tmp_path / "run", stop)
    checkpoint = torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)
    next(iter(checkpoint["model"].values())).fill_(math.nan)
    torch.save(checkpoint, tmp_path / "run" / CHECKPOINT)
    result = study.run_cell(name, options, tmp_path / "run", lambda share: None)
    assert result["diverged"]
    assert "NaN" in result["warnings"][0]
    assert str(tmp_path) not in result["warnings"][0]
    assert (result["steps"], [record["diverged"] for record in result["curve"]]) == (30, [True])
    assert result["reverse_kl"] == result["curve"][0]["reverse_kl"]
    assert Findings({name: result}).tables()[0].rows[0][-2:] == ["1 of 1", "30"]
    study.plot({name: result}, tmp_path)
    (tmp_path / "run" / METRICS).write_text("")
    with pytest.raises(DohyoError, match="lower check_every"):
        study.run_cell(name, options, tmp_path / "run", lambda share: None)


def test_without_its_runs_the_densities_stay(smoke: Path, tmp_path: Path) -> None:
    report = json.loads((smoke / "study.json").read_text())
    results = {name: each["result"] for name, each in report["cells"].items()}
    (tmp_path / "densities.png").write_bytes((smoke / "densities.png").read_bytes())
    assert [each.file for each in Funnel.at("smoke").plot(results, tmp_path)] == ["curves.png", "densities.png"]
