"""The loop in this process: records, schedule, checkpoints."""

import dataclasses
import json
import math
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dohyo
from dohyo import IWAE, SUMO, MultilevelRR
from dohyo.lab import LoopConfig, fit
from dohyo.lab.data import Dataset, load
from dohyo.lab.training.config import Progress
from dohyo.lab.training.loop import Diverged, RunLog, read_records, train
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import CHECKPOINT, _optimiser, load_checkpoint
from dohyo.lab.training.tasks import Batches, OnData, validation_nll
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood


def small(seed: int = 0) -> VAE:
    torch.manual_seed(seed)
    return VAE(data=64, hidden=16, latent=4)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def without_seconds(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def test_records_and_learning(digits: Dataset) -> None:
    model = small()
    config = LoopConfig(epochs=6, learning_rate=1e-2, clip_decoder=20.0, clip_encoder=125.0, device="cpu")
    records = list(fit(model, digits, MaximumLikelihood(SUMO.at_cost(8)), config))
    assert [record["epoch"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["valid_nll"] < records[0]["valid_nll"] - 1
    assert all(0 <= record["clipped_decoder"] <= 1 for record in records)
    best = min(record["valid_nll"] for record in records)
    again = dohyo.evaluate(model, digits.valid, IWAE(config.valid_terms), batch_size=1000, khat_samples=0, seed=0)
    assert -again.mean == pytest.approx(best)  # the model is left with its best parameters


@pytest.mark.parametrize("encoder", ["variance", "dreg"])
def test_a_run_in_two_parts_equals_one(digits: Dataset, tmp_path: Path, encoder: str) -> None:
    objective = MaximumLikelihood(SUMO.at_cost(6), encoder, baseline="running" if encoder == "variance" else "zero")
    finals = []
    for name, parts in (("whole", [4]), ("parts", [1, 3, 4])):
        for epochs in parts:
            model = small()
            config = LoopConfig(epochs=epochs, lr_patience=1, clip_decoder=1.0, checkpoint_seconds=0.0, device="cpu")
            for _ in fit(model, digits, objective, config, tmp_path / name):
                pass
        finals.append((load_checkpoint(tmp_path / name), without_seconds(read_records(tmp_path / name))))
    (whole, records), (parts, records_of_parts) = finals
    assert records == records_of_parts
    assert all(torch.equal(whole["model"][key], parts["model"][key]) for key in whole["model"])
    for one, other in zip(whole["optimiser"]["state"].values(), parts["optimiser"]["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(torch.equal(whole["best"][key], parts["best"][key]) for key in whole["best"])
    assert torch.equal(whole["noise"][0]["cpu"], parts["noise"][0]["cpu"])
    assert torch.equal(whole["noise"][0]["depth"], parts["noise"][0]["depth"])


@pytest.mark.parametrize("objective", [MaximumLikelihood(IWAE(3)), MaximumLikelihood(SUMO.at_cost(6), "variance")], ids=repr)
def test_gradients_are_clipped_apart(digits: Dataset, objective: MaximumLikelihood) -> None:
    model = small()
    config = LoopConfig(epochs=1, clip_decoder=0.01, clip_encoder=0.02, device="cpu")
    (record,) = list(fit(model, digits, objective, config))
    assert record["clipped_decoder"] == record["clipped_encoder"] == 1
    norms = [
        math.hypot(*(float(p.grad.norm()) for p in parameters if p.grad is not None))
        for parameters in (model.decoder_parameters(), model.encoder_parameters())
    ]
    assert norms == pytest.approx([0.01, 0.02], rel=1e-3)
    (free,) = list(fit(small(), digits, objective, LoopConfig(epochs=1, device="cpu")))
    assert free["clipped_decoder"] == 0


def test_metrics_are_cut_back_to_the_checkpoint(digits: Dataset, tmp_path: Path) -> None:
    objective = MaximumLikelihood(IWAE(2))
    list(fit(small(), digits, objective, LoopConfig(epochs=2, device="cpu"), tmp_path))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "valid_nll": 0.0}\n{"epoch": 4, "val')  # a run killed before its next checkpoint
    list(fit(small(), digits, objective, LoopConfig(epochs=3, device="cpu"), tmp_path))
    records = read_records(tmp_path)
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert records[2]["valid_nll"] > 1


@pytest.mark.parametrize("level", [-10.0, 10.0])
def test_schedule_and_early_stop(digits: Dataset, level: float) -> None:
    """A model whose NLL never changes, whatever its sign: no epoch is better than the first."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(()))

        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            return level + 0 * self.unused * torch.ones(len(rows))

    config = LoopConfig(epochs=50, lr_patience=3, lr_factor=0.5, stop_patience=8, device="cpu")
    records = list(fit(Constant(), digits, MaximumLikelihood(IWAE(2)), config))
    assert [record["learning_rate"] / 1e-3 for record in records] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_frozen_parameters_stay(digits: Dataset) -> None:
    model = small()
    model.decoder[0].weight.requires_grad_(False)
    before = model.decoder[0].weight.clone()
    (record,) = list(fit(model, digits, MaximumLikelihood(SUMO(3)), LoopConfig(epochs=1, device="cpu")))
    assert torch.equal(model.decoder[0].weight, before)
    assert math.isfinite(record["valid_nll"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_adam_of_any_parameters(dtype: torch.dtype) -> None:
    """Fused, in one call for all parameters, where torch can."""
    model = nn.ParameterList([torch.ones(2, dtype=dtype)])
    model[0].sum().abs().backward()
    optimiser = _optimiser(model, LoopConfig(learning_rate=0.5), torch.device("cpu"))
    optimiser.step()
    assert bool(((model[0] - 0.5).abs() < 1e-3).all())
    assert optimiser.defaults["fused"] is (True if dtype == torch.float32 else None)


def test_adam_of_parameters_in_another_order() -> None:
    """Gradients that were summed over processes are rows of numbers, whatever the order of the parameter's own."""
    grid = torch.arange(6.0).view(3, 2)
    model = nn.ParameterList([grid.clone().T, grid.T.contiguous()])
    for parameter in model:
        parameter.grad = torch.tensor([[1.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
    _optimiser(model, LoopConfig(learning_rate=0.5), torch.device("cpu")).step()
    assert torch.equal(model[0], model[1])


def test_a_run_goes_on_with_the_adam_it_began_with(digits: Dataset, tmp_path: Path) -> None:
    """A checkpoint from before Adam was fused has no word of it, and the numbers must not change."""
    config = LoopConfig(epochs=1, device="cpu", checkpoint_seconds=0.0)
    list(fit(small(), digits, MaximumLikelihood(IWAE(2)), config, tmp_path))
    checkpoint = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert checkpoint["optimiser"].pop("fused") is True
    torch.save(checkpoint, tmp_path / CHECKPOINT)
    for epochs in (2, 3):  # also from the checkpoint that it then writes
        list(fit(small(), digits, MaximumLikelihood(IWAE(2)), dataclasses.replace(config, epochs=epochs), tmp_path))
        assert load_checkpoint(tmp_path)["optimiser"]["fused"] is False


def test_a_changed_config_is_refused(digits: Dataset, tmp_path: Path) -> None:
    list(fit(small(), digits, MaximumLikelihood(IWAE(2)), LoopConfig(epochs=1, device="cpu"), tmp_path))
    with pytest.raises(ValueError, match=r"learning_rate is 0.1 now, but was 0.001"):
        list(fit(small(), digits, MaximumLikelihood(IWAE(2)), LoopConfig(epochs=2, learning_rate=0.1, device="cpu"), tmp_path))


def test_damaged_metrics_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2"):
        read_records(tmp_path)


def test_divergence_stops_with_the_last_good_checkpoint(digits: Dataset, tmp_path: Path) -> None:
    class Breaking(VAE):
        steps = 0

        def bind(self, x: Tensor, detach_posterior: bool = False) -> object:
            source = super().bind(x, detach_posterior)
            if self.training:
                self.steps += 1
            return lambda rows: source(rows) * (math.nan if self.steps > 30 else 1.0)

    torch.manual_seed(0)
    model = Breaking(data=64, hidden=8, latent=2)
    config = LoopConfig(epochs=5, checkpoint_seconds=0.0, device="cpu")
    with pytest.raises(ValueError, match="diverged in epoch 3"):
        list(fit(model, digits, MaximumLikelihood(IWAE(2)), config, tmp_path))
    assert load_checkpoint(tmp_path)["numbers"]["epoch"] == 2
    assert all(bool(value.isfinite().all()) for value in load_checkpoint(tmp_path)["model"].values())


def test_a_run_that_is_lost_in_the_last_step_of_an_epoch(digits: Dataset, tmp_path: Path) -> None:
    """The losses of the epoch are numbers, the parameters after it are not: said so before the model is looked at."""

    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            return gradients[0] * math.inf

    class Lost(VAE):
        steps = 0

        def bind(self, x: Tensor, detach_posterior: bool = False) -> object:
            source = super().bind(x, detach_posterior)
            self.steps += self.training
            last = self.steps == 2 * math.ceil(len(digits.train) / 100)
            return lambda rows: source(rows) + (Infinite.apply(self.decoder[4].bias[0]) if last else 0.0)

    torch.manual_seed(0)
    config = LoopConfig(epochs=5, checkpoint_seconds=0.0, device="cpu")
    with pytest.raises(Diverged, match=r"diverged in epoch 2 .*a parameter is not finite"):
        list(fit(Lost(data=64, hidden=8, latent=2), digits, MaximumLikelihood(IWAE(2)), config, tmp_path))
    assert load_checkpoint(tmp_path)["numbers"]["epoch"] == 1


def test_a_module_without_an_encoder(digits: Dataset) -> None:
    class Mixture(nn.Module):
        """z is a component; the proposal is uniform and has no parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(0.1 * torch.randn(5, 64))

        def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
            z = torch.randint(5, (len(rows),))
            return torch.distributions.Bernoulli(logits=self.logits[z], validate_args=False).log_prob(x[rows]).sum(-1)

    torch.manual_seed(0)
    records = list(
        fit(Mixture(), digits.flat(), MaximumLikelihood(IWAE(5)), LoopConfig(epochs=5, learning_rate=0.05, device="cpu"))
    )
    assert records[-1]["valid_nll"] < records[0]["valid_nll"] - 1
    with pytest.raises(ValueError, match=r"Mixture has no bind\(x, detach_posterior"):
        next(fit(Mixture(), digits.flat(), MaximumLikelihood(MultilevelRR(2)), LoopConfig(device="cpu")))


def test_a_strangers_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return (Path.write_text, (Path(tmp_path / "boom"), "boom"))

    with (tmp_path / CHECKPOINT).open("wb") as file:
        pickle.dump({"numbers": Bomb()}, file)
    with pytest.raises(ValueError, match="not a checkpoint"):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "boom").exists()
    (tmp_path / CHECKPOINT).write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(tmp_path)


def test_tensorboard_and_jsonl_agree(digits: Dataset, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    list(fit(small(), digits, MaximumLikelihood(IWAE(2)), LoopConfig(epochs=3, device="cpu"), tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = [event.value for event in events.Scalars("valid_nll")]
    assert seen == pytest.approx([record["valid_nll"] for record in read_records(tmp_path)], rel=1e-5)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["epoch"] == 1


def test_bad_configs() -> None:
    for options in ({"epochs": 0}, {"learning_rate": -1.0}, {"clip_decoder": 0.0}, {"lr_factor": 1.5}):
        with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
            LoopConfig(**options)


def test_a_checkpoint_of_another_version_is_named(digits: Dataset, tmp_path: Path) -> None:
    list(fit(small(), digits, MaximumLikelihood(IWAE(2)), LoopConfig(epochs=1, device="cpu"), tmp_path))
    checkpoint = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    checkpoint["numbers"]["best_nll"] = checkpoint["numbers"].pop("best_score")
    torch.save(checkpoint, tmp_path / CHECKPOINT)
    with pytest.raises(ValueError, match="another version of dohyo"):
        load_checkpoint(tmp_path)


def test_data_that_are_not_one_for_each_index(digits: Dataset) -> None:
    class Twice(Dataset):
        def train_batch(self, index: Tensor) -> Tensor:
            return super().train_batch(index.repeat(2))

    doubled = Twice(**{field.name: getattr(digits, field.name) for field in dataclasses.fields(digits)})
    with pytest.raises(ValueError, match="OnData gave 200 data for 100 indices; it must give one for each"):
        list(fit(small(), doubled, MaximumLikelihood(IWAE(2)), LoopConfig(epochs=1, batch_size=100, device="cpu")))


def test_batches() -> None:
    batches = Batches(torch.arange(14).view(2, 7), 3)
    assert [batch.tolist() for batch in batches] == [[[0, 1, 2], [7, 8, 9]], [[3, 4, 5], [10, 11, 12]], [[6], [13]]]
    assert len(batches) == 3


def test_the_task_tells_how_far_an_epoch_is(digits: Dataset) -> None:
    told: list[float] = []
    task = OnData(digits)
    task.on_step = told.append
    config = LoopConfig(epochs=2, batch_size=500, device="cpu")
    list(train(small(), task, MaximumLikelihood(IWAE(2)), config))
    assert told == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])


def test_the_order_is_drawn_on_one_thread_and_the_others_come_back(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, randperm = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *a, **k: seen.append(torch.get_num_threads()) or randperm(*a, **k))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        OnData(digits).batches(LoopConfig(), Progress(), torch.Generator())
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_validation_is_an_evaluation_that_leaves_the_data_where_they_are(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model, valid = LoopConfig(valid_terms=3, max_rows=500, seed=4), small(), digits.valid.repeat(6, 1, 1, 1)
    whole = dohyo.evaluate(model, valid, IWAE(3), batch_size=1000, max_rows=500, seed=4)
    monkeypatch.setattr("dohyo.evaluation.checksum", None)  # it takes the data to the host, replica by replica, epoch by epoch
    assert validation_nll(model, valid, config, launch("cpu"))() == -whole.mean * len(valid) / len(valid)
    assert len(valid) > 1000  # in more than one batch


def test_a_ctrl_c_in_tensorboards_queue_does_not_delay_the_end(tmp_path: Path) -> None:
    """`Condition.notify` interrupted before it forgets whom it woke wakes the same one again, not the thread that waits."""
    log = RunLog(tmp_path, 0)
    log.append({"epoch": 1, "valid_nll": 1.0})
    waiters = log.writer.file_writer.event_writer._async_writer._byte_queue.not_empty._waiters
    while not waiters:  # until the thread that writes waits for more
        time.sleep(0.01)
    woken = threading.Lock()
    woken.acquire()
    waiters.appendleft(woken)
    begun = time.monotonic()
    log.close()
    assert time.monotonic() - begun < 10
