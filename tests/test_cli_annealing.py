"""`dohyo evaluate --anneal` and `dohyo sandwich` on a real run, and what the report says of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dohyo.annealing import tuning
from dohyo.lab.cli import evaluate, main
from dohyo.lab.experiments import annealing
from dohyo.lab.report import read

TRAIN = ["train", "--data", "digits", "--epochs", "2", "--hidden", "16", "--latent", "6", "--estimator", "iwae", "--cost", "3",
         "--test-terms", "30", "--valid-terms", "2", "--device", "cpu"]  # fmt: skip


@pytest.fixture(scope="session")  # a worker may come back to this file
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("annealing") / "a"
    assert main([*TRAIN, "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "a")
    return tmp_path / "a"


def found(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto sees heavy weights whatever they are."""
    monkeypatch.setattr(annealing, "GOOD", -1.0)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pilot and a picture of few weights, constants after a few iterations."""
    climb = tuning.climb
    monkeypatch.setattr(tuning, "climb", lambda model, data, start, _, *more: climb(model, data, start, 5, *more))
    monkeypatch.setattr(tuning, "STEPS", (0, 4))
    monkeypatch.setattr(tuning, "PILOT", 16)
    monkeypatch.setattr(tuning, "EVALUATIONS", 200)
    monkeypatch.setattr(annealing, "ENCODER_WEIGHTS", 100)
    monkeypatch.setattr(annealing, "CHAINS", 30)
    monkeypatch.setattr(evaluate, "CHAINS", 30)


def test_auto_keeps_good_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto, encoder = (found(capsys, "evaluate", run, *more) for more in ([], ["--anneal", "0"]))
    assert auto == encoder
    assert auto["steps"] == 0
    assert auto["verdict"]["trusted"] is True
    assert not (run / "annealing.json").exists()
    assert not (run / "log_likelihood.png").exists()
    assert json.loads((run / "evaluation.json").read_text())["mean"] == auto["mean"]


@pytest.mark.usefixtures("short")
def test_annealed_numbers_agree_with_the_encoders(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = found(capsys, "evaluate", run, "--anneal", "0", "--estimator", "iwae", "--cost", "1000")
    chains = found(capsys, "evaluate", run, "--anneal", "4", "--cost", "400", "--replicates", "2")
    assert chains["steps"] == 4
    assert chains["evaluations_per_weight"] == 13
    assert chains["expected_cost"] == pytest.approx(400, rel=0.1)
    assert chains["cost"] > 300 * 2 * 300
    assert abs(chains["mean"] - encoder["mean"]) < 4 * chains["noise_stderr"] + 0.02
    picture = json.loads((run / "log_likelihood.json").read_text())
    assert picture["steps"] == 4
    assert picture["encoder"]["evaluations"][-1] == 100
    assert picture["chains"]["evaluations"][-1] == 13 * 30
    assert picture["encoder"]["log_px"][0] < picture["encoder"]["log_px"][-1]
    assert (run / "log_likelihood.png").read_bytes().startswith(b"\x89PNG")
    entry = read(run)
    assert "Log likelihood" in [figure.title for figure in entry.figures]
    (shown,) = [value for name, value in entry.headline if "chains of 4 leapfrogs" in name]
    assert shown.endswith(", trusted" if chains["verdict"]["trusted"] else ", not to be trusted")


@pytest.mark.usefixtures("short", "heavy")
def test_auto_lets_the_pilot_choose_and_constants_are_reused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "preferred", lambda seen: 1)
    first = found(capsys, "evaluate", run, "--cost", "100")
    assert first["steps"] == 4
    kept = json.loads((run / "annealing.json").read_text())
    assert [one["steps"] for one in kept["test"]["tuned"]["candidates"]] == [0, 4]
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "climb", lambda *_: pytest.fail("tuned again"))
        assert found(capsys, "evaluate", run, "--cost", "100") == first
    counted, climb = [], tuning.climb
    monkeypatch.setattr(tuning, "climb", lambda *given: counted.append(1) or climb(*given))
    found(capsys, "evaluate", run, "--cost", "100", "--split", "valid")  # other data
    assert json.loads((run / "annealing.json").read_text())["test"] == kept["test"]
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    next(iter(checkpoint["best"].values())).add_(1e-3)  # other parameters
    torch.save(checkpoint, run / "checkpoint.pt")
    found(capsys, "evaluate", run, "--cost", "100")
    assert len(counted) == 2
    for number, key in enumerate(("iterations", "by"), 3):
        before = json.loads((run / "annealing.json").read_text())
        del before["test"][key]  # tuned by an earlier version
        (run / "annealing.json").write_text(json.dumps(before))
        found(capsys, "evaluate", run, "--cost", "100")
        assert len(counted) == number


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("worst", "steps"), [(1.1, 0), (1.3, 4)])
def test_auto_does_not_keep_weights_one_of_which_is_hopeless(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, worst: float, steps: int
) -> None:
    monkeypatch.setattr(annealing, "khat", lambda log_w: torch.tensor([worst] + [0.3] * (len(log_w) - 1)))
    monkeypatch.setattr(tuning, "preferred", lambda seen: 1)
    assert found(capsys, "evaluate", run, "--cost", "100")["steps"] == steps


@pytest.mark.usefixtures("short", "heavy")
def test_a_model_without_a_density(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bare.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Bare(nn.Module):\n"
        "    def __init__(self, data):\n"
        "        super().__init__()\n"
        "        self.logits = nn.Parameter(torch.randn(4, data) / 10)\n"
        "    def log_weights(self, x, rows):\n"
        "        z = torch.randint(4, (len(rows),))\n"
        "        return torch.distributions.Bernoulli(logits=self.logits[z]).log_prob(x[rows]).sum(-1)\n"
    )
    np.save("x.npy", np.random.default_rng(0).random((200, 4)).round())
    assert main([*TRAIN, "--data", "x.npy", "--model", "bare:Bare", "--out", "b", "--json"]) == 0
    auto = found(capsys, "evaluate", "b")
    assert auto["steps"] == 0
    assert "cannot be annealed" in auto["warnings"][-1]
    assert "log_joint(x, z)" in auto["warnings"][-1]
    assert main(["evaluate", "b"]) == 0
    assert "warning: the weights cannot be annealed" in capsys.readouterr().out
    assert any("cannot be annealed" in line for line in read(Path("b")).notices)
    for arguments, words in ((["evaluate", "b", "--anneal", "4"], "log_joint(x, z)"), (["sandwich", "b"], "sample_joint(n)")):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error


@pytest.mark.usefixtures("short")
def test_sandwich(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = found(capsys, "sandwich", run, "--count", "60", "--chains", "4", "--anneal", "0")
    chains = found(capsys, "sandwich", run, "--count", "60", "--chains", "4", "--anneal", "4")
    assert plain["steps"] == 0
    assert chains["steps"] == 4
    assert not chains["crosses"]
    assert -4 * chains["gap_stderr"] < chains["gap"] < 1
    assert json.loads((run / "sandwich.json").read_text()) == chains
    assert main(["sandwich", str(run), "--count", "60", "--chains", "4", "--anneal", "4"]) == 0
    out = capsys.readouterr().out
    assert "upper" in out
    assert chains["verdict"] in " ".join(out.split())
    assert any(name == "log p(x) of its own samples, nats" for name, _ in read(run).headline)
    (run / "sandwich.json").write_text(json.dumps(chains | {"crosses": True, "verdict": "it is wrong"}))
    assert "dohyo sandwich: it is wrong" in read(run).notices


def test_the_report_says_what_the_command_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = found(capsys, "evaluate", run, "--estimator", "sumo", "--cost", "10", "--anneal", "0")
    assert values["verdict"]["trusted"] is False
    entry = read(run)
    assert f"dohyo evaluate: {values['verdict']['reason']}" in entry.notices
    assert main(["evaluate", str(run), "--estimator", "sumo", "--cost", "10", "--anneal", "0"]) == 0
    assert f"verdict: {values['verdict']['reason']}" in capsys.readouterr().out.splitlines()
    path = run / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best_epoch": 99}))  # the run has been trained further
    assert not any("sumo" in name for name, _ in read(run).headline)
    path.write_text("{")
    assert main(["report", str(run)]) == 2
    assert "evaluation.json: is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--anneal", "-1"], "--anneal is -1; it must be a whole number of steps"),
        (["evaluate", "--anneal", "1.5"], "anneal"),
        (["evaluate", "--anneal", "atuo"], "did you mean 'auto'"),
        (["sandwich", "--anneal", "-1"], "--anneal is -1"),
        (["sandwich", "--count", "1"], "--count is 1; it must be at least 2"),
        (["sandwich", "--chains", "0"], "--chains is 0"),
    ],
)
def test_bad_input_gets_one_line(trained: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([arguments[0], str(trained), *arguments[1:]]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("dohyo: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_damaged_constants_get_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "annealing.json").write_text("{")
    assert main(["evaluate", str(run), "--anneal", "4"]) == 2
    assert "annealing.json: is damaged" in capsys.readouterr().err
