"""The study `qpbo`: its claims, and the command killed and started again."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from dohyo.lab.folder import read_records
from dohyo.lab.studies.qpbo import Policies
from dohyo.lab.studies.qpbo_findings import NAMES, Findings
from dohyo.lab.studies.study import reproduce
from real import command, finished, killed_when, picture

LIMIT = 100 * math.log(2)
SLOW = {"sumo": 0.01, "iwae": 0.01, "independent": 0.001, "nade": 0.15, "gru": 0.4}


def cell(reward: float, entropy: float = 60.0, seconds: float = 0.01, rise: float = 0.005) -> dict[str, Any]:
    """A run of 20 s whose best reward rose by a share of itself in the last quarter."""
    curve = [{"seconds": s, "best_reward": share * reward} for s, share in ((5.0, 0.5), (14.0, 1 - rise), (20.0, 1.0))]
    return {
        "best_reward": reward, "mean_reward": reward - 1, "seconds_per_step": seconds, "steps": 2000, "highest_entropy": entropy,
        "curve": curve,
    }  # fmt: skip


def findings(changes: dict[str, dict[str, Any]] | None = None, replicas: int = 2) -> Findings:
    """What the paper says: SUMO is the best, IWAE falls behind with entropy, and its estimate is impossible."""
    rewards = {"sumo": 180.0, "iwae": 170.0, "independent": 160.0, "nade": 165.0, "gru": 150.0}
    cells = {
        f"{policy}_100_{kind}_{replica}": cell(
            rewards[policy] + replica + (15.0 if kind == "entropy" else 0.0),
            LIMIT * 3 if policy == "iwae" else LIMIT * 1.001,
            SLOW[policy],
        )
        for kind in ("plain", "entropy")
        for policy in NAMES
        for replica in range(replicas)
    }
    return Findings(cells | (changes or {}), {100: 20.0})


def verdicts(changes: dict[str, dict[str, Any]] | None = None, replicas: int = 2) -> list[bool | None]:
    return [found.holds for found in findings(changes, replicas).conclusions()]


def test_claims_follow_the_numbers() -> None:
    # SUMO above independent, GRU, NADE; IWAE decent; entropy helps; SUMO above IWAE, independent with it; slow GRU, NADE;
    # no policy rises, without and with entropy; IWAE's entropy impossible, SUMO's not.
    assert verdicts() == [True] * 13
    assert verdicts({"independent_100_plain_0": cell(190.0)})[0] is None  # one run above, one below
    both = {f"independent_100_plain_{replica}": cell(190.0) for replica in (0, 1)}
    assert verdicts(both)[0] is False
    assert verdicts({**both, **{f"sumo_100_plain_{r}": cell(180.0, rise=0.1) for r in (0, 1)}})[0] is None  # it still rises
    assert verdicts({f"gru_100_plain_{r}": cell(190.0, seconds=0.4) for r in (0, 1)})[1] is False
    assert verdicts({"iwae_100_plain_0": cell(100.0, LIMIT * 3)})[3] is None
    assert verdicts({f"iwae_100_plain_{r}": cell(100.0, LIMIT * 3) for r in (0, 1)})[3] is False
    assert verdicts({f"nade_100_entropy_{r}": cell(100.0) for r in (0, 1)})[4] is False
    assert verdicts({f"iwae_100_entropy_{r}": cell(230.0, LIMIT * 3) for r in (0, 1)})[5] is False
    assert verdicts({f"nade_100_plain_{r}": cell(165.0, seconds=0.05) for r in (0, 1)})[8] is False
    rising = {f"gru_100_entropy_{r}": cell(165.0 + r, seconds=0.4, rise=0.02) for r in (0, 1)}
    assert verdicts(rising)[9:11] == [True, False]
    assert verdicts({"iwae_100_plain_0": cell(170.0, LIMIT)})[11] is None
    assert verdicts({"sumo_100_entropy_1": cell(196.0, LIMIT * 1.1)})[12] is False
    assert verdicts(replicas=1)[:9] == [None] * 9  # one run of each decides nothing


def test_what_is_said_of_few_cells() -> None:
    assert Findings({}, {}).conclusions() == []
    assert Findings({}, {}).tables() == []
    few = Findings({"nade_100_plain_0": cell(165.0)}, {100: 20.0})
    (ended,) = few.conclusions()
    assert ended.claim == "With 100 variables, without entropy, no policy's best reward rises any more after 20 s"
    assert ended.found.endswith("the last quarter of the time, 1% at most where it has ended: NADE +0.5%")
    row = few.tables()[0].rows[0]
    assert row == [100, "without", "NADE", 1, "165", "+0.5%", "164", "10", "2000", "60", 69.3]
    found = findings().conclusions()[0].found
    assert found == (
        "best reward after 20 s, 2 runs of each: latent, SUMO 180.5 ± 0.71 (+0.5% in the last quarter of it), "
        "independent 160.5 ± 0.71 (+0.5% in the last quarter of it)"
    )
    patient = Findings({"nade_100_plain_0": cell(165.0)}, {100: 20.0}, patience=0.5)
    assert patient.conclusions()[0].claim.endswith("no policy's best reward rises any more after at most 20 s")
    assert "until its best reward had not risen for 50% of its steps, 500 or more, or for at most 20 s with 100 variables" in (
        patient.tables()[0].note
    )
    assert findings().ranking(100, "plain").startswith("latent, SUMO 180.5 ± 0.71, latent, IWAE 170.5")


def test_cells_take_turns_and_wrong_numbers_are_refused() -> None:
    cells = Policies.at("small").cells()
    assert len(cells) == 2 * 2 * 5 * 3
    assert list(cells)[:6] == [*(f"{policy}_100_plain_0" for policy in NAMES), "sumo_100_entropy_0"]
    assert {options["variables"] for options in cells.values() if options["entropy"] > 0} == {100, 500}
    patient = Policies.at("paper")
    assert {patient.run_of("", options, Path("none")).config.patience for options in patient.cells().values()} == {0.5}
    assert not any("patience" in options for options in cells.values())
    captured = Policies.at("small", program="captured")
    programs = {name: captured.run_of("", cells[f"{name}_100_plain_0"], Path("none")).config.program for name in NAMES}
    assert {name for name, program in programs.items() if program == "captured"} == {"sumo", "iwae"}  # the latent ones
    for wrong, words in (
        ({"sizes": (5,)}, "as many positive times"),
        ({"seconds": (1.0, 0.0)}, "as many positive times"),
        ({"sizes": (500, 100)}, "larger than the one before"),
        ({"policies": ("gruu",)}, "did you mean 'gru'"),
        ({"entropy_weight": 0.0}, "entropy_weight is 0.0"),
        ({"replicas": 0}, "replicas is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            Policies.at("small", **wrong)


@pytest.fixture(scope="session")  # a worker may come back to this file
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], str]:
    """A run that was killed in its third cell, and started again: folder, cells before, last words."""
    folder = tmp_path_factory.mktemp("qpbo")
    line = command("reproduce", "qpbo", "--scale", "smoke", "--device", "cpu", "--out", "q")
    killed_when((folder / "q/work/sumo_012_entropy_0/checkpoint.pt").exists, line, folder)
    before = {path.name: path.read_bytes() for path in (folder / "q/cells").glob("[a-z]*.json")}
    done = finished(line, folder)
    assert done.returncode == 0, done.stderr
    return folder / "q", before, done.stdout


def test_killed_it_goes_on_where_it_was(killed: tuple[Path, dict[str, bytes], str]) -> None:
    """The run in the third cell had a checkpoint, and its config a number in the place of scale auto."""
    folder, before, words = killed
    assert 2 <= len(before) < 4
    assert set(before) == {f"{name}.json" for name in list(Policies.at("smoke").cells())[: len(before)]}
    assert all((folder / "cells" / name).read_bytes() == content for name, content in before.items())
    assert "4 of 4 cells" in words


def test_the_smoke_preset(killed: tuple[Path, dict[str, bytes], str]) -> None:
    folder, *_ = killed
    report = json.loads((folder / "study.json").read_text())
    assert report["cells_done"] == 4
    results = {name: each["result"] for name, each in report["cells"].items()}
    for result in results.values():
        assert result["best_reward"] == result["curve"][-1]["best_reward"]
        assert result["seconds"] >= 0.2
        assert result["highest_entropy"] < 1.1 * 12 * math.log(2)
    assert len(report["tables"][0]["rows"]) == 4
    assert [each["file"] for each in report["pictures"]] == ["rewards_12.png", "rewards_12_entropy.png"]
    for each in report["pictures"]:
        assert list(picture(folder / each["file"])["runs"]) == ["latent, SUMO", "latent, IWAE"]
        assert (folder / each["file"]).with_suffix(".svg").exists()


def test_more_seconds_go_on_with_the_runs(killed: tuple[Path, dict[str, bytes], str], tmp_path: Path) -> None:
    folder = shutil.copytree(killed[0], tmp_path / "q")
    before = json.loads((folder / "study.json").read_text())["cells"]["iwae_012_plain_0"]
    study = Policies.at("smoke", seconds=(0.4,), device="cpu")
    report = reproduce(study, folder, only=["iwae_012_plain_0"])
    assert report["cells_done"] == 1  # the others are shorter
    after = report["cells"]["iwae_012_plain_0"]
    assert after["options"] == {**before["options"], "seconds": 0.4}
    assert after["result"]["steps"] > before["result"]["steps"]
    assert after["result"]["seconds"] >= 0.4
    steps = [record["step"] for record in read_records(folder / "work/iwae_012_plain_0")]
    assert steps == list(range(10, after["result"]["steps"] + 1, 10))  # none was made again


def test_the_study_trains_every_policy_once(tmp_path: Path) -> None:
    """Whatever `dohyo qpbo` does by default: entropy that does not fall, and no new beginnings."""
    study = Policies.at("small")
    for name, options in study.cells().items():
        config = study.run_of(name, options, tmp_path).config
        assert (config.entropy, config.entropy_decay, config.restarts, config.decay) == (options["entropy"], "none", 1, "none")
        assert (config.learning_rate, config.epsilon, config.batch_size) == (options["learning_rate"], 1e-8, 100)
