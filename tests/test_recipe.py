"""Recipes, schedules and averages: what a name stands for, what the learning rate does, and where a run goes on."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dohyo import SUMO
from dohyo.lab import LoopConfig, fit
from dohyo.lab.cli import main
from dohyo.lab.folder import read_records
from dohyo.lab.training.config import RECIPES, Progress
from dohyo.lab.training.state import load_checkpoint
from dohyo.objectives import MaximumLikelihood
from teams import DATA, config, model

OURS: dict[str, Any] = {"recipe": "ours", "batch_size": 700, "valid_terms": 2, "device": "cpu", "checkpoint_seconds": 0.0}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fills_in_what_is_left_out(name: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = LoopConfig(recipe=name)
    assert {key: getattr(made, key) for key in RECIPES[name]} == RECIPES[name]
    with pytest.raises(SystemExit):
        main(["train", "--recipe", name, "--epsilon", "1e-5", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert {key: printed[key] for key in RECIPES[name]} == RECIPES[name] | {"epsilon": 1e-5}
    assert printed["recipe"] == name


def test_a_recipe_wins_over_that_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is in the file beside its recipe stays, and so do the options given."""

    def printed(*options: str) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            main(["train", *options, "--print_config"])
        return yaml.safe_load(capsys.readouterr().out)  # type: ignore[no-any-return]

    (tmp_path / "a.yaml").write_text(yaml.safe_dump(printed("--epsilon", "1e-5", "--hidden", "7")))
    file = ["--config", str(tmp_path / "a.yaml")]
    assert printed(*file) == printed("--epsilon", "1e-5", "--hidden", "7")
    assert printed(*file, "--recipe", "ours") == printed("--recipe", "ours", "--epsilon", "1e-5", "--hidden", "7")
    assert printed(*file, "--recipe", "ours", "--average", "3")["average"] == 3
    assert printed(*file, "--recipe", "ours", "--learning_rate", "1e-3")["learning_rate"] == 1e-3  # though the file has it too
    (tmp_path / "by_hand.yaml").write_text("recipe: paper\nlearning_rate: 1e-3\nepsilon: 1e-4\nepochs: 3\n")
    by_hand = printed("--config", str(tmp_path / "by_hand.yaml"), "--recipe", "ours")
    assert by_hand == printed("--recipe", "ours", "--epochs", "3")
    assert printed("--config", '{"epochs": 3}', "--recipe", "ours") == by_hand
    assert main(["evaluate", "nowhere", "--config", '{"replicates": 1}', "--target_stderr", "0.1"]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_the_paper_is_the_default_and_options_win() -> None:
    assert LoopConfig() == LoopConfig(recipe="paper")
    assert LoopConfig(recipe="ours", optimiser="rmsprop", learning_rate=3e-4).optimiser == "rmsprop"
    assert LoopConfig(recipe="ours", learning_rate=3e-4).rate(Progress()) == pytest.approx(3e-4)


def test_a_cosine_over_epochs_or_seconds() -> None:
    made = LoopConfig(schedule="cosine", learning_rate=1.0, epochs=10, max_seconds=60, stop_patience=1)
    for progress, share in ((Progress(), 0), (Progress(epoch=5, seconds=6), 0.5), (Progress(epoch=1, seconds=45), 0.75)):
        assert made.rate(progress) == pytest.approx(0.505 + 0.495 * math.cos(math.pi * share))
    assert made.rate(Progress(epoch=3, seconds=61)) == pytest.approx(0.01)
    assert not made.over(Progress(epoch=9, stale=9, seconds=59))  # the decay is what it runs for
    assert made.over(Progress(epoch=3, seconds=61))


def test_a_stopped_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, parts = LoopConfig(epochs=5, **OURS), [2, 1, 9]
    for name, lengths in (("whole", [9]), ("parts", parts)):
        for length in lengths:
            running = fit(model(0), DATA, MaximumLikelihood(SUMO.at_cost(5)), whole, tmp_path / name)
            list(itertools.islice(running, length))
            running.close()  # type: ignore[attr-defined]
    rates = [[record["learning_rate"] for record in read_records(tmp_path / name)] for name in ("whole", "parts")]
    assert rates[0] == rates[1] == [whole.rate(Progress(epoch=epoch)) for epoch in range(5)]
    one, other = (load_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    for part in ("model", "best", "average"):
        assert all(torch.equal(value, other[part][key]) for key, value in one[part].items())


def test_what_is_averaged(tmp_path: Path) -> None:
    """A plain mean at first; then exponential, with the mean age and the variance of a plain mean over as many epochs."""
    made, wanted = model(0), LoopConfig(epochs=7, **OURS | {"average": 5})
    running = fit(made, DATA, MaximumLikelihood(SUMO.at_cost(5)), wanted, tmp_path)
    seen = [{key: value.clone() for key, value in made.state_dict().items()} for _ in running]
    weights = 3 * [(2 / 3) ** 4 / 3] + [(2 / 3) ** age / 3 for age in (3, 2, 1, 0)]
    for key, value in load_checkpoint(tmp_path)["average"].items():
        wanted = sum(weight * epoch[key] for weight, epoch in zip(weights, seen, strict=True))
        torch.testing.assert_close(value, wanted, atol=1e-6, rtol=1e-5)


def test_averages_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["train", "--estimator", "iwae", "--cost", "2", "--hidden", "8", "--latent", "2", "--batch-size", "300",
             "--epochs", "4", "--valid-terms", "2", "--test-terms", "5", "--device", "cpu", "--learning-rate", "0.1"]  # fmt: skip
    assert main([*train, "--average", "3", "--replicas", "2", "--out", "a"]) == 0
    assert "averaged parameters: " in capsys.readouterr().out
    result = json.loads(Path("a/result.json").read_text())
    assert result["test_nll_average"] == pytest.approx(sum(one["test_nll_average"] for one in result["replicas"]) / 2)
    run, one = Path("a/replica_1"), result["replicas"][1]
    assert one["test_nll_average"] != one["test_nll"]
    assert one["valid_nll_average"] != one["valid_nll"]
    evaluate = ["evaluate", str(run), "--estimator", "iwae", "--cost", "5", "--anneal", "0", "--seed", "1", "--json"]
    found = []
    for more in ([], ["--average"]):
        assert main([*evaluate, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["nll"])
    assert found == pytest.approx([one["test_nll"], one["test_nll_average"]])
    assert json.loads((run / "evaluation.json").read_text())["nll"] == found[0]  # not replaced
    assert main(["sample", str(run), "--average", "--out", "average.png"]) == 0
    assert main(["compare", str(run / "test.npz"), str(run / "test_average.npz")]) == 0
    assert main([*train, "--average", "0", "--out", "b"]) == 0
    assert main(["sample", "b", "--average"]) == 2
    assert "b: has no averaged parameters; train with --average 10, say" in capsys.readouterr().err


def test_a_checkpoint_without_a_recipe(tmp_path: Path) -> None:
    """Made before there were any: it is the paper's."""
    objective = MaximumLikelihood(SUMO.at_cost(5))
    list(fit(model(0), DATA, objective, config(0, epochs=1), tmp_path))
    checkpoint = load_checkpoint(tmp_path)
    for key in ("recipe", "schedule", "average"):
        del checkpoint["config"][key]
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    assert len(list(fit(model(0), DATA, objective, config(0, epochs=2), tmp_path))) == 1
    with pytest.raises(ValueError, match=r"schedule is cosine now, but was plateau"):
        list(fit(model(0), DATA, objective, config(0, epochs=3, schedule="cosine"), tmp_path))
