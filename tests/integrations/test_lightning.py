"""The callback in real Trainers: one process and two, both names of the library, exact answers."""

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dohyo

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


SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {path!r}
import lightning.pytorch as package
from test_lightning import ESTIMATOR, LogMarginalCallback, data, loader, module, trainer

class Written(LogMarginalCallback):
    def on_validation_end(self, trainer, pl_module):
        found, logged = self.evaluation, float(trainer.callback_metrics["val_nll"])
        record = [logged, found.mean, found.noise_stderr, len(found.per_datum), len(found.khat)]
        open({out!r} + "/" + str(trainer.global_rank), "w").write(json.dumps(record))

run = trainer(package, Written(ESTIMATOR, replicates=2), devices=2, strategy="ddp_fork")
run.validate(module(package), loader(data(31), 10), verbose=False)
"""


def test_two_processes_log_one_number_and_count_each_datum_once(tmp_path: Path) -> None:
    here = Path(__file__).parent
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=[str(here), str(here.parent)], out=str(tmp_path)), encoding="utf-8")
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=200, cwd=tmp_path)
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first == second
    logged, mean, noise, count, examined = first
    assert (count, examined) == (31, 31)  # 16 and 15; the 32nd, which the sampler repeats, is not counted twice
    assert logged == pytest.approx(-mean, rel=1e-6)
    assert abs(mean - float(PROBLEM.exact(data(31)).mean())) < 4 * noise


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
