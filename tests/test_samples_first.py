"""Runs whose theta follows samples of the encoder first and then chains."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dohyo
import teams
from dohyo import Annealed, DohyoError
from dohyo.lab.cli import main
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.folder import read_records
from dohyo.lab.plots.runs import plot_learning_curves
from dohyo.lab.training import tasks
from dohyo.lab.training.chains import by_samples, passes
from dohyo.lab.training.config import LoopConfig, Progress
from dohyo.lab.training.loop import Training
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import load_checkpoint
from dohyo.lab.training.tasks import OnData
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood
from real import same_run
from teams import DATA, alone, assert_same, together
from test_chains_lab import SMALL, THROUGH

CHAINS = MaximumLikelihood(dohyo.IWAE(2), "dreg")


@pytest.fixture(scope="session")  # a worker may come back to this file
def run(tmp_path_factory: pytest.TempPathFactory) -> DensityRun:
    config = DensityConfig(anneal=3, anneal_from=0.5, epochs=5, average=2, optimiser="adam", learning_rate=3e-3, **SMALL)
    made = DensityRun(tmp_path_factory.mktemp("samples") / "run", config)
    made.train(launch("cpu"))
    return made


def test_first_it_is_iwae_at_as_many_passes(run: DensityRun, tmp_path: Path) -> None:
    """To the bit, whatever comes later."""
    assert by_samples(run.config.objective(), 3) == MaximumLikelihood(dohyo.IWAE(15), "dreg")
    assert 4 * sum(passes(3)) == 44  # and 45 for 15 samples
    config = dataclasses.replace(run.config, anneal=0, anneal_from=0.0, estimator="iwae", cost=15, epochs=2)
    first = DensityRun(tmp_path / "first", config)
    first.train(launch("cpu"))
    ours, theirs = ([r["train_nll"] for r in read_records(one.folder)[:2]] for one in (run, first))
    assert ours == theirs
    records = read_records(run.folder)
    assert [record.get("lost_chains") for record in records] == [None, None, 0.0, 0.0, 0.0]
    assert records[-1]["valid_nll"] < records[0]["valid_nll"]


def test_the_result_and_the_best_parameters_are_of_chains(run: DensityRun) -> None:
    result = json.loads((run.folder / "result.json").read_text())
    assert result["before_chains"] == {
        "epochs": 2, "estimator": "iwae", "expected_cost": 15.0, "decoder_passes": {"forward": 15.0, "backward": 30.0}
    }  # fmt: skip
    assert result["decoder_passes"] == {"forward": 4 * 5.0, "backward": 4 * 6.0}
    assert result["best_epoch"] > 2
    assert result["test_nll_annealed"] == pytest.approx(result["test_nll"], abs=1.0)
    best = load_checkpoint(run.folder)["best"]
    assert best["step"].shape == (3, 4)
    assert float(best["step"].std()) > 0  # they were tuned
    assert isinstance(run.trained(average=True), VAE)
    assert not any("chains" in line for line in result["warnings"])
    lines = (json.loads((run.folder / "learning_curves.json").read_text()), result["valid_nll"])
    assert lines[0]["best"] == {"epoch": result["best_epoch"], "valid_nll": lines[1]}


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_killed_before_and_after_the_turn_it_ends_the_same(run: DensityRun, tmp_path: Path, after: int) -> None:
    again = DensityRun(tmp_path / "run", run.config)
    again.write_config()
    model, task, objective = again.parts
    records = dohyo.lab.training.train(model, task, objective, run.config, again.folder, launch("cpu"))
    assert len(list(itertools.islice(records, after))) == after
    records.close()
    DensityRun(again.folder, run.config).train(launch("cpu"))
    assert same_run(run.folder, again.folder)


def test_replicas_are_the_same_as_alone() -> None:
    records, models = together([0, 3], CHAINS, THROUGH, anneal_from=0.5)
    for place, seed in enumerate((0, 3)):
        assert_same((records[place], models[place]), alone(seed, CHAINS, THROUGH, anneal_from=0.5), 1e-4)
    assert ["lost_chains" in record for record in records[0]] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))]
)
def test_captured_it_is_the_same(device: str) -> None:
    records, models = together([0, 3], CHAINS, THROUGH, anneal_from=0.5, program="captured", device=device)
    assert [record["program"] for record in records[0]] == ["captured"] * 2
    plain, plain_models = together([0, 3], CHAINS, THROUGH, anneal_from=0.5, program="plain", device=device)
    assert_same((records[1], models[1]), (plain[1], plain_models[1]), 1e-3)


def test_what_samples_validated_is_compared_with_no_chains(tmp_path: Path) -> None:
    config = teams.config(0, epochs=4, anneal_from=0.5, average=1)
    run = Training(THROUGH(data=64, hidden=16, latent=4), OnData(DATA), CHAINS, config, tmp_path / "run", launch("cpu"))
    for score, lost in ((1.0, {}), (2.0, {}), (9.0, {"lost_chains": 0.0}), (9.5, {"lost_chains": 0.0})):
        assert (run.objective == CHAINS) == bool(lost)
        run.count_epoch({"score": score, **lost}, 0.0, 0.0)
    run.close()
    assert (run.state.progress.best_epoch, run.state.progress.best_score) == (3, 9.0)
    records = [
        {"epoch": n, "train_nll": nll, "valid_nll": nll, "learning_rate": 1.0, "clipped_decoder": 0, "clipped_encoder": 0, **lost}
        for n, (nll, lost) in enumerate([(1.0, {}), (2.0, {}), (9.5, {"lost_chains": 0.0}), (9.0, {"lost_chains": 0.0})], 1)
    ]
    plot_learning_curves(records, tmp_path / "curves.png")
    assert json.loads((tmp_path / "curves.json").read_text())["best"] == {"epoch": 4, "valid_nll": 9.0}


def test_fit_takes_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[int] = []
    monkeypatch.setattr(tasks, "tune_chains", lambda model, pilot, seed, first: tuned.append(seed + 100 * first))
    torch.manual_seed(0)
    model = Annealed(VAE(64, 16, 4), 2)
    records = list(dohyo.lab.fit(model, DATA, CHAINS, teams.config(0, epochs=3, anneal_from=0.4), tmp_path))
    assert ["lost_chains" in record for record in records] == [False, True, True]
    assert model.steps == 2
    assert tuned == [101, 2]  # from the beginning before the second epoch, and before the third


def test_a_run_of_before_there_was_a_turn_goes_on_with_its_chains(tmp_path: Path) -> None:
    def begun(epochs: int) -> DensityRun:
        return DensityRun(tmp_path / "old", DensityConfig(anneal=3, anneal_from=0.0, epochs=epochs, **SMALL))

    begun(1).train(launch("cpu"))
    path = tmp_path / "old" / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["chains_since"], checkpoint["config"]["anneal_from"]
    torch.save(checkpoint, path)
    late = DensityRun(tmp_path / "old", dataclasses.replace(begun(4).config, anneal_from=0.9))
    late.train(launch("cpu"))
    assert all("lost_chains" in record for record in read_records(late.folder))
    assert "before_chains" not in (late.result or {})


def test_each_phase_has_whole_epochs() -> None:
    def turn(**options: Any) -> int:
        config = LoopConfig(**options)
        return next(epoch for epoch in range(9999) if config.by_chains(Progress(epoch=epoch)))

    assert [turn(epochs=epochs, anneal_from=0.5) for epochs in (1, 2, 3, 10)] == [0, 1, 1, 5]
    assert turn(epochs=3500, anneal_from=0.75) == 2625
    assert turn(epochs=100, anneal_from=0.29) == 29  # the product is just below
    timed = LoopConfig(epochs=10**9, anneal_from=0.5, max_seconds=10.0)
    assert [s for s in (0.0, 4.9, 5.0, 9.9, 10.0) if timed.by_chains(Progress(epoch=7, seconds=s))] == [5.0, 9.9]


def test_the_patience_of_samples_does_not_end_the_run() -> None:
    config = LoopConfig(epochs=10, anneal_from=0.5, stop_patience=2)
    assert [config.over(Progress(epoch=epoch, stale=3)) for epoch in (3, 4, 5)] == [False, False, True]


def test_a_run_that_never_came_to_chains_says_so(tmp_path: Path) -> None:
    short = DensityRun(tmp_path / "run", DensityConfig(anneal=3, epochs=10**6, max_seconds=1e-9, **SMALL))
    result = short.train(launch("cpu"))
    assert "training ended before theta followed chains" in result["warnings"][-1]
    assert math.isfinite(result["valid_nll"])
    assert result["before_chains"]["epochs"] == 1
    assert "test_nll_annealed" not in result


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"hidden": 16, "latent": 4, "batch-size": 600, "test-terms": 20, "device": "cpu", "epochs": 4}
    options = [part for name, value in known.items() for part in (f"--{name}", str(value))]
    assert main(["train", "--anneal", "2", *options, "--out", str(tmp_path / "a")]) == 0
    assert "through chains: train" in capsys.readouterr().out
    assert ["lost_chains" in record for record in read_records(tmp_path / "a")] == [False, True, True, True]
    more = ["--anneal", "2", "--cost", "1", "--init-from", str(tmp_path / "a"), "--out", str(tmp_path / "b")]
    assert main(["train", *options, *more]) == 0
    assert DensityRun.open(tmp_path / "b").config.anneal_from == 0


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(DohyoError, match=r"anneal_from is 0.5 without chains; give their leapfrogs too, --anneal 8, say"):
        DensityConfig(anneal_from=0.5)
    for share in (-0.1, 1.0, math.nan):
        with pytest.raises(DohyoError, match=r"it must be a share of the training, at least 0 and below 1"):
            DensityConfig(anneal=2, anneal_from=share)
    assert DensityConfig().anneal_from == 0
