"""The callback in real Trainers: one process and two, both names of the library, exact answers."""

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dohyo
from real import finished

from problems import LinearGaussian

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    from dohyo.integrations.lightning import LogMarginalCallback

# torch deprecates what Lightning uses; the rest are Lightning's hints on speed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
ESTIMATOR = dohyo.MultilevelRR.at_cost(15)
PROBLEM = LinearGaussian(dimension=4)


def data(count: int = 300) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return PROBLEM.sample(count)


class Learner(nn.Module):
    """What a LightningModule of either name is given as its `model`: a Gaussian whose mean is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(PROBLEM.theta.clone())

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        return PROBLEM.log_weights(x, rows, self.theta.expand(len(x), -1))


def module(package: Any) -> Any:
    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Learner()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            return -self.model.log_weights(x, torch.arange(len(x))).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    return Module()


def trainer(package: Any, *callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return package.Trainer(callbacks=list(callbacks), **{"accelerator": "cpu", "devices": 1, **quiet, **options})


def loader(x: Tensor, batch: int = 70) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=batch)


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_exact_answers_under_both_names(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module(name)
    x = data()
    callback = LogMarginalCallback(ESTIMATOR, replicates=4)
    (logged,) = trainer(package, callback).validate(module(package), loader(x), verbose=False)
    found = callback.evaluation
    assert found is not None
    assert found.noise_stderr is not None
    exact = float(PROBLEM.exact(x).mean())
    assert abs(found.mean - exact) < 4 * found.noise_stderr
    assert logged["val_nll"] == pytest.approx(-found.mean, rel=1e-6)
    assert logged["val_nll_stderr"] == pytest.approx(found.stderr, rel=1e-6)
    assert logged["val_khat_max"] == pytest.approx(float(found.khat.max()), rel=1e-6)
    assert (len(found.per_datum), len(found.khat), found.replicates) == (300, 64, 4)
    assert dohyo.compare(found, dohyo.evaluate(PROBLEM, x, ESTIMATOR)).stderr > 0  # of the same data
    bound = LogMarginalCallback(dohyo.ELBO(4), replicates=4)
    trainer(package, bound).validate(module(package), loader(x), verbose=False)
    assert bound.evaluation is not None
    assert bound.evaluation.mean < exact - 4 * bound.evaluation.noise_stderr  # type: ignore[operator]  # the power twin


class Mixture(nn.Module):
    means, shares = torch.tensor([-2.0, 0.0, 3.0]), torch.tensor([0.2, 0.5, 0.3])

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        q = torch.distributions.Categorical(logits=-(x[rows][:, None] - self.means).square() / 4)
        k = q.sample()
        return self.shares.log()[k] + torch.distributions.Normal(self.means[k], 1.0).log_prob(x[rows]) - q.log_prob(k)

    def exact(self, x: Tensor) -> Tensor:
        return (torch.distributions.Normal(self.means, 1.0).log_prob(x[:, None]) + self.shares.log()).logsumexp(-1)


def test_a_finite_mixture_and_the_same_numbers_as_without_lightning() -> None:
    torch.manual_seed(1)
    own, x, mixture = module(lightning.pytorch), 3 * torch.randn(200), Mixture()
    own.model = mixture
    callback = LogMarginalCallback(ESTIMATOR, replicates=8, khat_samples=0, seed=5)
    trainer(lightning.pytorch, callback).validate(own, loader(x), verbose=False)
    found = callback.evaluation
    assert found is not None
    assert found.noise_stderr is not None
    assert abs(found.mean - float(mixture.exact(x).mean())) < 4 * found.noise_stderr
    plain = [
        torch.stack(
            [dohyo.evaluate(mixture, part, ESTIMATOR, khat_samples=0, seed=5 + 8 * i + r).per_datum for r in range(8)], -1
        )
        for i, part in enumerate(x.split(70))
    ]
    assert torch.equal(torch.cat(plain).mean(-1), found.per_datum)


def test_in_training_the_number_can_be_watched_and_the_sanity_check_is_left_out(tmp_path: Path) -> None:
    calls = []

    class Watched(LogMarginalCallback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_validation_epoch_end(trainer, pl_module)
            calls.append((trainer.sanity_checking, self.evaluation is None))

    callback = Watched(dohyo.IWAE(4), khat_samples=0)
    stop = lightning.pytorch.callbacks.EarlyStopping("val_nll", patience=1)
    keep = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, monitor="val_nll", filename="best")
    own = module(lightning.pytorch)
    run = trainer(lightning.pytorch, callback, stop, keep, max_epochs=9, enable_checkpointing=True, num_sanity_val_steps=2)
    torch.manual_seed(5)
    run.fit(own, loader(data(40)), loader(data(40)))
    assert calls[0] == (True, True)
    assert calls[1:] == [(False, False)] * 2  # the rate is zero and the seed the same: no better the second time
    assert (tmp_path / "best.ckpt").exists()
    assert own.training
    assert "val_khat_max" not in run.callback_metrics


# -- training: one line ------------------------------------------------------------------------------------------------


def one_line(estimator: dohyo.Estimator = ESTIMATOR) -> Any:
    """A module whose `training_step` is the line of the guide."""

    class OneLine(lightning.pytorch.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = dohyo.models.VAE(data=6, hidden=8, latent=2)
            self.objective = dohyo.objectives.MaximumLikelihood(estimator, encoder="dreg")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            torch.manual_seed(100 + batch_idx + 10 * self.global_rank)
            return self.objective(self.model, batch[0]).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return OneLine()


def bits(count: int) -> Tensor:
    return torch.rand(count, 6, generator=torch.Generator().manual_seed(3)).round()


def by_plain_loop(steps: list[list[tuple[int, Tensor]]], estimator: dohyo.Estimator = ESTIMATOR) -> dict[str, Tensor]:
    """The parameters after SGD; each step is the mean of gradients, one for each (seed, batch)."""
    own = one_line(estimator)
    optimiser = torch.optim.SGD(own.parameters(), lr=0.1)
    for parts in steps:
        optimiser.zero_grad()
        for noise, x in parts:
            torch.manual_seed(noise)
            (own.objective(own.model, x).loss / len(parts)).backward()
        optimiser.step()
    return {name: value.detach() for name, value in own.state_dict().items()}


@pytest.mark.parametrize(("accumulate", "precision"), [(1, "32-true"), (2, "32-true"), (1, "bf16-mixed")])
def test_automatic_optimisation_follows_both_losses(accumulate: int, precision: Any) -> None:
    x = bits(40)
    # The large coefficients of opposite signs of an unbiased estimator would magnify the rounding to three digits.
    estimator = ESTIMATOR if precision == "32-true" else dohyo.IWAE(8)
    own = one_line(estimator)
    run = trainer(lightning.pytorch, max_epochs=1, accumulate_grad_batches=accumulate, precision=precision)
    run.fit(own, DataLoader(TensorDataset(x), batch_size=10))
    batches = [(100 + i, part) for i, part in enumerate(x.split(10))]
    expected = by_plain_loop([batches[i : i + accumulate] for i in range(0, 4, accumulate)], estimator)
    start = by_plain_loop([])
    for name, value in own.state_dict().items():
        moved, wanted = value - start[name], expected[name] - start[name]
        if precision == "32-true":
            assert torch.allclose(value, expected[name], atol=1e-6), name
        else:
            assert float((moved - wanted).norm() / wanted.norm()) < 0.05, name
        assert float(moved.norm()) > 1e-4, name  # encoder and decoder


# -- two processes -----------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {path!r}
import lightning.pytorch as package
import torch
from torch.utils.data import DataLoader, TensorDataset
from test_lightning import ESTIMATOR, LogMarginalCallback, bits, data, loader, module, one_line, trainer

class Written(LogMarginalCallback):
    def on_validation_end(self, trainer, pl_module):
        found, logged = self.evaluation, float(trainer.callback_metrics["val_nll"])
        record = [logged, found.mean, found.noise_stderr, len(found.per_datum), len(found.khat)]
        open({out!r} + "/" + str(trainer.global_rank), "w").write(json.dumps(record))

run = trainer(package, Written(ESTIMATOR, replicates=2), devices=2, strategy="ddp_fork")
run.validate(module(package), loader(data(31), 10), verbose=False)

class Kept(package.Callback):
    def on_train_end(self, trainer, pl_module):
        torch.save(pl_module.state_dict(), {out!r} + "/trained" + str(trainer.global_rank))

run = trainer(package, Kept(), devices=2, strategy="ddp_fork", max_epochs=1)
run.fit(one_line(), DataLoader(TensorDataset(bits(40)), batch_size=10, shuffle=False))
"""


def test_two_processes(tmp_path: Path) -> None:
    """They log one number, count each datum once, and train as one process does with the mean of their gradients."""
    here = Path(__file__).parent
    script = SCRIPT.format(path=[str(here), str(here.parent)], out=str(tmp_path))
    done = finished([sys.executable, "-c", script], tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first == second
    logged, mean, noise, count, examined = first
    assert (count, examined) == (31, 31)  # 16 and 15; the 32nd, which the sampler repeats, is not counted twice
    assert logged == pytest.approx(-mean, rel=1e-6)
    assert abs(mean - float(PROBLEM.exact(data(31)).mean())) < 4 * noise
    one, other = (torch.load(tmp_path / f"trained{rank}") for rank in "01")
    samplers = [DistributedSampler(range(40), 2, rank) for rank in (0, 1)]  # Lightning's for training
    shares = [bits(40)[list(sampler)].split(10) for sampler in samplers]
    expected = by_plain_loop([[(100 + step + 10 * rank, shares[rank][step]) for rank in (0, 1)] for step in (0, 1)])
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert torch.allclose(value, expected[name], atol=1e-6), name


def test_bad_input() -> None:
    with pytest.raises(dohyo.DohyoError, match="the estimator is a str"):
        LogMarginalCallback("iwae")  # type: ignore[arg-type]
    with pytest.raises(dohyo.DohyoError, match="replicates is 0"):
        LogMarginalCallback(ESTIMATOR, replicates=0)
    own = module(lightning.pytorch)
    with pytest.raises(dohyo.DohyoError, match="a validation batch is a str"):
        trainer(lightning.pytorch, LogMarginalCallback(ESTIMATOR)).validate(own, [["a"]], verbose=False)
    own.model = nn.Linear(1, 1)
    with pytest.raises(dohyo.DohyoError, match="neither Module nor its attribute model has log_weights"):
        trainer(lightning.pytorch, LogMarginalCallback(ESTIMATOR)).validate(own, loader(data(4)), verbose=False)
