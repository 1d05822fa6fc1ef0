"""`dohyo reverse-kl` as a user runs it."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import yaml

from dohyo.annealing import tuning
from dohyo.lab.cli import main
from dohyo.lab.folder import read_records
from dohyo.lab.training.state import load_checkpoint

FAST = ["--hidden", "20", "--latent", "2", "--check-draws", "100", "--check-terms", "50", "--test-draws", "100",
        "--test-terms", "50", "--check-every", "20", "--device", "cpu"]  # fmt: skip
PLAIN_IWAE = ["reverse-kl", "--target", "funnel", "--estimator", "iwae", "--cost", "5", "--learning-rate", "0.01",
              "--steps", "120", *FAST]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plain_iwae_is_caught(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It loosens its bound instead of lowering the KL: found, and training stops, or goes on if asked to."""
    assert main([*PLAIN_IWAE, "--out", "stop"]) == 0
    text = capsys.readouterr().out
    assert "DIVERGED" in text
    assert "warning: diverged: log p(x) by the encoder" in text
    stopped = json.loads((here / "stop/result.json").read_text())
    assert stopped["diverged"]
    assert stopped["steps"] < 120
    assert [record["diverged"] for record in read_records(here / "stop")][-2:] == [True, True]
    assert main(["reverse-kl", "--resume", "stop", "--steps", "200"]) == 0  # the end is final
    assert "it ended by itself" in capsys.readouterr().out

    assert main([*PLAIN_IWAE, "--on-divergence", "continue", "--out", "go", "--json"]) == 0
    gone = json.loads(capsys.readouterr().out)
    assert gone["diverged"]
    assert gone["steps"] == 120
    assert gone["training_estimate"] < -10  # impossible for a KL
    assert gone["reverse_kl"] > 1 > 0 > gone["by_encoder"] + 10
    first, last = read_records(here / "go")[0], read_records(here / "go")[-1]
    assert last["reverse_kl"] > first["reverse_kl"]
    assert any("theta loosens the bound instead of lowering the objective" in line for line in gone["warnings"])


def test_the_last_check_with_annealed_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["reverse-kl", "--target", "banana", "--estimator", "multilevel-rr", "--cost", "5", "--steps", "20", *FAST]
    assert main([*train, "--out", "a", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main(["divergence", "a", "--anneal", "3", "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert (before["anneal"], before["leapfrogs"], after["anneal"], after["leapfrogs"]) == (0, 0, 3, 3)
    assert after["steps"] == 20
    assert after["by_prior"] == pytest.approx(before["by_prior"], abs=1.0)
    assert after["by_encoder"] < after["above"] + 0.1
    assert main(["reverse-kl", "--resume", "a", "--anneal", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == after  # nothing left to do
    assert main([*train, "--anneal", "-1", "--out", "b"]) == 2
    assert "anneal is -1" in capsys.readouterr().err


def test_a_divergence_measured_again_trains_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STEPS", (0, 2))
    monkeypatch.setattr(tuning, "preferred", lambda seen: 1)
    train = ["reverse-kl", "--target", "banana", "--estimator", "multilevel-rr", "--cost", "5", "--steps", "20", *FAST]
    assert main([*train, "--replicas", "2", "--out", "a", "--json"]) == 0
    checkpoints = [Path(f"a/replica_{i}/checkpoint.pt").read_bytes() for i in range(2)]
    capsys.readouterr()
    assert main(["divergence", "a", "--test-draws", "60"]) == 0  # auto
    assert "log p(x) by chains of 2 leapfrogs" in " ".join(capsys.readouterr().out.split())
    result = json.loads(Path("a/replica_1/result.json").read_text())
    assert (result["anneal"], result["leapfrogs"], result["test_draws"]) == ("auto", 2, 60)
    assert [Path(f"a/replica_{i}/checkpoint.pt").read_bytes() for i in range(2)] == checkpoints
    config = Path("a/replica_0/config.yaml")
    for arguments, words in [
        (["evaluate", "a/replica_0"], "a run of dohyo reverse-kl, and one of dohyo train is needed here; dohyo divergence"),
        (["sandwich", "a/replica_0"], "a run of dohyo reverse-kl"),
        (["divergence", "a", "--anneal", "1.5"], "anneal"),
        (["divergence", "a", "--test-terms", "0"], "test_terms is 0"),
    ]:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
    config.write_text(config.read_text().replace("steps: 20", "steps: 30"))
    assert main(["divergence", "a/replica_0"]) == 2
    assert "is not trained to its end; dohyo reverse-kl --resume a/replica_0 goes on" in capsys.readouterr().err


def test_an_unbiased_estimator_in_its_place_does_not_diverge(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAIN_IWAE, "--estimator", "multilevel-rr", "--out", "good", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert not result["diverged"]
    assert result["steps"] == 120
    assert 0 < result["reverse_kl"] < 2


def test_the_ring_is_reported_with_its_normaliser(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate and the KL hold log Z; the objective and the ways do not."""
    line = "reverse-kl --target ring --estimator multilevel-rr --cost 5 --steps 40 --out r --json"
    assert main([*line.split(), *FAST]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reverse_kl"] == pytest.approx(result["objective"] + result["log_normaliser"])
    assert result["training_estimate"] > 0
    assert set(result["moments"]) == {"x1", "x2"}
    quantiles = {"q2.5", "q25", "q50", "q75", "q97.5"}
    assert set(result["moments"]["x1"]) == {"mean", "sd", "stderr", "raw_mean", "raw_sd", "exact_mean", "exact_sd"} | quantiles
    assert abs(result["log_z"] - result["log_normaliser"]) < 6 * result["log_z_stderr"] + 1


def test_an_unknown_log_z_is_estimated_and_heavy_weights_are_said_everywhere(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The screen, result.json and the report say the same; a far target that was hardly trained for has heavy weights."""
    (here / "far_target.py").write_text("def f(x):\n    return -(x - 8).square().sum(-1) / 2\n\n\nf.dimension = 2\n")
    arguments = ["--target", "far_target:f", "--estimator", "multilevel-rr", "--cost", "5", "--steps", "20", *FAST, "--out", "r"]
    assert main(["reverse-kl", *arguments]) == 0
    text = capsys.readouterr().out
    result = json.loads((here / "r/result.json").read_text())
    assert result["log_normaliser"] is None
    assert result["reverse_kl"] == pytest.approx(result["objective"] + result["log_z"])
    assert text.index(f"log Z {result['log_z']:.3f}") < text.index(f"reverse KL {result['reverse_kl']:.3f}")
    assert "+ log Z" not in text
    assert "95% between" in text
    assert result["khat"] > 0.7
    (warning,) = [line for line in result["warnings"] if "k-hat" in line]
    assert f"warning: {warning}" in text
    assert main(["report", "r", "--out", "page.html"]) == 0
    page = (here / "page.html").read_text(encoding="utf-8")
    assert warning in page
    assert "<strong>Warning</strong> do not trust" in page
    assert f"{result['khat']:.2g}: do not trust" in page
    assert "Effective samples" in page
    assert "97.5%" in page


def test_progress_moves_between_checks(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow target and a single check, at the end: what a terminal shows counts the steps all the same."""
    (here / "slow_target.py").write_text(
        "import time\n\ndef f(x):\n    time.sleep(0.02)\n    return -x.square().sum(-1)\n\n\nf.dimension = 2\n"
    )
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes it for a terminal
    arguments = ["--target", "slow_target:f", "--estimator", "iwae", "--cost", "2", "--steps", "40", *FAST, "--check-every", "40"]
    assert main(["reverse-kl", *arguments, "--out", "r"]) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert len({step for step in map(int, re.findall(r"(\d+)/40 ", plain)) if 0 < step < 40}) >= 3


@pytest.mark.slow
def test_a_fit_in_one_python_call(tmp_path: Path) -> None:
    """A Gaussian with a known constant, steps that are told one by one, and a folder as the command leaves it."""
    from dohyo.lab import fit_target

    steps: list[int] = []
    options = {"steps": 250, "hidden": 20, "latent": 2, "estimator": "multilevel-rr", "cost": 5.0, "learning_rate": 5e-3,
               "check_every": 125, "check_draws": 50, "check_terms": 50, "test_draws": 500, "test_terms": 100}  # fmt: skip
    fitted = fit_target(lambda x: -(x - 1).square().sum(-1) - 7, 2, folder=tmp_path / "r", progress=steps.append, **options)
    assert steps == list(range(1, 251))
    log_z, stderr = fitted.log_z
    assert abs(log_z - (math.log(math.pi) - 7)) < 4 * stderr + 0.02
    assert stderr < 0.2
    assert fitted.quantities["x1"]["mean"] == pytest.approx(1.0, abs=0.2)
    assert fitted.quantities["x2"]["q97.5"] == pytest.approx(1 + 1.96 / math.sqrt(2), abs=0.35)
    assert fitted.model.sample(5).shape == (5, 2)
    assert len(fitted.x) == len(fitted.log_weights) == 500
    assert repr(fitted).startswith("log Z ")
    assert json.loads((tmp_path / "r/result.json").read_text())["log_z"] == log_z


@pytest.mark.parametrize(
    "line",
    [
        "--k-draw batch --encoder dreg --paths decoder --optimiser rmsprop --decay none --clip-decoder 1.0",
        "--encoder variance --paths all --estimator symmetric-sumo",
        "--encoder iwae --estimator iwae",
        "--estimator elbo --cost 2",
        "--estimator jvi",
    ],
)
def test_options(line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = "reverse-kl --target banana --estimator multilevel-ss --cost 5 --steps 20 --out r --json"
    assert main([*usual.split(), *FAST, *line.split()]) == 0, capsys.readouterr().err
    assert math.isfinite(json.loads(capsys.readouterr().out)["reverse_kl"])
    config = yaml.safe_load((here / "r/config.yaml").read_text())
    for name, value in zip(line.split()[::2], line.split()[1::2], strict=True):
        assert str(config[name[2:].replace("-", "_")]) in (value, f"{value}.0")


def test_the_variance_encoder_keeps_its_running_baseline(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--encoder", "variance", "--baseline", "target", "--estimator", "sumo", "--cost", "8", "--steps", "40", *FAST]
    assert main(["reverse-kl", *arguments, "--out", "r", "--json"]) == 0
    assert load_checkpoint(here / "r")["numbers"]["baseline"] == pytest.approx(
        json.loads(capsys.readouterr().out)["objective"], abs=3
    )


# --- targets of a user

MINE = """
import math, torch

calls = 0

def log_density(x):
    return -x.square().sum(-1) / 2

def box(x):
    return torch.where((x.abs() < 1.5).all(-1), -x.square().sum(-1), -torch.inf)

def nan(x):
    return x.sum(-1) * math.nan

def wrong_shape(x):
    return -x.square()

def no_gradient(x):
    return -x.detach().square().sum(-1)

def raises(x):
    return x[:, 7]

def turns(x):
    global calls
    calls += 1
    return -x.square().sum(-1) * (math.nan if calls > 70 else 1.0)

def climbs(x):
    global calls
    calls += 1
    return -x.square().sum(-1) + (math.inf if calls > 70 else 0.0)

def sometimes(x):  # in draws of a check, which has no gradient, alone
    value = -x.square().sum(-1)
    return value if x.requires_grad else torch.where(x[:, 0] > 0.5, math.nan, value)
"""


@pytest.fixture
def mine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"mine_{here.name}"  # a name of its own: modules stay imported from test to test
    (here / f"{name}.py").write_text(MINE)
    return here


def own(mine: Path, function: str, *arguments: str) -> list[str]:
    target = f"mine_{mine.name}:{function}"
    options = ["--target", target, "--dimension", "3", "--estimator", "multilevel-rr", "--cost", "5", "--steps", "100", *FAST]
    return ["reverse-kl", *options, *arguments]


def test_a_density_that_is_zero_at_some_draws(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(own(mine, "box", "--out", "r")) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert "warning: the target's density is zero at" in text
    assert "the reverse KL is infinite" in text
    result = json.loads((mine / "r/result.json").read_text())
    assert result["objective"] is result["training_estimate"] is None
    assert not result["diverged"]
    assert result["moments"]["x1"]["sd"] < 1.5
    assert (mine / "r/learning_curves.png").exists()


@pytest.mark.parametrize(("function", "message"), [("turns", "NaN"), ("climbs", "+inf")])
def test_a_target_that_goes_wrong_late(function: str, message: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run stops, says why, and leaves the checkpoint of the check before."""
    assert main(own(mine, function, "--out", "r", "--checkpoint-seconds", "0")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    records, step = read_records(mine / "r"), load_checkpoint(mine / "r")["numbers"]["step"]
    assert 0 < step == records[-1]["step"] < 100
    assert all(value.isfinite().all() for value in load_checkpoint(mine / "r")["model"].values())
    assert not (mine / "r/result.json").exists()
    module = sys.modules[f"mine_{mine.name}"]
    module.calls = -1000  # type: ignore[attr-defined]  # mended
    assert main(["reverse-kl", "--resume", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 100


def test_a_target_that_is_nan_in_a_check(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / f"mine_{mine.name}.py").write_text(MINE.replace("x.requires_grad", "x.requires_grad or len(x) == 64"))
    assert main(own(mine, "sometimes", "--out", "r")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "sometimes is NaN at" in error
    assert "of 100 draws of the model, such as x = (" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "MINE:nan"], "is NaN at 64 of 64 points"),
        (["--target", "MINE:wrong_shape"], "it must be a tensor (64,)"),
        (["--target", "MINE:no_gradient"], "has no gradient"),
        (["--target", "MINE:raises"], "raised IndexError"),
        (["--target", "MINE:log_densty"], "log_densty"),
        (["--target", "MINE:log_density", "--dimension", "null"], "give --dimension N"),
        (["--target", "MINE:log_density", "--dimension", "0"], "whole number of at least 1"),
        (["--target", "nomodule:log_density"], "nomodule"),
        (["--target", "funel"], "did you mean 'funnel'"),
        (["--target", "funnel", "--dimension", "4"], "leave out --dimension"),
        (["--estimator", "sumoo"], "did you mean 'sumo'"),
        (["--encoder", "sleap"], "did you mean 'sleep'"),
        (["--encoder", "same"], "trains the encoder on noise"),
        (["--estimator", "iwae", "--paths", "x"], "use 'all'"),
        (["--estimator", "iwae", "--encoder", "dreg"], "use encoder 'iwae'"),
        (["--estimator", "sumo", "--cost", "1"], "cost is 1"),
        (["--on-divergence", "stay"], "on_divergence"),
        (["--optimiser", "adm"], "did you mean 'adam'"),
        (["--decay", "liner"], "did you mean 'linear'"),
        (["--steps", "0"], "steps is 0"),
        (["--steps", "ten"], "steps"),
        (["--check-draws", "1"], "check_draws is 1"),
        (["--learning-rate", "-1"], "learning_rate is -1"),
        (["--learning-rate", "nan"], "learning-rate is 'nan'; give a number"),
        (["--hidden", "0"], "hidden is 0"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--colour", "red"], "colour"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], message: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [argument.replace("MINE", f"mine_{mine.name}") for argument in arguments]
    dimension = (
        [] if "--dimension" in arguments or "--target" not in arguments or ":" not in arguments[1] else ["--dimension", "3"]
    )
    assert main(["reverse-kl", *arguments, *dimension, "--out", "x"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("dohyo: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (mine / "x").exists()
