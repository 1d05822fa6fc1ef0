"""Runs whose theta follows samples of the encoder first and then chains."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dohyo
import teams
from dohyo import Annealed, DohyoError
from dohyo.lab.cli import main
from dohyo.lab.evaluations import load_evaluation
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.fast.together import Replica, train_together
from dohyo.lab.folder import read_records, write_config
from dohyo.lab.plots.runs import plot_learning_curves
from dohyo.lab.report.runs import differences, read_run
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


def test_first_it_is_iwae_on_few_samples(run: DensityRun, tmp_path: Path) -> None:
    """To the bit, whatever comes later."""
    assert by_samples(run.config.objective(), 3) == MaximumLikelihood(dohyo.IWAE(5), "dreg")
    config = dataclasses.replace(run.config, anneal=0, anneal_from=0.0, estimator="iwae", cost=5, epochs=2)
    first = DensityRun(tmp_path / "first", config)
    first.train(launch("cpu"))
    ours, theirs = ([(r["train_nll"], r["valid_nll"]) for r in read_records(one.folder)[:2]] for one in (run, first))
    assert ours == theirs
    records = read_records(run.folder)
    assert [record.get("lost_chains") for record in records] == [None, None, 0.0, 0.0, 0.0]
    assert records[-1]["valid_nll"] < records[0]["valid_nll"]


def test_the_result_and_the_best_parameters_are_of_chains(run: DensityRun) -> None:
    result = json.loads((run.folder / "result.json").read_text())
    assert result["before_chains"] == {
        "epochs": 2, "estimator": "iwae", "expected_cost": 5.0, "decoder_passes": {"forward": 5.0, "backward": 10.0}
    }  # fmt: skip
    assert result["decoder_passes"] == {"forward": 4 * 5.0, "backward": 4 * 6.0}
    assert result["best_epoch"] > 2
    assert result["test_nll_annealed"] == pytest.approx(result["test_nll"], abs=1.0)
    assert result["test_nll_average_annealed"] == pytest.approx(result["test_nll_average"], abs=1.0)
    assert len({result[name] for name in ("test_nll_annealed", "test_nll_average_annealed", "test_nll_average")}) == 3
    assert all(load_evaluation(run.folder / name).about["through_chains"] for name in ("test.npz", "test_average.npz"))
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


@pytest.mark.parametrize("chains", [2, 5])
def test_replicas_are_the_same_as_alone(chains: int) -> None:
    objective = MaximumLikelihood(dohyo.IWAE(chains), "dreg")
    assert (by_samples(objective, 8) == objective) == (chains == 5)  # then only the models differ after the turn
    records, models = together([0, 3], objective, THROUGH, anneal_from=0.5)
    for place, seed in enumerate((0, 3)):
        assert_same((records[place], models[place]), alone(seed, objective, THROUGH, anneal_from=0.5), 1e-4)
    assert ["lost_chains" in record for record in records[0]] == [False, True]


def test_replicas_have_a_spread_by_chains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = DensityConfig(anneal=2, anneal_from=0.0, cost=1, epochs=1, replicas=2, **SMALL)
    result = DensityRun(tmp_path / "run", config).train(launch("cpu"))
    one, other = (replica["test_nll_annealed"] for replica in result["replicas"])
    assert result["test_nll_annealed_spread"] == pytest.approx(abs(one - other) / 2**0.5)
    assert result["test_nll_annealed_mean_stderr"] == pytest.approx(abs(one - other) / 2)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "already finished after 1 epoch; --epochs N extends it" in told
    assert told.count("their standard deviation is") == 2  # by samples and by chains


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
    path, config = tmp_path / "old" / "checkpoint.pt", tmp_path / "old" / "config.yaml"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["chains"], checkpoint["config"]["anneal_from"]
    torch.save({**checkpoint, "lost": True}, path)
    assert load_checkpoint(path.parent)["chains"] == {"waiting": False, "since": 0, "lost": True}
    config.write_text("".join(line for line in config.read_text().splitlines(True) if "anneal_from" not in line))
    assert main(["train", "--resume", str(path.parent), "--epochs", "4", "--anneal-from", "0"]) == 0
    assert ["lost_chains" in record for record in read_records(path.parent)] == [True] * 4
    late = DensityRun.open(path.parent)
    assert (late.config.anneal_from, late.finished) == (0.0, True)
    assert "before_chains" not in (late.result or {})


def test_chains_begin_after_whole_epochs() -> None:
    def turn(**options: Any) -> int:
        config = LoopConfig(**options)
        return next(epoch for epoch in range(9999) if config.by_chains(Progress(epoch=epoch)))

    assert [turn(epochs=epochs, anneal_from=0.5) for epochs in (1, 2, 3, 10)] == [0, 1, 1, 5]
    assert turn(epochs=3500, anneal_from=0.75) == 2625
    assert turn(epochs=100, anneal_from=0.29) == 29  # the product is just below
    timed = LoopConfig(epochs=10**9, anneal_from=0.5, max_seconds=10.0)
    assert [s for s in (0.0, 4.9, 5.0, 9.9, 10.0) if timed.by_chains(Progress(epoch=7, seconds=s))] == [5.0, 9.9, 10.0]


def counted(run: Training, scores: str) -> str:
    """What each of these epochs was followed by; their validation NLL is that of the one before (=), more (+) or infinite (!)."""
    told = ""
    for sign in scores:
        if run.over:
            return told + "."
        waiting = run.state.following is not run.state.model
        score = {"=": 1.0, "+": 2.0, "!": math.inf}[sign]
        run.count_epoch({"score": score, **({} if waiting else {"lost_chains": 0.0})}, 0.0, 0.0)
        told += "s" if waiting else "c"
    return told


def test_patience_ends_no_run_before_its_chains(tmp_path: Path) -> None:
    def begun(folder: str, **changes: Any) -> Training:
        config = teams.config(0, **{"stop_patience": 2, "epochs": 10, "anneal_from": 0.5, **changes})
        return Training(THROUGH(data=64, hidden=16, latent=4), OnData(DATA), CHAINS, config, tmp_path / folder, launch("cpu"))

    run = begun("run")
    assert counted(run, "=++++=++++") == "ssssscc" + "c."  # the first with chains is the best of these, then two are worse
    run.save()
    run.close()
    longer = begun("run", epochs=100)  # it ended by itself, before the share that is now meant
    assert longer.over
    longer.close()
    early = begun("early")
    counted(early, "=+")
    early.save()
    early.close()
    shorter = begun("early", epochs=4)  # half of four are over
    assert counted(shorter, "==") == "cc"
    assert shorter.over
    shorter.close()
    never = begun("early", epochs=2)  # and of two all: then there is nothing to turn for
    assert never.over
    assert never.state.progress.best_score == 1.0
    never.close()
    lost = begun("lost", stop_patience=3)  # no finite NLL by chains yet, and patience has just begun with them
    assert counted(lost, "=++++!!") == "ssssscc"
    assert not lost.over
    lost.close()


def test_a_run_that_never_came_to_chains_says_so(tmp_path: Path) -> None:
    short = DensityRun(tmp_path / "run", DensityConfig(anneal=3, epochs=10**6, max_seconds=1e-9, **SMALL))
    result = short.train(launch("cpu"))
    assert "training ended before theta followed chains" in result["warnings"][-1]
    assert math.isfinite(result["valid_nll"])
    assert result["before_chains"]["epochs"] == 1
    assert "test_nll_annealed" not in result
    timely = DensityConfig(anneal=3, epochs=4, max_seconds=1e-9, average=2, **SMALL)  # its turn would be here
    result = DensityRun(tmp_path / "timely", timely).train(launch("cpu"))
    assert math.isfinite(result["valid_nll"])
    assert result["before_chains"]["epochs"] == 1
    assert result["valid_nll_average"] == pytest.approx(result["valid_nll"], abs=1e-9)  # of one epoch, by samples as well


def test_a_run_that_loses_its_chains_at_once_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "validation_nll", lambda model, *_: lambda: math.inf if isinstance(model, Annealed) else 1.0)
    lost = DensityRun(tmp_path / "run", DensityConfig(anneal=3, anneal_from=0.5, epochs=2, **SMALL)).train(launch("cpu"))
    wanted = (
        "no epoch through chains had a finite validation NLL, so that the parameters are those before training through chains"
    )
    assert wanted in lost["warnings"][0]
    assert lost["best_epoch"] == 1


def test_stopped_before_its_chains_fit_begins_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Annealed(VAE(64, 16, 4), 2)
    options = {"epochs": 4, "anneal_from": 0.5}
    next(dohyo.lab.fit(model, DATA, CHAINS, teams.config(0, **options)))
    assert model.steps == 2
    records = list(dohyo.lab.fit(model, DATA, CHAINS, teams.config(0, **options)))
    assert ["lost_chains" in record for record in records] == [False, False, True, True]
    with pytest.raises(
        DohyoError, match=r"anneal_from is 0.5, but the model has no chains; give dohyo.Annealed\(model, 8\), say"
    ):
        next(dohyo.lab.fit(model.model, DATA, CHAINS, teams.config(0, **options)))


class Stepped(VAE):
    """It counts something of its own."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("step", torch.tensor(0))


def test_a_model_may_have_a_step_of_its_own(tmp_path: Path) -> None:
    known = SMALL | {"model": "test_samples_first:Stepped", "estimator": "iwae", "cost": 2, "epochs": 1}
    assert "before_chains" not in DensityRun(tmp_path / "run", DensityConfig(**known)).train(launch("cpu"))


def test_samples_need_no_more_of_a_model_than_chains(tmp_path: Path) -> None:
    """Where phi follows the variance over chains, IWAE has none that is worth lowering."""
    objective = MaximumLikelihood(dohyo.MultilevelRR.at_cost(3), "variance")
    assert by_samples(objective, 2) == MaximumLikelihood(dohyo.IWAE(5), "iwae")


def test_samples_take_no_more_passes_than_chains() -> None:
    for steps, count in itertools.product(range(1, 10), range(1, 4)):
        first = by_samples(MaximumLikelihood(dohyo.IWAE(count), "dreg"), steps).estimator
        assert 2 <= first.k <= 5
        assert first.k * sum(passes(0)) <= count * sum(passes(steps))


class Unmarked(VAE):
    """Good for chains alone: it does not say what its encoder made."""

    def bind(self, x: Any, detach_posterior: bool = False) -> Any:  # type: ignore[override]
        return lambda rows: self.log_weights(x, rows)

    def log_weights(self, x: Any, rows: Any) -> Any:
        q = self.posterior(self.encode(x)[rows])
        z = q.rsample()
        return self.log_joint(x[rows], z) - q.log_prob(z)


def test_what_samples_need_is_missed_before_the_first_file(tmp_path: Path) -> None:
    model = Annealed(Unmarked(64, 16, 4), 2)
    assert list(dohyo.lab.fit(model, DATA, CHAINS, teams.config(0, epochs=1), tmp_path / "chains"))
    with pytest.raises(DohyoError, match="Unmarked does not say what its proposal made"):
        next(dohyo.lab.fit(model, DATA, CHAINS, teams.config(0, epochs=2, anneal_from=0.5), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass
class Uneven(LoopConfig):
    def by_chains(self, progress: Progress) -> bool:
        return progress.epoch > self.seed


def test_replicas_may_turn_one_by_one() -> None:
    """As by the clock, after a kill between two checkpoints."""
    configs = [Uneven(**vars(teams.config(seed, epochs=4, anneal_from=0.5))) for seed in (0, 1)]
    models = [teams.model(seed, THROUGH) for seed in (0, 1)]
    records: list[list[dict[str, Any]]] = [[], []]
    for place, record in train_together([Replica(m, OnData(DATA), c) for m, c in zip(models, configs, strict=True)], CHAINS):
        records[place].append(record)
    assert ["".join("sc"["lost_chains" in record] for record in own) for own in records] == ["sccc", "sscc"]
    for seed in (0, 1):
        made = teams.model(seed, THROUGH)
        assert_same((records[seed], models[seed]), (list(dohyo.lab.fit(made, DATA, CHAINS, configs[seed])), made), 1e-4)
    with pytest.raises(DohyoError, match="epochs are 6 and 4; runs that turn to chains together need as many"):
        list(train_together([Replica(models[0], OnData(DATA), dataclasses.replace(configs[i], epochs=4 + 2 * i)) for i in (0, 1)],
                            CHAINS))  # fmt: skip


def test_the_share_of_a_file_follows_its_chains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the file has it only by default."""

    def share(*arguments: str) -> float:
        with pytest.raises(SystemExit):
            main(["train", *arguments, "--print_config"])
        return float(yaml.safe_load(capsys.readouterr().out)["anneal_from"])

    paths = {name: str(tmp_path / f"{name}.yaml") for name in ("plain", "chains", "late")}
    for name, options in {"plain": {}, "chains": {"anneal": 3}, "late": {"anneal": 3, "anneal_from": 0.6}}.items():
        write_config(tmp_path, DensityConfig(**options))
        (tmp_path / "config.yaml").rename(paths[name])
    assert share("--config", paths["plain"], "--anneal", "2") == 0.5
    assert share("--config", paths["chains"], "--anneal", "0") == 0.0
    assert share("--config", paths["chains"], "--init-from", str(tmp_path)) == 0.0
    assert share("--config", paths["late"], "--init-from", str(tmp_path)) == 0.6
    assert main(["train", "--config", paths["late"], "--anneal", "0", "--out", str(tmp_path / "out")]) == 2
    assert "anneal_from is 0.6 without chains; leave it out, or give their leapfrogs" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"hidden": 16, "latent": 4, "batch-size": 600, "test-terms": 20, "device": "cpu", "epochs": 4}
    options = [part for name, value in known.items() for part in (f"--{name}", str(value))]
    assert main(["train", "--anneal", "2", *options, "--out", str(tmp_path / "a")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "through chains: train" in told
    assert "trained by iwae at 5, and after 0.5 of the training by iwae over 4 chains of 2 leapfrogs" in told
    assert "iwae at 5 for 2 epochs, then iwae over 4 chains of 2 leapfrogs, 4 epochs" in told
    assert ["lost_chains" in record for record in read_records(tmp_path / "a")] == [False, False, True, True]
    more = ["--anneal", "2", "--cost", "1", "--init-from", str(tmp_path / "a"), "--out", str(tmp_path / "b")]
    assert main(["train", *options, *more]) == 0
    assert DensityRun.open(tmp_path / "b").config.anneal_from == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "trained by iwae over 1 chain of 2 leapfrogs" in told
    whole = DensityRun(tmp_path / "d", DensityConfig(anneal=2, epochs=1, device="cpu"))  # the half of one epoch is none
    assert whole.notes[-1] == "trained by iwae over 4 chains of 2 leapfrogs"
    assert main(["train", *options, "--estimator", "iwae", "--cost", "2", "--out", str(tmp_path / "c")]) == 0
    capsys.readouterr()
    assert main(["compare", *(str(tmp_path / name) for name in "ca"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert found["warnings"][0].startswith(f"{tmp_path / 'a'} was trained through chains and is tested by its encoder's weights")
    assert main(["compare", *(str(tmp_path / name) for name in "cc"), "--json"]) == 0
    assert "chains" not in capsys.readouterr().out
    entries = {name: read_run(tmp_path / name) for name in "ac"}
    by_samples, by_chains = (entries[name].compared for name in "ca")
    assert (by_samples["leapfrogs"], by_chains["leapfrogs"]) == (None, 2)
    assert (by_samples["decoder passes"].text, by_chains["decoder passes"].text) == ("2 + 4", "16 + 20")
    assert by_chains["by chains"].key == json.loads((tmp_path / "a/result.json").read_text())["test_nll_annealed"]
    assert "in chains of 2 leapfrogs" in entries["a"].question
    (table,) = differences(list(entries.values()))
    assert "a was trained through chains" in table.note
    for weights, warned in (("0", True), ("2", False)):
        for name in "ca":
            assert main(["evaluate", str(tmp_path / name), "--anneal", weights, "--cost", "40", "--device", "cpu"]) == 0
        capsys.readouterr()
        assert main(["compare", *(str(tmp_path / name) for name in "ca"), "--json"]) == 0
        assert ("was trained through chains" in capsys.readouterr().out) == warned


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(DohyoError, match=r"anneal_from is 0.5 without chains; leave it out, or give their leapfrogs, --anneal 8"):
        DensityConfig(anneal_from=0.5)
    for share in (-0.1, 1.0, math.nan):
        with pytest.raises(DohyoError, match=r"it must be a share of the training, at least 0 and below 1"):
            DensityConfig(anneal=2, anneal_from=share)
    assert DensityConfig().anneal_from == 0
