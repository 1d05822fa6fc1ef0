"""`dohyo train --replicas`, and what it says of models that cannot be batched or captured."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dohyo.lab.cli import main
from dohyo.lab.cli.screen import count
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.fast import programs, together
from dohyo.lab.training.processes import launch
from real import command, finished

SMALL = ["--hidden", "16", "--latent", "4", "--test-terms", "50", "--valid-terms", "5", "--device", "cpu"]
SUMO = ["--data", "digits", "--estimator", "sumo", "--cost", "15", "--seed", "0", *SMALL]


def run(*arguments: str, folder: Path) -> Any:
    return finished(command(*arguments), folder)


def test_replicas(tmp_path: Path) -> None:
    """Each equals its seed trained alone, to rounding; the result is their mean, with them beside it; it goes on."""
    done = run("train", *SUMO, "--epochs", "2", "--replicas", "3", "--out", "three", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "three/result.json").read_text())
    nlls = [replica["test_nll"] for replica in result["replicas"]]
    assert len(set(nlls)) == 3
    assert result["test_nll"] == pytest.approx(sum(nlls) / 3)
    assert result["test_nll_spread"] == pytest.approx(float(torch.tensor(nlls, dtype=torch.float64).std()))
    assert set(result) - set(result["replicas"][0]) == {"replicas", "test_nll_spread", "test_nll_mean_stderr"}
    seed = result["replicas"][1]["seed"]
    first = str(result["seed"])
    alone = ("--seed", str(seed), "--k-seed", first, "--data-seed", first, "--epochs", "2", "--out", "alone")
    assert run("train", *SUMO, *alone, folder=tmp_path).returncode == 0
    assert json.loads((tmp_path / "alone/result.json").read_text())["test_nll"] == pytest.approx(nlls[1], abs=1e-4)
    assert result["warnings"] == json.loads((tmp_path / "alone/result.json").read_text())["warnings"]

    (tmp_path / "three/result.json").unlink()
    (tmp_path / "three/replica_2/result.json").unlink()
    again = run("train", "--resume", "three", "--json", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [replica["test_nll"] for replica in json.loads(again.stdout)["replicas"]] == nlls
    refused = run("evaluate", "three", folder=tmp_path)
    assert refused.returncode == 2
    assert "three/replica_0" in refused.stderr


def test_replicas_begin_with_replicas_and_go_on_without_them(tmp_path: Path) -> None:
    given = ["--data", "digits", "--estimator", "iwae", "--cost", "2", *SMALL, "--replicas", "2", "--json"]
    assert run("train", *given, "--epochs", "2", "--out", "first", folder=tmp_path).returncode == 0
    still = ("--learning-rate", "1e-9", "--epochs", "1")
    done = run("train", *given, *still, "--init-from", "first", "--out", "second", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    began, ended = ([one["valid_nll"] for one in json.loads((tmp_path / name / "result.json").read_text())["replicas"]]
                    for name in ("first", "second"))  # fmt: skip
    assert ended == pytest.approx(began, abs=1e-4)  # each its own: they differ by 0.01 and more
    assert abs(began[0] - began[1]) > 1e-3
    configs = [(tmp_path / f"second/replica_{i}/config.yaml") for i in range(2)]
    assert all(f"first/replica_{i}\n" in config.read_text() for i, config in enumerate(configs))
    few = run("train", *given[:-3], "--replicas", "3", "--init-from", "first", "--out", "third", folder=tmp_path)
    assert few.returncode == 2
    assert "first/replica_2: holds no run" in few.stderr
    alone = run("train", *given[:-3], "--init-from", "first", "--out", "third", folder=tmp_path)
    assert "name one of them, such as" in alone.stderr
    assert not (tmp_path / "third").exists()
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    again = run("train", "--resume", "second", "--epochs", "2", "--json", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert all(f"first/replica_{i}\n" in config.read_text() for i, config in enumerate(configs))  # where it began is kept


def test_replicas_that_cannot_be_batched_run_in_sequence(tmp_path: Path) -> None:
    (tmp_path / "branching.py").write_text(
        "from dohyo.models import VAE\n"
        "class Branching(VAE):\n"
        "    def encode(self, x):\n"
        "        code = super().encode(x)\n"
        "        return code if float(code.detach().sum()) > 0 else code + 0.0\n"
    )
    options = (*SUMO, "--model", "branching:Branching", "--epochs", "1", "--replicas", "2")
    done = run("train", *options, "--out", "sequence", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the replicas run one after the other: Branching cannot be mapped over replicas" in done.stdout + done.stderr
    together = run("train", *SUMO, "--epochs", "1", "--replicas", "2", "--out", "together", "--json", folder=tmp_path)
    nlls = [[replica["test_nll"] for replica in found["replicas"]] for found in
            (json.loads(together.stdout), json.loads((tmp_path / "sequence/result.json").read_text()))]  # fmt: skip
    assert nlls[0] == pytest.approx(nlls[1], abs=1e-4)  # the two models are the same, and so is every number
    refused = run("train", *options[:-2], "--program", "captured", "--out", "captured", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("dohyo: error: Branching cannot be captured")
    assert refused.stderr.endswith("; use program 'plain'\n")
    assert refused.stderr.count("\n") == 1
    # gone on with when only one is left: still said; and with epochs to come, at once and in the end; the time is that of both
    (tmp_path / "sequence/result.json").unlink()
    (tmp_path / "sequence/replica_1/result.json").unlink()
    for times, epochs in ((1, "1"), (2, "2")):
        again = run("train", "--resume", "sequence", "--epochs", epochs, folder=tmp_path)
        assert again.stdout.count("warning: the replicas run one after the other") == times, again.stderr
    result = json.loads((tmp_path / "sequence/result.json").read_text())
    assert result["seconds"] == pytest.approx(sum(replica["seconds"] for replica in result["replicas"]))


def test_a_replica_that_diverges_leaves_the_results_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "doomed.py").write_text(
        "import torch\n"
        "from dohyo.models import VAE\n"
        "class Doomed(VAE):\n"
        "    def __init__(self, **sizes):\n"
        "        super().__init__(**sizes)\n"
        "        self.register_buffer('doom', torch.tensor(1e38 if torch.initial_seed() == 1 else 0.0))\n"
        "        self.shift = torch.nn.Parameter(torch.zeros(()))\n"
        "    def bind(self, x, **options):\n"
        "        source = super().bind(x, **options)\n"
        "        return lambda rows: source(rows) + self.shift + (self.doom * self.shift) ** 2\n"
    )
    options = (*SUMO, "--model", "doomed:Doomed", "--epochs", "2", "--replicas", "3")
    for line in (["train", *options, "--out", "r"], ["train", "--resume", "r"]):
        done = run(*line, folder=tmp_path)
        assert done.returncode == 2
        error = done.stderr.strip().splitlines()[-1]
        assert "training diverged in epoch 1" in error
        assert error.endswith("; the others are finished, in r/replica_0, r/replica_2")
    for number in (0, 2):
        assert json.loads((tmp_path / f"r/replica_{number}/result.json").read_text())["epochs"] == 2
    assert not (tmp_path / "r/result.json").exists()


def test_why_a_step_is_not_captured_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (programs, together):
        monkeypatch.setattr(module, "choose", lambda *_: programs.Choice(reason="it is too odd"))
    monkeypatch.setattr(DensityConfig, "captured_on", lambda *_: True)
    config, told = DensityConfig(hidden=4, latent=2, epochs=1, valid_terms=2, test_terms=2, device="cpu"), []
    for replicas in (1, 2):
        run = DensityRun(tmp_path / str(replicas), dataclasses.replace(config, replicas=replicas))
        result = run.complete(launch("cpu"), lambda record: told.append(record["notices"]))
        assert "the step is not captured: it is too odd" in result["warnings"]
    assert told == 3 * [["the step is not captured: it is too odd"]]


def test_replicas_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SUMO, "--seed", "4", "--epochs", "2", "--replicas", "2", "--out", "two"]) == 0
    said, result = capsys.readouterr().out, json.loads(Path("two/result.json").read_text())
    assert (result["seed"], [one["seed"] for one in result["replicas"]]) == (4, [4, 5])
    assert result["test_nll_mean_stderr"] == pytest.approx(result["test_nll_spread"] / 2**0.5)
    assert f"their standard deviation is {result['test_nll_spread']:.3f}" in said
    # one replica is trained on by itself, and the program may change: the result of all is made anew
    assert main(["train", "--resume", "two/replica_1", "--epochs", "3", "--json"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "two", "--program", "plain", "--json"]) == 0
    assert [one["epochs"] for one in json.loads(capsys.readouterr().out)["replicas"]] == [2, 3]


def test_replicas_are_trained_together(tmp_path: Path) -> None:
    config = DensityConfig(hidden=4, latent=2, epochs=2, valid_terms=2, test_terms=2, replicas=2, device="cpu")
    seen: list[int] = []
    DensityRun(tmp_path, config).complete(launch("cpu"), lambda record: seen.append(record["replica"]))
    assert seen == [0, 1, 0, 1]


def test_replicas_have_one_copy_of_the_data(tmp_path: Path) -> None:
    first, second = DensityRun(tmp_path, DensityConfig(hidden=4, latent=2, replicas=2)).replicas
    assert first.parts[1] is second.parts[1]


def test_whole_numbers_and_their_means() -> None:
    assert [count(number) for number in (3, 20_000, 3.0, 17 / 3)] == ["3", "20000", "3", "5.7"]


def test_the_warnings_of_all_replicas_are_told(tmp_path: Path) -> None:
    one: dict[str, Any] = {"test_nll": 1.0, "warnings": ["b"]}
    joined = DensityRun(tmp_path, DensityConfig(replicas=2)).joined([one, one | {"test_nll": 2.0, "warnings": ["a", "b"]}])
    assert joined["warnings"] == ["a", "b"]


def test_replicas_of_the_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reverse KL: the mean with the spread; policies: the best of all. Each is the run of its seed, and they can be resumed."""
    monkeypatch.chdir(tmp_path)
    sizes = ["--hidden", "4", "--latent", "2", "--device", "cpu", "--batch-size", "20"]
    kl = ["reverse-kl", *sizes, "--check-draws", "25", "--check-terms", "5", "--test-draws", "25", "--test-terms", "5",
          "--check-every", "4", "--on-divergence", "continue"]  # fmt: skip
    assert main([*kl, "--seed", "4", "--steps", "8", "--replicas", "2", "--out", "kl"]) == 0
    said, result = capsys.readouterr().out, json.loads(Path("kl/result.json").read_text())
    found = [one["reverse_kl"] for one in result["replicas"]]
    assert [one["seed"] for one in result["replicas"]] == [4, 5]
    assert result["reverse_kl"] == pytest.approx(sum(found) / 2)
    assert result["reverse_kl_spread"] == pytest.approx(abs(found[0] - found[1]) / 2**0.5)
    assert f"each: {found[0]:.3f}, {found[1]:.3f}" in said
    assert main([*kl, "--seed", "5", "--k-seed", "4", "--steps", "8", "--out", "alone"]) == 0
    assert json.loads(Path("alone/result.json").read_text())["reverse_kl"] == pytest.approx(found[1], abs=1e-4)
    qpbo = ["qpbo", "--policy", "latent", *sizes, "--variables", "6", "--replicas", "2", "--check-every", "5"]
    assert main([*qpbo, "--steps", "5", "--out", "bits"]) == 0
    assert main(["qpbo", "--resume", "bits", "--steps", "10"]) == 0
    result = json.loads(Path("bits/result.json").read_text())
    assert result["best_reward"] == max(one["best_reward"] for one in result["replicas"])
    assert [one["steps"] for one in result["replicas"]] == [10, 10]
    assert "best of 2 replicas: best reward" in capsys.readouterr().out
    assert main(["reverse-kl", *sizes, "--replicas", "0", "--out", "none"]) == 2
    assert "replicas is 0; it must be at least 1" in capsys.readouterr().err
