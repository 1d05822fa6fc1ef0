"""Runs through annealed chains: resumed to the bit, replicas and the captured step the same as alone, begun from a run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributions import Bernoulli, Distribution, Independent

import dohyo
import teams
from dohyo import Annealed, DohyoError
from dohyo.annealing import tuning
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig, begin_with
from dohyo.lab.fast.captured import traced
from dohyo.lab.fast.trial import stack
from dohyo.lab.folder import read_records
from dohyo.lab.training.chains import Chains, sized, tune_chains
from dohyo.lab.training.loop import Training
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import load_checkpoint
from dohyo.lab.training.tasks import OnData, OnLoader
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood
from real import same_run
from teams import DATA, alone, assert_same, together

SMALL: dict[str, Any] = {
    "hidden": 16,
    "latent": 4,
    "batch_size": 600,
    "test_terms": 20,
    "device": "cpu",
    "checkpoint_seconds": 0.0,
}
CHAINS = [MaximumLikelihood(dohyo.IWAE(2), "dreg"), MaximumLikelihood(dohyo.MultilevelRR.at_cost(3), "dreg")]
KINDS = pytest.mark.parametrize("chains", CHAINS, ids=["two", "random"])


def through(**sizes: int) -> Annealed:
    """A small VAE, trained through three leapfrogs."""
    made = Annealed(VAE(**sizes), 3)
    made.constants = sized(made, DATA.valid)
    made.start_from = made.model.start_from
    return made


THROUGH: Any = through  # in place of a class


class Bits(VAE):
    """Its z is binary."""

    def posterior(self, code: Tensor) -> Distribution:
        return Independent(Bernoulli(logits=code), 1)


@pytest.fixture(scope="session")  # a worker may come back to this file
def run(tmp_path_factory: pytest.TempPathFactory) -> DensityRun:
    made = DensityRun(tmp_path_factory.mktemp("chains") / "run", DensityConfig(anneal=3, anneal_from=0.0, epochs=3, **SMALL))
    made.train(launch("cpu"))
    return made


def test_a_run_through_chains(run: DensityRun) -> None:
    config, result = run.config, json.loads((run.folder / "result.json").read_text())
    assert (config.estimator, config.cost, config.encoder) == ("iwae", 4.0, "dreg")
    assert result["test_chains"] == 2  # 20 evaluations of p(x, z), 10 for each
    assert result["test_nll_annealed"] == pytest.approx(result["test_nll"], abs=1.0)
    assert result["decoder_passes"] == {"forward": 4 * 5.0, "backward": 4 * 6.0}
    assert [record["lost_chains"] for record in read_records(run.folder)] == [0.0] * 3
    best = load_checkpoint(run.folder)["best"]
    assert best["step"].shape == (3, 4)
    assert float(best["step"].std()) > 0  # they were tuned
    assert isinstance(run.trained(), VAE)


def test_stopped_and_resumed_it_ends_the_same(run: DensityRun, tmp_path: Path) -> None:
    """The second epoch is tuned before, the third only in the run that was stopped: the constants come from its checkpoint."""
    assert [epoch for epoch in range(20) if Chains(waiting=False).due(epoch)] == [0, 1, 2, 4, 8, 16]
    for epochs in (1, 3):
        DensityRun(tmp_path / "run", DensityConfig(anneal=3, anneal_from=0.0, epochs=epochs, **SMALL)).train(launch("cpu"))
    assert same_run(run.folder, tmp_path / "run")


def test_fit_goes_on_with_chains_of_its_own_constants(tmp_path: Path) -> None:
    ends = []
    for folder, lengths in ((tmp_path / "a", (2,)), (tmp_path / "b", (1, 2))):
        for epochs in lengths:
            torch.manual_seed(0)
            model = Annealed(VAE(64, 16, 4), 2)  # as a user has it: one value for all dimensions
            records = list(dohyo.lab.fit(model, DATA, CHAINS[0], teams.config(0, epochs=epochs), folder))
        ends.append((records[-1]["valid_nll"], model.step))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_chains_are_tuned_on_the_first_batches_of_a_loader() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA.train[:600]), batch_size=100, shuffle=True)
    for chains in (2, 0):
        torch.manual_seed(0)
        model = Annealed(VAE(64, 16, 4), chains) if chains else VAE(64, 16, 4)
        (record,) = dohyo.lab.fit(model, (loader, DATA.valid[:100]), CHAINS[0], teams.config(0, epochs=1))
        assert record["train_nll"] < 60
    assert isinstance(model, VAE)
    task = OnLoader(loader, DATA.valid[:100])
    assert task.pilot().shape == (256, 64)
    assert len(OnLoader([DATA.train[:7]], DATA.valid[:100]).pilot()) == 7


def test_constants_fit_the_checkpoint_also_if_tuning_gained_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    worse = lambda model, data, start, *_: (dataclasses.replace(start, step=100 * start.step), 0)  # noqa: E731
    monkeypatch.setattr(tuning, "climb", worse)  # the start is kept, one value for all dimensions
    made = through(data=64, hidden=16, latent=4)
    tune_chains(made, DATA.valid[:20], 0, first=True)
    assert made.step.shape == (3, 4)
    assert made.widening.shape == (4,)
    made.load_state_dict(through(data=64, hidden=16, latent=4).state_dict())


def test_after_chains_were_lost_they_are_tuned_again(tmp_path: Path) -> None:
    """Before an epoch in which they would not be; each run knows it of itself, and a resumed one from its checkpoint."""

    def training(folder: Path) -> Training:
        return Training(through(data=64, hidden=16, latent=4), task, CHAINS[0], teams.config(0, epochs=9), folder, launch("cpu"))

    task = OnData(DATA)  # which replicas share
    for lost in (0.01, 0.0):
        runs = {share: training(tmp_path / f"{share}_{lost}") for share in (lost, 0.0)}
        for share, run in runs.items():
            run.count_epoch({"lost_chains": share, "score": 1.0}, 0.0, 0.0)
        runs[lost].save()
        runs[lost].close()
        for run in (runs[lost], training(runs[lost].folder or tmp_path)):
            run.state.progress.epoch = 3
            before = run.state.model.step.clone()
            task.prepare(run.state, run.config)
            assert torch.equal(run.state.model.step, before) == (lost == 0)


def test_a_run_that_lost_its_chains_says_so(tmp_path: Path) -> None:
    config = DensityConfig(anneal=4, cost=2, epochs=1, optimiser="adam", learning_rate=1e3, **SMALL)
    warnings = DensityRun(tmp_path / "run", config).train(launch("cpu"))["warnings"]
    assert "chains for each datum were lost: lower the learning rate" in warnings[0]
    assert "the parameters are those before training" in warnings[1]


def test_constants_live_where_the_model_does() -> None:
    made = Annealed(VAE(64, 16, 4).to("meta"), 3)
    assert made.step.device.type == made.widening.device.type == "meta"


@KINDS
def test_replicas_are_the_same_as_alone(chains: MaximumLikelihood) -> None:
    records, models = together([0, 3], chains, THROUGH)
    for place, seed in enumerate((0, 3)):
        assert_same((records[place], models[place]), alone(seed, chains, THROUGH), 1e-4)
    assert "lost_chains" in records[0][0]


@pytest.mark.slow
def test_one_program_for_every_number_of_chains() -> None:
    torch._dynamo.reset()
    counters.clear()
    models, x = [teams.model(seed, THROUGH) for seed in (0, 3)], DATA.valid[:10]
    stacked = stack(models, [torch.Generator().manual_seed(seed) for seed in (0, 3)], "dreg", traced, varying=True)
    for n in (3, 1, 2, 7):
        rows = torch.arange(5).repeat_interleave(n)
        log_w, (fresh,) = stacked(x, rows, stacked.noise(x, rows))
        assert log_w.shape == fresh.shape == (10 * n,)
    assert counters["stats"]["unique_graphs"] == 5  # fresh samples, start, the first leapfrog, the others, end


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))]
)
def test_captured_chains_are_the_same(device: str, chains: MaximumLikelihood) -> None:
    records, models = together([0, 3], chains, THROUGH, program="captured", device=device)
    assert records[0][0]["program"] == "captured"
    plain, plain_models = together([0, 3], chains, THROUGH, program="plain", device=device)
    assert_same((records[1], models[1]), (plain[1], plain_models[1]), 1e-3)


def test_a_run_begins_with_the_parameters_of_another(run: DensityRun, tmp_path: Path) -> None:
    later = DensityRun(tmp_path / "later", DensityConfig(epochs=1, init_from=run.folder, learning_rate=1e-9, **SMALL))
    later.train(launch("cpu"))
    for name, value in run.trained().state_dict().items():
        assert torch.allclose(later.trained().state_dict()[name], value, atol=1e-5)
    several = DensityRun(tmp_path / "several", DensityConfig(replicas=2, init_from=run.folder, **SMALL))
    assert [replica.config.init_from for replica in several.replicas] == [run.folder] * 2
    known = SMALL | {"anneal": 0, "cost": 2, "estimator": "iwae", "epochs": 1, "learning_rate": 1e-9}
    two = DensityRun(tmp_path / "two", DensityConfig(replicas=2, **known))
    two.train(launch("cpu"))
    four = DensityRun(tmp_path / "four", DensityConfig(replicas=2, init_from=two.folder, **known))  # each begins with its own
    four.train(launch("cpu"))
    for first, second in zip(two.replicas, four.replicas, strict=True):
        for name, value in first.trained().state_dict().items():
            assert torch.allclose(second.trained().state_dict()[name], value, atol=1e-5)
    with pytest.raises(DohyoError, match="do not fit this model"):
        begin_with(VAE(64, 8, 4), run.folder)


def test_what_cannot_be_trained_so_is_one_line() -> None:
    for anneal in (-1, 10_001):
        with pytest.raises(DohyoError, match=f"anneal is {anneal}; it must be a number of leapfrogs, at most 10000"):
            DensityConfig(anneal=anneal)
    config = DensityConfig(anneal=2, model="teams:Handmade", **SMALL)
    with pytest.raises(DohyoError, match=r"Handmade has no log_joint"):
        config.build_model(config.dataset())
    with pytest.raises(DohyoError, match="z is discrete; chains need a continuous z"):
        sized(Annealed(Bits(64, 8, 4), 2), torch.zeros(3, 64))
