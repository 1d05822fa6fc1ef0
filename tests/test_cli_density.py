"""`dohyo train`, `evaluate` and `sample` as a user runs them: real processes, killed and resumed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import dohyo
from dohyo.lab.cli import main
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.folder import read_records
from dohyo.lab.training.state import load_checkpoint
from real import command, finished, fresh, kill_until_done, same_run, started

SMALL = ["--hidden", "16", "--latent", "4", "--test-terms", "50", "--valid-terms", "5", "--device", "cpu"]
SUMO = ["--data", "digits", "--estimator", "sumo", "--cost", "15", "--seed", "0", *SMALL]


def run(*arguments: str, folder: Path, largest: int | None = None) -> subprocess.CompletedProcess[str]:
    return finished(command(*arguments), folder, largest)


@pytest.fixture(scope="session")  # a worker may come back to this file
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run `a` of eight epochs."""
    folder = tmp_path_factory.mktemp("runs")
    done = fresh(command("train", *SUMO, "--epochs", "8", "--checkpoint-seconds", "0", "--out", "a"), folder)
    assert done.returncode == 0, done.stderr
    assert "test NLL" in done.stdout
    return folder


def test_the_run_folder_is_whole(runs: Path) -> None:
    names = {path.name for path in (runs / "a").iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "result.json", "checkpoint.pt", "tensorboard"}
    assert names >= {"learning_curves.png", "samples.png", "reconstructions.png", "learning_curves.json"}
    result = json.loads((runs / "a/result.json").read_text())
    assert result["schema_version"] == 1
    assert result["estimator"] == "sumo"
    assert result["expected_cost"] == pytest.approx(15.078, abs=1e-3)
    assert result["epochs"] == 8
    assert 20 < result["test_nll"] < 30
    assert 0 < result["test_nll_stderr"] < 1
    config = yaml.safe_load((runs / "a/config.yaml").read_text())
    assert (config["encoder"], config["clip_decoder"], config["clip_encoder"]) == ("dreg", 20.0, 125.0)
    assert [record["epoch"] for record in read_records(runs / "a")] == list(range(1, 9))


def test_resuming_a_finished_run_does_nothing(runs: Path) -> None:
    before = (runs / "a/result.json").stat().st_mtime_ns
    done = run("train", "--resume", "a", folder=runs)
    assert done.returncode == 0, done.stderr
    assert "already finished" in done.stdout
    assert (runs / "a/result.json").stat().st_mtime_ns == before


def test_an_extended_run_equals_a_long_one_also_if_it_is_interrupted_in_the_final_test(runs: Path) -> None:
    assert run("train", *SUMO, "--epochs", "2", "--out", "late", folder=runs).returncode == 0
    old = (runs / "late/result.json").read_text()
    done = run("train", "--resume", "late", "--epochs", "8", "--json", folder=runs)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epochs"] == 8
    assert same_run(runs / "a", runs / "late")
    (runs / "late/result.json").write_text(old)  # as if it had been killed before the new one was written
    assert run("train", "--resume", "late", folder=runs).returncode == 0
    assert same_run(runs / "a", runs / "late")


def test_edited_configs_get_one_line(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for edit in ("hidden: 8", "cost: 5.0", "seed: abc", "batch_size: 10.5", "model: vae2", "data_kind: real", "colour: red"):
        folder = tmp_path / edit.split(":")[0]
        folder.mkdir()
        config = yaml.safe_load((runs / "a/config.yaml").read_text()) | yaml.safe_load(edit) | {"epochs": 9}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "checkpoint.pt").write_bytes((runs / "a/checkpoint.pt").read_bytes())
        assert main(["train", "--resume", str(folder)]) == 2, edit
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert edit.split(":")[0] in error
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.yaml").write_text("")
    assert main(["evaluate", "empty"]) == 2


def test_killed_at_random_times_it_ends_the_same(runs: Path) -> None:
    """SIGKILL, again and again, until a run gets through; the result is the uninterrupted run's, bit for bit."""
    first = command("train", *SUMO, "--epochs", "8", "--checkpoint-seconds", "0", "--out", "killed")
    assert kill_until_done(first, command("train", "--resume", "killed"), runs, "killed", most=4) >= 2
    assert same_run(runs / "a", runs / "killed")
    assert not list((runs / "killed").glob(".dohyo-*"))  # what a kill while writing left is gone


def test_ctrl_c_says_how_to_go_on(runs: Path) -> None:
    line = command("train", *SUMO, "--epochs", "100000", "--checkpoint-seconds", "0", "--out", "interrupted")
    process = started(line, runs, error=runs / "error")
    while process.is_alive() and len(read_records(runs / "interrupted")) < 2:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    last = (runs / "error").read_text().splitlines()[-1]
    assert last == "dohyo: interrupted; continue with: dohyo train --resume interrupted"
    assert load_checkpoint(runs / "interrupted")["numbers"]["epoch"] >= 1


def test_resuming_before_the_first_checkpoint_starts_the_run(runs: Path) -> None:
    (runs / "unborn").mkdir()
    (runs / "unborn/config.yaml").write_text((runs / "a/config.yaml").read_text())
    assert run("train", "--resume", "unborn", folder=runs).returncode == 0
    assert same_run(runs / "a", runs / "unborn")


def test_evaluate_and_sample(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(runs)
    assert (
        main(["evaluate", "a", "--estimator", "multilevel-rr", "--cost", "50", "--replicates", "4", "--json", "--out", "v.npz"])
        == 0
    )
    unbiased = json.loads(capsys.readouterr().out)
    assert main(["evaluate", "a", "--estimator", "iwae", "--cost", "500", "--json"]) == 0
    bound = json.loads(capsys.readouterr().out)
    assert unbiased["kind"] == "unbiased"
    assert bound["kind"] == "lower bound"
    assert abs(unbiased["nll"] - bound["nll"]) < 4 * unbiased["noise_stderr"] + 0.05
    assert len(np.load("v.npz")["log_px"]) == 300
    assert main(["evaluate", "a", "--estimator", "elbo", "--cost", "3", "--max-rows", "1000", "--reference"]) == 0
    table = capsys.readouterr().out
    assert "elbo" in table
    assert "iwae" in table
    assert main(["sample", "a", "--count", "9", "--out", "s.png"]) == 0
    assert main(["sample", "a", "--count", "5", "--reconstruct", "--out", "r.png"]) == 0
    assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in ("s.png", "r.png"))


def test_users_own_data_and_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    np.savez("grey.npz", train=generator.random((300, 5, 5)), test=generator.random((50, 5, 5)))
    real = generator.standard_normal((400, 6)) @ generator.standard_normal((6, 6)) * 10 + 100
    np.save("real.npy", real.reshape(400, 2, 3).astype(np.float32))
    Path("mine.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Mixture(nn.Module):\n"
        "    def __init__(self, data):\n"
        "        super().__init__()\n"
        "        self.logits = nn.Parameter(torch.randn(4, data) / 10)\n"
        "    def log_weights(self, x, rows):\n"
        "        z = torch.randint(4, (len(rows),))\n"
        "        return torch.distributions.Bernoulli(logits=self.logits[z]).log_prob(x[rows]).sum(-1)\n"
    )
    cases = [
        ("grey", ["--data", "grey.npz", "--estimator", "multilevel-rr", "--cost", "6"], (15, 20)),
        ("real", ["--data", "real.npy", "--estimator", "symmetric-sumo", "--cost", "6", "--learning-rate", "0.003"], (20, 40)),
        ("own", ["--data", "grey.npz", "--model", "mine:Mixture", "--estimator", "iwae", "--cost", "4"], (15, 20)),
    ]
    for name, arguments, (low, high) in cases:
        assert main(["train", *arguments, *SMALL, "--epochs", "5", "--out", name, "--json"]) == 0, capsys.readouterr().err
        assert low < json.loads(capsys.readouterr().out)["test_nll"] < high
        monkeypatch.chdir(tmp_path.parent)  # the data are found again from elsewhere
        monkeypatch.syspath_prepend(str(tmp_path))
        arguments = ["evaluate", str(tmp_path / name), "--estimator", "iwae", "--cost", "20", "--json"]
        assert main(arguments) == 0, capsys.readouterr().err
        monkeypatch.chdir(tmp_path)
        assert low < json.loads(capsys.readouterr().out)["nll"] < high
    assert main(["sample", "own"]) == 2
    assert "sample_mean" in capsys.readouterr().err


def test_the_guides_convolutions_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model in docs/guides/train.md as it stands there, on images of the same size from three sources; and a CSV file."""
    monkeypatch.chdir(tmp_path)
    guide = (Path(__file__).parent.parent / "docs/guides/train.md").read_text(encoding="utf-8")
    code = guide.partition("With a file `mine.py` like this,\n\n```python\n")[2].partition("```")[0]
    Path("guides_mine.py").write_text(code)
    levels = np.random.default_rng(0).integers(0, 17, (60, 64))
    Path("levels.csv").write_text("\n".join(",".join(map(str, row)) for row in levels))
    own = ["--model", "guides_mine:conv", "--estimator", "iwae", "--cost", "2", *SMALL, "--epochs", "1", "--data"]
    assert main(["train", *own, "digits", "--encoder", "dreg", "--out", "a"]) == 0, capsys.readouterr().err
    assert "digits: 1x8x8 floats from 0 to 1, read as grey; 1,297 to train on" in capsys.readouterr().out
    assert main(["evaluate", "a", "--estimator", "iwae", "--cost", "3"]) == 0
    assert main(["sample", "a", "--reconstruct", "--count", "3", "--out", "r.png"]) == 0
    assert main(["train", *own, "levels.csv", "--out", "b"]) == 2
    assert "whole numbers from 0 to 16: grey values if 16 is white, then give --data-white 16" in capsys.readouterr().err
    assert main(["train", *own, "levels.csv", "--data-white", "16", "--out", "b"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "guides_mine:conv raised RuntimeError: " in error
    assert "with x (2, 64); if x has the wrong shape, change --data-shape from 64" in error
    assert main(["train", *own, "levels.csv", "--data-white", "16", "--data-shape", "1x8x8", "--out", "b", "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out.splitlines()[-1])["data_read"]
        == "whole numbers from 0 to 16, divided by 16, read as grey"
    )
    assert {path.name for path in Path("b").glob("*.png")} == {"learning_curves.png", "samples.png", "reconstructions.png"}
    line = "train --data levels.csv --data-kind real --estimator iwae --cost 2 --epochs 1"
    table = [*line.split(), *SMALL]
    assert main([*table, "--out", "c"]) == 0
    assert {path.name for path in Path("c").glob("*.png")} == {"learning_curves.png", "marginals.png", "pairs.png"}
    assert main(["sample", "c", "--out", "c.png"]) == 0
    assert main(["sample", "c", "--reconstruct"]) == 2
    assert "levels.csv is a table" in capsys.readouterr().err
    for wrong in ("0x3", "1x", "a"):
        assert main([*table, "--data-shape", wrong, "--out", "d"]) == 2
        assert "such as 1x28x28" in capsys.readouterr().err


def test_config_files(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(runs)
    with pytest.raises(SystemExit):
        main(["train", "--config", "a/config.yaml", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["estimator"] == "sumo"
    assert printed["hidden"] == 16
    Path("bad.yaml").write_text("estimater: sumo\n")
    assert main(["train", "--config", "bad.yaml", "--out", "x"]) == 2
    assert "estimater" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--out", "a"], "already holds a run"),
        (["train"], "--out FOLDER"),
        (["train", "--resume", "a", "--cost", "5"], "--cost 5.0 differs from the run's 15.0"),
        (["train", "--resume", "nowhere"], "holds no run"),
        (["train", "--data", "digit", "--out", "x"], "did you mean 'digits'"),
        (["train", "--data", "missing.npy", "--out", "x"], "missing.npy"),
        (["train", "--estimator", "sumoo", "--out", "x"], "did you mean 'sumo'"),
        (["train", "--estimator", "sumo", "--encoder", "same", "--out", "x"], "trains the encoder on noise"),
        (["train", "--model", "vea", "--out", "x"], "did you mean 'vae'"),
        (["train", "--model", "nomodule:Thing", "--out", "x"], "nomodule"),
        (["train", "--estimator", "sumo", "--cost", "2", "--out", "x"], "cost is 2"),
        (["train", "--epochs", "0", "--out", "x"], "epochs is 0"),
        (["train", "--k-draw", "row", "--out", "x"], "k_draw"),
        (["train", "--clip-decoder", "some", "--out", "x"], "clip_decoder"),
        (["train", "--replicas", "0", "--out", "x"], "replicas is 0; it must be at least 1"),
        (["train", "--max-terms", "0", "--out", "x"], "max_terms is 0; it must be at least 1"),
        (["train", "--program", "capturd", "--out", "x"], "did you mean 'captured'"),
        (["train", "--device", "cuda", "--out", "x"], "no CUDA GPU"),
        (["train", "--device", "tpu", "--out", "x"], "unknown device 'tpu'"),
        (["evaluate", "a", "--device", "tpu"], "unknown device 'tpu'"),
        (["evaluate", "nowhere"], "holds no run"),
        (["evaluate", "a", "--split", "tset"], "did you mean 'test'"),
        (["evaluate", "a", "--split", "train"], "binarised at random"),
        (["evaluate", "a", "--estimator", "sumo", "--target-stderr", "0.1"], "finite"),
        (["evaluate", "a", "--estimator", "elbo", "--cost", "2", "--out", "v.csv"], ".npz"),
        (["evaluate", "damaged"], "damaged"),
        (["sample", "a", "--count", "0"], "--count is 0"),
    ],
)
def test_bad_input_gets_one_line(
    runs: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU")
    monkeypatch.chdir(runs)
    damaged = runs / "damaged"
    if not damaged.exists():
        damaged.mkdir()
        (damaged / "config.yaml").write_text((runs / "a/config.yaml").read_text())
        (damaged / "checkpoint.pt").write_bytes((runs / "a/checkpoint.pt").read_bytes()[:1000])
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("dohyo: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (runs / "x/checkpoint.pt").exists()


def test_a_full_disk_leaves_the_old_checkpoint(runs: Path) -> None:
    """The system refuses files larger than the limit, as a full disk would; the checkpoint is the largest."""
    assert run("train", *SUMO, "--epochs", "2", "--out", "full", folder=runs).returncode == 0
    before = (runs / "full/checkpoint.pt").read_bytes()
    done = run("train", "--resume", "full", "--epochs", "4", folder=runs, largest=len(before) // 2)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("dohyo: error: ")
    assert (runs / "full/checkpoint.pt").read_bytes() == before
    assert not list((runs / "full").glob(".dohyo-*"))
    assert run("train", "--resume", "full", folder=runs).returncode == 0
    assert load_checkpoint(runs / "full")["numbers"]["epoch"] == 4


def test_max_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "--estimator", "multilevel-rr", "--cost", "8", "--max-terms", "32", "--epochs", "1", *SMALL]
    assert main([*line, "--out", str(tmp_path / "m"), "--json"]) == 0
    assert DensityRun.open(tmp_path / "m").config.objective().estimator.max_terms == 32
    told = json.loads(capsys.readouterr().out)["estimator_arguments"]
    assert dohyo.from_dict(told).target_terms == 32
