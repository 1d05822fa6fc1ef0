"""Reverse KL: its gradients, its encoders, and `dohyo reverse-kl` as a user runs it."""

import copy
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

import dohyo
from dohyo import ELBO, IWAE, JVI, SUMO, Estimator, Finite, MultilevelRR, MultilevelSS, SymmetricSUMO
from dohyo.cli import main
from dohyo.divergence import divergence, draw
from dohyo.experiments.reverse_kl import ReverseKLConfig, ReverseKLRun, TowardsTarget
from dohyo.models import GaussianLVM
from dohyo.models.latent import LatentVariableModel
from dohyo.objectives.reverse_kl import ReverseKL, check_drawn, reverse_kl
from dohyo.packing import rows
from dohyo.targets import Custom, Funnel
from dohyo.training import train
from dohyo.training.log import read_records
from dohyo.training.state import load_checkpoint

from stats import errors_off

# --- gradients on a model whose reverse KL is known


class Linear(LatentVariableModel):
    """z ~ N(theta, I), x | z ~ N(z, e^{2c} I), so that x ~ N(theta, 1 + e^{2c}); the encoder is a little off its optimum."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.5, -0.3], dtype=torch.float64))
        self.log_scale = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.encoder = nn.Linear(2, 2, dtype=torch.float64)
        with torch.no_grad():
            self.encoder.weight.copy_(torch.tensor([[0.5, 0.05], [-0.05, 0.45]]))
            self.encoder.bias.copy_(torch.tensor([0.6, -0.4]))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def posterior(self, code: Tensor) -> Distribution:
        return _normal(code, math.sqrt(2 / 3))

    def prior(self) -> Distribution:
        return _normal(self.theta, 1.0)

    def likelihood(self, z: Tensor) -> Distribution:
        return _normal(z, self.log_scale.exp())

    def exact(self) -> Tensor:
        """KL(N(theta, v I), N(1, 3 I))."""
        v = 1 + (2 * self.log_scale).exp()
        return (v / 3 + (self.theta - 1).square() / 3 - 1 - (v / 3).log()).sum() / 2


def _normal(mean: Tensor, scale: Tensor | float) -> Distribution:
    return Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)


def log_target(x: Tensor) -> Tensor:
    return (-(x - 1).square() / 6 - math.log(6 * math.pi) / 2).sum(-1)


def flat(loss: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)])


def gradient_errors(objective: ReverseKL, steps: int = 250) -> tuple[float, float]:
    """The largest distance of theta's mean gradient from the analytic one, and of the mean estimate, in standard errors."""
    model = Linear()
    theta = [model.theta, model.log_scale]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    gradients, estimates = [], []
    for _ in range(steps):
        losses = objective(model, torch.arange(400), generator)
        gradients.append(flat(losses.theta, theta))
        estimates.append(losses.numbers["estimate"].mean())
    exact = flat(model.exact(), theta)
    return errors_off(torch.stack(gradients), exact), errors_off(torch.stack(estimates), float(model.exact().detach()))


@pytest.mark.parametrize("paths", ["all", "x", "decoder"])
@pytest.mark.parametrize("estimator", [MultilevelRR(2), MultilevelSS(2)], ids=repr)
def test_unbiased_gradients(estimator: Estimator, paths: str) -> None:
    gradient, estimate = gradient_errors(reverse_kl(estimator, log_target, "iwae", paths=paths))
    assert gradient < 4.5
    assert estimate < 4.5


def test_biased_gradients_fail_the_same_test() -> None:
    gradient, estimate = gradient_errors(reverse_kl(IWAE(2), log_target, "iwae"))
    assert gradient > 9
    assert estimate > 9


@pytest.mark.parametrize("paths", ["x", "decoder"])
def test_paths_may_not_be_left_out_of_a_bound(paths: str) -> None:
    """It is refused; made by force, it is biased otherwise than the bound itself."""
    with pytest.raises(ValueError, match="use 'all'"):
        reverse_kl(IWAE(2), log_target, "iwae", paths=paths)
    forced = ReverseKL(IWAE(2), log_target, "iwae", False, paths, False)
    assert gradient_errors(forced)[0] > 9


def test_the_gradient_of_a_bound_is_that_of_the_bound() -> None:
    """A SUMO of at most three terms is unbiased for IWAE_3: the two agree, path by path is not needed."""
    capped, bound = SUMO(1, Finite((0.5, 0.5), start=1)), IWAE(3)
    assert capped.target_terms == bound.target_terms == 3
    model = Linear()
    theta = [model.theta, model.log_scale]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    samples = {}
    for estimator in (capped, bound):
        objective = reverse_kl(estimator, log_target, "iwae")
        samples[estimator] = torch.stack([flat(objective(model, torch.arange(200), generator).theta, theta) for _ in range(400)])
    spread = torch.stack([values.var(0) / 400 for values in samples.values()]).sum(0).sqrt()
    assert float(((samples[capped].mean(0) - samples[bound].mean(0)) / spread).abs().max()) < 4.5


# --- losses against autograd on the definitions

ESTIMATORS = [ELBO(3), IWAE(4), JVI(4), SUMO(3), SymmetricSUMO(2), MultilevelRR(2)]
N = 6


def small() -> GaussianLVM:
    torch.manual_seed(0)
    return GaussianLVM(data=2, hidden=8, latent=3).double()


def losses_of(objective: ReverseKL, model: Any, baseline: float = 0.0) -> Any:
    torch.manual_seed(1)
    return objective(model, torch.arange(N), torch.Generator().manual_seed(2), baseline)


def direct(model: Any, estimator: Estimator, shared: bool = False, paths: str = "all") -> tuple[Tensor, Tensor, Tensor]:
    """z, x and log p(x) with the noise of `losses_of`; what `paths` leaves out is held constant."""
    torch.manual_seed(1)
    z, x = model.draw(N)
    frozen = model if paths == "all" else copy.deepcopy(model).requires_grad_(False)
    source = frozen.bind(x, detach_x=paths == "decoder")
    log_px = dohyo.estimate(source, N, estimator, torch.Generator().manual_seed(2), shared=shared)
    return z, x, log_px


@pytest.mark.parametrize("k_draw", ["batch", "datum"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_theta_follows_the_estimate_less_the_target(estimator: Estimator, k_draw: str) -> None:
    model, target = small(), Funnel()
    theta = list(model.decoder_parameters())
    for paths in ("all", "x", "decoder"):
        if paths != "all" and estimator.target_terms != math.inf:
            continue
        losses = losses_of(reverse_kl(estimator, target, "iwae", k_draw=k_draw, paths=paths), model)
        _, x, log_px = direct(model, estimator, k_draw == "batch", paths)
        torch.testing.assert_close(losses.numbers["estimate"], (log_px - target(x)).detach())
        estimate = (log_px - target(x)).detach()
        whole = estimate.mean().expand_as(estimate) if k_draw == "batch" else estimate  # with one K a step is one draw
        torch.testing.assert_close(losses.numbers["estimate_square"], whole.square())
        torch.testing.assert_close(flat(losses.theta, theta), flat((log_px - target(x)).mean(), theta))


@pytest.mark.parametrize("baseline", ["zero", "target"])
def test_the_variance_encoder(baseline: str) -> None:
    model, target, estimator = small(), Funnel(), SUMO(3)
    objective = reverse_kl(estimator, target, "variance", baseline=baseline)
    assert objective.running_baseline == (baseline == "target")
    losses = losses_of(objective, model, baseline=0.7)
    torch.manual_seed(1)
    _, x = model.draw(N)
    log_px = dohyo.estimate(model.bind(x.detach()), N, estimator, torch.Generator().manual_seed(2))
    about = target(x.detach()) + 0.7 if baseline == "target" else 0.0
    phi = list(model.encoder_parameters())
    torch.testing.assert_close(flat(losses.phi, phi), flat((log_px - about).square().mean(), phi))


def test_the_iwae_encoder_climbs_on_the_same_weights() -> None:
    model, target = small(), Funnel()
    estimator = SUMO(3, Finite((1.0,), start=4))  # seven weights, always
    losses = losses_of(reverse_kl(estimator, target, "iwae"), model)
    torch.manual_seed(1)
    _, x = model.draw(N)
    bound = dohyo.estimate(model.bind(x.detach()), N, IWAE(7))
    phi = list(model.encoder_parameters())
    torch.testing.assert_close(flat(losses.phi, phi), flat(-bound.mean(), phi))
    torch.testing.assert_close(losses.level, (bound - target(x)).detach())


def test_the_same_encoder_goes_down_with_theta() -> None:
    model, target = small(), Funnel()
    losses = losses_of(reverse_kl(IWAE(4), target), model)
    assert losses.phi is losses.theta
    _, x, log_px = direct(model, IWAE(4))
    everything = [*model.decoder_parameters(), *model.encoder_parameters()]
    # phi sees x as a constant: through x only theta is reached, and so one backward pass serves both
    torch.testing.assert_close(flat(losses.theta, everything), flat((log_px - target(x)).mean(), everything))


def test_the_sleep_encoder_learns_where_x_came_from() -> None:
    model, target = small(), Funnel()
    losses = losses_of(reverse_kl(MultilevelRR(2), target), model)
    torch.manual_seed(1)
    z, x = model.draw(N)
    expected = -model.posterior(model.encode(x.detach())).log_prob(z).mean()
    phi, theta = list(model.encoder_parameters()), list(model.decoder_parameters())
    torch.testing.assert_close(flat(losses.phi, phi), flat(expected, phi))
    assert float(flat(losses.phi, theta).abs().max()) == 0


def test_the_dreg_encoder() -> None:
    model = small()
    estimator = SUMO(2, Finite((1.0,), start=2))  # four weights, unbiased for IWAE_4 alone: made by force
    losses = losses_of(ReverseKL(estimator, Funnel(), "dreg", False, "decoder", False), model)
    torch.manual_seed(1)
    _, x = model.draw(N)
    log_w = model.bind(x.detach(), detach_posterior=True)(rows(torch.full((N,), 4))).view(N, 4)
    expected = -(log_w.detach().softmax(-1).square() * log_w).sum(-1).mean()
    phi = list(model.encoder_parameters())
    torch.testing.assert_close(flat(losses.phi, phi), flat(expected, phi))


def test_a_density_of_zero_has_an_infinite_estimate_and_finite_gradients() -> None:
    model = small()

    def half(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 0, -x.square().sum(-1), -torch.inf)

    losses = losses_of(reverse_kl(MultilevelRR(2), half), model)
    assert losses.numbers["estimate"].isinf().any()
    assert flat(losses.theta, list(model.decoder_parameters())).isfinite().all()


def test_defaults_and_errors() -> None:
    assert (reverse_kl(IWAE(5), log_target).encoder, reverse_kl(IWAE(5), log_target).paths) == ("same", "all")
    assert (reverse_kl(SUMO(), log_target).encoder, reverse_kl(SUMO(), log_target).paths) == ("sleep", "x")
    assert reverse_kl(SUMO(), log_target, "dreg").paths == "decoder"
    assert not reverse_kl(SUMO(), log_target).shared
    for estimator, options, message in (
        (SUMO(), {"encoder": "same"}, "trains the encoder on noise"),
        (SUMO(), {"encoder": "sleap"}, "did you mean 'sleep'"),
        (SUMO(), {"paths": "decode"}, "did you mean 'decoder'"),
        (SUMO(), {"k_draw": "data"}, "did you mean 'datum'"),
        (SUMO(), {"baseline": "targets", "encoder": "variance"}, "did you mean 'target'"),
        (SUMO(), {"baseline": "target"}, "is for encoder 'variance'"),
        (SUMO(), {"encoder": "dreg", "paths": "x"}, "use paths 'decoder'"),
        (IWAE(5), {"encoder": "dreg"}, "encoder 'iwae'"),
        (IWAE(5), {"paths": "x"}, "use 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            reverse_kl(estimator, log_target, **options)
    with pytest.raises(ValueError, match="Linear has no draw"):
        check_drawn(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="must have rsample"):
        check_drawn(dohyo.models.VAE(data=4))


# --- runs


def shifted(x: Tensor) -> Tensor:
    """N((1, -2), diag(1/4, 4)) without its constant."""
    return -((x - x.new_tensor([1.0, -2.0])) / x.new_tensor([0.5, 2.0])).square().sum(-1) / 2


shifted.dimension, shifted.log_normaliser = 2, math.log(2 * math.pi)  # type: ignore[attr-defined]


def test_a_gaussian_inside_the_family_is_found() -> None:
    """The reverse KL goes to zero, all the ways to it agree, and so does the training estimate within its error bar."""
    target = Custom(shifted)
    torch.manual_seed(0)
    model = GaussianLVM(2, hidden=16, latent=2)
    config = ReverseKLConfig(
        steps=650, check_every=200, learning_rate=5e-3, estimator="multilevel-rr", cost=8, device="cpu", check_terms=100
    )
    task = TowardsTarget(target, config.objective(target))
    records = list(train(model, task, config.objective(target), config))
    assert [record["step"] for record in records] == [200, 400, 600, 650]
    last = records[-1]
    assert records[0]["estimate"] > 0.05
    assert abs(last["reverse_kl"]) < 0.005
    for way in ("by_encoder", "by_prior", "above"):
        assert last[way] + shifted.log_normaliser == pytest.approx(0, abs=0.005)  # type: ignore[attr-defined]
    assert abs(last["estimate"]) < 4 * last["estimate_stderr"] < 0.01
    assert 1.5 < last["estimate_stderr"] / records[-2]["estimate_stderr"] < 3  # of 50 steps, not of 200
    assert not any(record["diverged"] for record in records)
    found = divergence(draw(model, target, 2000, 200, seed=9), target.log_normaliser)
    assert -4 * found.stderr < (found.reverse_kl or 0.0) < 0.005


FAST = ["--hidden", "20", "--latent", "2", "--check-draws", "100", "--check-terms", "50", "--test-draws", "100",
        "--test-terms", "50", "--check-every", "20", "--device", "cpu"]  # fmt: skip
PLAIN_IWAE = ["reverse-kl", "--target", "funnel", "--estimator", "iwae", "--cost", "5", "--learning-rate", "0.005",
              "--steps", "400", *FAST]  # fmt: skip


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
    assert stopped["steps"] < 400
    assert [record["diverged"] for record in read_records(here / "stop")][-2:] == [True, True]
    assert main(["reverse-kl", "--resume", "stop", "--steps", "500"]) == 0  # the end is final
    assert "it ended by itself" in capsys.readouterr().out

    assert main([*PLAIN_IWAE, "--on-divergence", "continue", "--out", "go", "--json"]) == 0
    gone = json.loads(capsys.readouterr().out)
    assert gone["diverged"]
    assert gone["steps"] == 400
    assert gone["training_estimate"] < -10  # impossible for a KL
    assert gone["reverse_kl"] > 1 > 0 > gone["by_encoder"] + 10
    first, last = read_records(here / "go")[0], read_records(here / "go")[-1]
    assert last["reverse_kl"] > first["reverse_kl"]
    assert "theta loosens the bound instead of lowering the objective" in gone["warnings"][-1]


def test_an_unbiased_estimator_in_its_place_does_not_diverge(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAIN_IWAE, "--estimator", "multilevel-rr", "--steps", "200", "--out", "good", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert not result["diverged"]
    assert result["steps"] == 200
    assert 0 < result["reverse_kl"] < 2


def test_the_ring_is_reported_with_its_normaliser(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate and the KL hold log Z; the objective and the ways do not."""
    arguments = [
        "--target",
        "ring",
        "--estimator",
        "multilevel-rr",
        "--cost",
        "5",
        "--steps",
        "40",
        *FAST,
        "--out",
        "r",
        "--json",
    ]
    assert main(["reverse-kl", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reverse_kl"] == pytest.approx(result["objective"] + result["log_normaliser"])
    assert result["training_estimate"] > 0
    assert set(result["moments"]) == {"x1", "x2"}
    assert set(result["moments"]["x1"]) == {"mean", "sd", "stderr", "raw_mean", "raw_sd", "exact_mean", "exact_sd"}


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
    arguments = [
        "--target",
        "banana",
        "--estimator",
        "multilevel-ss",
        "--cost",
        "5",
        "--steps",
        "20",
        *FAST,
        "--out",
        "r",
        "--json",
    ]
    assert main(["reverse-kl", *arguments, "--json", *line.split()]) == 0, capsys.readouterr().err
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
        (["--target", "MINE:wrong_shape"], "it must be (64,)"),
        (["--target", "MINE:no_gradient"], "has no gradient"),
        (["--target", "MINE:raises"], "raised IndexError"),
        (["--target", "MINE:log_densty"], "log_densty"),
        (["--target", "MINE:log_density", "--dimension", "null"], "give --dimension N"),
        (["--target", "MINE:log_density", "--dimension", "0"], "whole number from 1"),
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
        (["--learning-rate", "nan"], "learning_rate"),
        (["--hidden", "0"], "hidden is 0"),
        (["--device", "tpu"], "device is 'tpu'"),
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


# --- the command in a process of its own


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dohyo", "reverse-kl", *arguments]


def run(*arguments: str, folder: Path, of: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*(of or command()), *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=240, env=environment
    )


SUMO_RUN = ["--target", "funnel", "--estimator", "sumo", "--cost", "15", "--seed", "0", "--steps", "200", *FAST,
            "--checkpoint-seconds", "0"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run `a` of 200 steps."""
    folder = tmp_path_factory.mktemp("runs")
    done = run(*SUMO_RUN, "--out", "a", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "reverse KL" in done.stdout
    assert done.stderr == ""
    return folder


def without_time(folder: Path) -> tuple[Any, Any]:
    result = json.loads((folder / "result.json").read_text())
    result.pop("seconds")
    return [{key: value for key, value in record.items() if key != "seconds"} for record in read_records(folder)], result


def same_run(a: Path, b: Path) -> bool:
    one, two = load_checkpoint(a), load_checkpoint(b)
    numbers = [{key: v for key, v in c["numbers"].items() if "seconds" not in key} for c in (one, two)]
    tensors = all(torch.equal(one[part][key], two[part][key]) for part in ("model", "best") for key in one[part])
    noise = all(torch.equal(one["noise"][0][key], two["noise"][0][key]) for key in ("cpu", "depth"))
    return tensors and noise and numbers[0] == numbers[1] and without_time(a) == without_time(b)


def test_the_commands_of_the_documentation(tmp_path: Path) -> None:
    """As they are written, but for few steps and small checks."""
    fewer = ["--check-draws", "50", "--check-terms", "50", "--test-draws", "50", "--test-terms", "50", "--json"]
    line = "--target funnel --estimator sumo --cost 15 --steps 20 --seed 0 --out runs/f"
    done = run(*line.split(), *fewer, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert result == json.loads((tmp_path / "runs/f/result.json").read_text())
    assert set(result) >= {"reverse_kl", "reverse_kl_stderr", "training_estimate", "objective", "diverged", "khat", "moments"}
    assert (result["reverse_kl"], result["steps"], result["diverged"]) == (result["objective"], 20, False)
    assert result["expected_cost"] == pytest.approx(15.078, abs=1e-3)

    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/module.py").write_text(MINE)
    line = "--target package.module:log_density --dimension 3 --estimator multilevel-rr --cost 15 --out runs/g"
    done = run(*line.split(), "--steps", "20", *fewer, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["reverse_kl"] is result["log_normaliser"] is None
    assert -6 < result["objective"] < 6
    assert set(result["moments"]) == {"x1", "x2", "x3"}
    assert (tmp_path / "runs/g/marginals.png").exists()


def test_the_run_folder_is_whole(runs: Path) -> None:
    names = {path.name for path in (runs / "a").iterdir()}
    pictures = {f"{name}.{ending}" for name in ("learning_curves", "density") for ending in ("png", "json")}
    assert names == {"config.yaml", "metrics.jsonl", "result.json", "checkpoint.pt", "draws.npz", "tensorboard"} | pictures
    config = yaml.safe_load((runs / "a/config.yaml").read_text())
    assert (config["encoder"], config["paths"], config["clip_decoder"], config["optimiser"]) == ("sleep", "x", None, "adam")
    records = read_records(runs / "a")
    assert [record["step"] for record in records] == list(range(20, 201, 20))
    curves = json.loads((runs / "a/learning_curves.json").read_text())
    assert curves["estimate"] == pytest.approx([record["estimate"] for record in records], rel=1e-5)
    assert ReverseKLRun.open(runs / "a").finished


def test_resuming_a_finished_run_does_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    before = (runs / "a/result.json").stat().st_mtime_ns
    assert main(["reverse-kl", "--resume", "a"]) == 0
    assert "already finished after 200 steps; --steps N extends it" in capsys.readouterr().out
    assert (runs / "a/result.json").stat().st_mtime_ns == before
    for arguments, message in (
        (["--resume", "a", "--cost", "5"], "--cost 5.0 differs from the run's 15.0"),
        (["--out", "a"], "already holds a run"),
        (["--resume", "nowhere"], "holds no run"),
        ([], "--out FOLDER"),
    ):
        assert main(["reverse-kl", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_killed_at_random_times_it_ends_the_same(runs: Path) -> None:
    """SIGKILL twice, then a run that gets through; the result is the uninterrupted run's, bit for bit."""
    generator = random.Random(0)
    arguments = [*SUMO_RUN, "--out", "killed"]
    kills = 0
    while True:
        process = subprocess.Popen(
            command(*arguments), cwd=runs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        known = len(read_records(runs / "killed"))
        while kills < 2 and process.poll() is None and len(read_records(runs / "killed")) <= known:
            time.sleep(0.01)
        try:
            process.wait(generator.uniform(0, 0.2) if kills < 2 else 120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        assert process.stderr is not None
        error = process.stderr.read()
        process.stderr.close()
        arguments = ["--resume", "killed"]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, error
    assert kills == 2
    assert same_run(runs / "a", runs / "killed")
    assert not list((runs / "killed").glob(".*"))


def test_extending_a_run(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without decay a longer run is the shorter one and more, so that extending it is the same as having asked for it."""
    monkeypatch.chdir(runs)
    steady = [*SUMO_RUN, "--decay", "none"]
    assert main(["reverse-kl", *steady, "--steps", "60", "--out", "long"]) == 0
    assert main(["reverse-kl", *steady, "--steps", "40", "--out", "short"]) == 0
    assert main(["reverse-kl", "--resume", "short", "--steps", "60"]) == 0, capsys.readouterr().err
    assert same_run(runs / "long", runs / "short")
    assert main(["reverse-kl", "--resume", "short", "--steps", "70"]) == 0  # an epoch of ten steps, and on from there
    assert main(["reverse-kl", "--resume", "short", "--steps", "100"]) == 0
    assert [record["step"] for record in read_records(runs / "short")] == [20, 40, 60, 70, 90, 100]


def test_ctrl_c_says_how_to_go_on(runs: Path) -> None:
    process = subprocess.Popen(
        command(*SUMO_RUN, "--steps", "1000000", "--out", "interrupted"),
        cwd=runs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while process.poll() is None and len(read_records(runs / "interrupted")) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "dohyo: interrupted; go on with: dohyo reverse-kl --resume interrupted\n"
    assert load_checkpoint(runs / "interrupted")["numbers"]["step"] >= 20


def test_two_processes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One log, one checkpoint, other draws in each process; and resumed by as many."""
    both = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dohyo", "reverse-kl"]
    options = [*SUMO_RUN, "--steps", "60", "--learning-rate", "0.005", "--check-draws", "101"]
    done = run(*options, "--out", "two", folder=here, of=both)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training estimate") == 1
    records = read_records(here / "two")
    assert [record["step"] for record in records] == [20, 40, 60]
    assert not torch.equal(*(noise["cpu"] for noise in load_checkpoint(here / "two")["noise"]))
    assert main(["reverse-kl", *options, "--out", "one"]) == 0, capsys.readouterr().err
    single = read_records(here / "one")
    for one, two in zip(single, records, strict=True):
        allowed = 6 * math.hypot(one["stderr"], two["stderr"]) + 0.2
        assert one["reverse_kl"] == pytest.approx(two["reverse_kl"], abs=allowed)
        assert one["estimate_stderr"] == pytest.approx(two["estimate_stderr"], rel=1.0)
    done = run("--resume", "two", "--steps", "80", "--json", folder=here, of=both)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 80
