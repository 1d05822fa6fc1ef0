"""The loop of every task: epochs of steps, a check, the schedule, checkpoints. Copy it and change it."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError
from dohyo.evaluation import isolated
from dohyo.files import plain, replacing
from dohyo.lab.folder import CHECKPOINT, METRICS, TENSORBOARD, read_records
from dohyo.lab.training.chains import by_samples, has_chains, phases, sized
from dohyo.lab.training.config import LoopConfig
from dohyo.lab.training.processes import launch, matmul_precision, only_writer, sum_over_processes
from dohyo.lab.training.state import State
from dohyo.lab.training.step import Totals, train_step
from dohyo.lab.training.tasks import Objective, Record, Task, Trainable, task_of
from dohyo.objectives import MaximumLikelihood


def fit(
    model: nn.Module,
    data: Trainable,
    objective: MaximumLikelihood,
    config: LoopConfig | None = None,
    folder: Path | None = None,
    fabric: Fabric | None = None,
) -> Iterator[Record]:
    """Train on data, and yield a record after each epoch; `model` holds the best parameters once the loop has run to its end.

    With a folder, the run continues from the checkpoint there, if any, and writes checkpoint.pt, metrics.jsonl and
    TensorBoard's files; nobody else can write there meanwhile. Under torchrun each process gets its own part of every batch.

    Args:
        data: A data set; a tensor, of which a tenth is held out for validation; or a pair (train, valid), each a tensor or
            batches such as a DataLoader (tensors, or tuples that begin with one). A loader's batches are used as they come.

    Example:
        >>> import dohyo
        >>> from dohyo.lab.data import load
        >>> objective = dohyo.objectives.MaximumLikelihood(dohyo.IWAE(5))
        >>> model = dohyo.models.VAE(data=64, hidden=32, latent=8)
        >>> records = list(fit(model, load("digits"), objective, LoopConfig(epochs=2, batch_size=500)))
        >>> records[1]["valid_nll"] < records[0]["valid_nll"]
        True
    """
    config = config or LoopConfig()
    task, few = task_of(data, config.seed)
    if config.anneal_from and not has_chains(model):
        raise DohyoError(f"anneal_from is {config.anneal_from}, but the model has no chains; give dohyo.Annealed(model, 8), say")
    check(model, objective, few, config.anneal_from)
    if isinstance(model, Annealed):
        model.constants = sized(model, few)
    yield from train(model, task, objective, config, folder, fabric)


def check(model: Any, objective: Objective, x: Tensor, anneal_from: float = 0.0) -> None:
    """Try the objective once, so that a model that lacks something raises its error before training begins; changes nothing."""
    with isolated(model, 0), torch.enable_grad():
        for (one,), followed in phases([model], objective, anneal_from):
            followed(one, x, torch.Generator().manual_seed(0), 0.0)


def train(
    model: nn.Module, task: Task[Any], objective: Objective, config: Any, folder: Path | None = None, fabric: Fabric | None = None
) -> Iterator[Record]:
    """`fit` for any task; the config is a `LoopConfig` for data and a `DrawsConfig` for samples from the model."""
    fabric = fabric or launch(config.device)
    name = "plain"
    if config.captured_on(fabric.device):
        from dohyo.lab.fast.programs import choose  # also imports the compiler
        from dohyo.lab.fast.together import Replica, train_together

        choice = choose([model], task, objective, config, fabric)
        if choice.captured:
            yield from (record for _, record in train_together([Replica(model, task, config, folder)], objective, fabric, choice))
            return
        name = choice.name
    task.begin(fabric, config)
    with contextlib.closing(Training(model, task, objective, config, folder, fabric)) as run:
        while not run.over:
            started = time.monotonic()
            task.prepare(run.state, config)
            record = train_epoch(run.state, task, run.objective, config, fabric)
            yield run.end_epoch({**record, "program": name}, started, time.monotonic())
        model.load_state_dict(run.state.best)


def train_epoch(state: State, task: Task[Any], objective: Objective, config: Any, fabric: Fabric) -> Record:
    """The steps of one epoch, and the means of what they recorded."""
    progress, rank, world = state.progress, fabric.global_rank, fabric.world_size
    totals = Totals.start(progress.baseline, fabric.device)
    steps = data = 0
    state.model.train()
    state.set_rate(fabric.broadcast(config.rate(progress)))  # it may depend on the first process's clock
    with matmul_precision(config, fabric.device):
        for index in task.batches(config, progress, state.order):
            own = index.to(fabric.device)[rank::world]
            x = task.batch(own) if len(own) else own
            if len(x) != len(own):
                raise DohyoError(f"{type(task).__name__} gave {len(x)} data for {len(own)} indices; it must give one for each")
            train_step(state, x, len(index), objective, config, fabric, totals)
            steps, data = steps + 1, data + len(index)
            progress.step += 1
    progress.baseline = float(totals.baseline) if objective.running_baseline else None
    # The gradient norms, and so the clipped steps, are the same on all processes; the sums over data are not.
    means = sum_over_processes(fabric, [torch.stack(list(totals.sums.values())) / data])[0].tolist()
    return epoch_record(dict(zip(totals.sums, means, strict=True)), state, (totals.clipped / steps).tolist())


def epoch_record(means: Record, state: State, clipped: Sequence[float]) -> Record:
    return means | {"learning_rate": state.rate, "clipped_decoder": clipped[0], "clipped_encoder": clipped[1]}


class Diverged(DohyoError):  # noqa: N818
    """NaN in the records or parameters of runs; `places` are their indices among the runs trained together."""

    def __init__(self, message: str, places: Sequence[int] = (0,)) -> None:
        super().__init__(message)
        self.places = places


def _finite(model: nn.Module) -> bool:
    """Whether all parameters are; a GPU is waited for once."""
    parameters = [parameter.detach().reshape(-1) for parameter in model.parameters()]
    return not parameters or bool(torch.cat(parameters).isfinite().all())


class RunLog:
    """One line of JSON for each epoch. Opening the log at an epoch drops what a killed run wrote after that epoch."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.path = folder / METRICS
        kept = [record for record in read_records(folder) if record["epoch"] <= epoch]
        with replacing(self.path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        self.writer: Any = None
        with contextlib.suppress(ImportError):  # not installed, or too old
            from torch.utils.tensorboard import SummaryWriter

            # A Ctrl-C inside its queue may lose the word that it is closed, and closing then waits for the next flush.
            self.writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=epoch + 1, flush_secs=2)

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record)) + "\n")
        for name, value in record.items() if self.writer is not None else ():
            if isinstance(value, float) and math.isfinite(value):
                self.writer.add_scalar(name, value, record["epoch"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Training:
    """A run in progress: its state, its log, and its folder if it has one."""

    def __init__(
        self,
        model: nn.Module,
        task: Task[Any],
        objective: Objective,
        config: Any,
        folder: Path | None,
        fabric: Fabric,
        own_noise: bool = False,
    ) -> None:
        self.task, self.config, self.folder, self.fabric, self.last_objective = task, config, folder, fabric, objective
        self.state = State.start(model, config, fabric, objective.shared, own_noise)
        self.log: RunLog | None = None
        self.saved = time.monotonic()
        self.lock = contextlib.ExitStack()
        if folder is not None:
            with contextlib.ExitStack() as lock:
                lock.enter_context(only_writer(folder, fabric=fabric))
                self.state.restore(folder, config, fabric, task)
                self.log = RunLog(folder, self.state.progress.epoch) if fabric.is_global_zero else None
                self.lock = lock.pop_all()  # until `close`
        self.over = False
        self._turn_or_end()

    @property
    def waiting(self) -> bool:
        """Whether theta will follow chains, and still follows samples."""
        return self.state.following is not self.state.model

    @property
    def objective(self) -> Any:
        """What theta and phi follow in the next epoch."""
        model: Any = self.state.model
        return by_samples(self.last_objective, model.steps) if self.waiting else self.last_objective

    def end_epoch(self, record: Record, started: float, trained: float) -> Record:
        """Check the epoch, write the log and perhaps a checkpoint, and return the record; raise `Diverged` if numbers are NaN."""
        self.check_sound(record)
        record = self.begin_check(record)()
        record = self.count_epoch(record, trained - started, time.monotonic() - started)
        if self.fabric.broadcast(self.due()):  # the first process's clock decides for all
            self.save()
        return record

    def check_sound(self, record: Record) -> None:
        """Raise `Diverged` if numbers are NaN."""
        wrong = [f"{name} is NaN" for name, value in record.items() if isinstance(value, float) and math.isnan(value)]
        if not wrong and not _finite(self.state.model):
            wrong = ["a parameter is not finite"]  # in the very last step: the losses were still finite
        if wrong:
            progress = self.state.progress
            raise Diverged(
                f"training diverged in epoch {progress.epoch + 1} (up to step {progress.step}): {wrong[0]}; a checkpoint of an "
                f"earlier epoch, if there is one, is kept{'' if self.folder is None else f' in {self.folder}'} "
                "(try a lower learning rate or clip norm)"
            )

    def begin_check(self, record: Record) -> Callable[[], Record]:
        """Begin the task's check; the function that is returned waits for it, and gives the record with its results."""
        results = self.task.begin_check(self.state.following, record, self.config, self.fabric)
        return lambda: record | results()

    def count_epoch(self, record: Record, step_seconds: float, seconds: float) -> Record:
        progress = self.state.progress
        progress.step_seconds += step_seconds
        self.state.after_epoch(record.pop("score", None), self.config)
        progress.stopped = record.pop("stop", False)
        progress.seconds += seconds
        record = {"epoch": progress.epoch, "step": progress.step, **record, "seconds": progress.seconds}
        if self.log is not None:
            self.log.append(record)
        if self.state.chains is not None:
            self.state.chains.lost = record.get("lost_chains", 0.0) > 0
        self._turn_or_end()
        return record

    def _turn_or_end(self) -> None:
        """See whether the run ends here, or whether theta follows chains from here on; the first process's clock decides."""
        progress, waiting = self.state.progress, self.waiting
        if waiting and progress.stale >= self.config.stop_patience:
            progress.stale = 0  # patience with samples alone ends no run
        self.over = self.fabric.broadcast(self.config.over(progress))
        if waiting and not self.over and self.fabric.broadcast(self.config.by_chains(progress)):
            self.state.turn()

    def due(self) -> bool:
        """Whether to write the checkpoint now."""
        first = self.folder is not None and not (self.folder / CHECKPOINT).exists()
        return self.over or first or time.monotonic() - self.saved > self.config.checkpoint_seconds

    def save(self) -> None:
        if self.folder is not None:
            self.state.save(self.folder, self.config, self.fabric, self.task)
        self.saved = time.monotonic()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        self.lock.close()
