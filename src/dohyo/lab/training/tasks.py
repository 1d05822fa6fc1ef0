"""What the loop trains on: data, or samples from the model itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError
from dohyo.estimators import IWAE
from dohyo.evaluation import isolated, mean_log_p, most_rows, tensors
from dohyo.lab.training.chains import PILOT, tune_chains
from dohyo.lab.training.config import DrawsConfig, LoopConfig, Progress, StepConfig
from dohyo.lab.training.processes import matmul_precision, one_thread, sum_over_processes
from dohyo.objectives import Outcome

Record = dict[str, Any]
C = TypeVar("C", bound=StepConfig)
_NO_BATCH = "the loader gave no batch; give at least one datum"
_WANTED = "give a data set, a tensor, or a pair (train, valid) of tensors or loaders"


class Objective(Protocol):
    """What the loop needs from an objective."""

    @property
    def shared(self) -> bool:
        """Whether the whole batch has one K."""

    @property
    def running_baseline(self) -> bool: ...

    def __call__(self, model: Any, x: Tensor, generator: Any, baseline: Any, /) -> Outcome: ...

    def skip(self, generator: torch.Generator) -> None:
        """Draw a shared K and discard it, to stay in step with the other processes."""


@dataclass(frozen=True)
class Batches:
    """An epoch's indices (..., data); each step takes the next `size` of them."""

    order: Tensor
    size: int
    on_step: Callable[[float], None] | None = None  # called after each step with the share of the epoch that is done

    def __len__(self) -> int:
        return -(-self.order.shape[-1] // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(len(self)):
            yield self.order[..., step * self.size : (step + 1) * self.size]
            if self.on_step is not None:
                self.on_step((step + 1) / len(self))


class Task(ABC, Generic[C]):
    """What the loop trains on. `on_step` is called after each step of the plain loop, with what is done of the run's length:
    epochs, or steps."""

    on_step: Callable[[float], None] | None = None

    @abstractmethod
    def begin(self, fabric: Fabric, config: C) -> None:
        """Move data to the device; raise a DohyoError if there is too little for this number of processes."""

    def prepare(self, state: Any, config: C) -> None:
        """Change the run's state before each epoch; most tasks do nothing."""

    @abstractmethod
    def batches(self, config: C, progress: Progress, order: torch.Generator) -> Iterable[Tensor]:
        """The indices of each step's data, for one epoch."""

    @abstractmethod
    def batch(self, index: Tensor) -> Tensor:
        """The objective's input, one row for each index."""

    def check(self, model: nn.Module, record: Record, config: C, fabric: Fabric) -> Record:
        """Measure the model after an epoch. If the result has a `score`, the parameters with the lowest score are kept, otherwise
        the last ones. If `stop` is true, the run ends."""
        return {}

    def begin_check(self, model: nn.Module, record: Record, config: C, fabric: Fabric) -> Callable[[], Record]:
        """`check`, begun where a GPU can work on it; the function that is returned waits for it."""
        return partial(self.check, model, record, config, fabric)

    def state_dict(self) -> dict[str, Any]:
        """The task's part of the checkpoint, for this process, as plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""


class Data(Protocol):
    """Data to train and validate on, such as `dohyo.lab.data.Dataset`."""

    @property
    def train(self) -> Tensor: ...
    @property
    def valid(self) -> Tensor: ...
    def train_batch(self, index: Tensor) -> Tensor: ...
    def to(self, device: torch.device) -> "Data": ...


Batched = Tensor | Iterable[Any]  # a tensor with one row for each datum, or a loader
Trainable = Data | Tensor | tuple[Batched, Batched]


class OnData(Task[LoopConfig]):
    """Epochs over data in random order, with the validation NLL after each."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def begin(self, fabric: Fabric, config: LoopConfig) -> None:
        train, valid = len(self.data.train), len(self.data.valid)
        if min(train, valid) < fabric.world_size:
            raise DohyoError(f"{train} training and {valid} validation data for {fabric.world_size} processes")
        self.data = self.data.to(fabric.device)

    def prepare(self, state: Any, config: LoopConfig) -> None:
        epoch, chains = state.progress.epoch, state.chains
        if chains is not None and chains.due(epoch):
            with isolated(state.model, config.seed + epoch):
                pilot = self.pilot()
            tune_chains(state.model, pilot, config.seed + epoch, first=epoch == chains.since)

    def pilot(self) -> Tensor:
        """Some of the training data."""
        return self.batch(torch.randint(len(self.data.train), (PILOT,), device=self.data.train.device))

    def batches(self, config: LoopConfig, progress: Progress, order: torch.Generator) -> Batches:
        with one_thread():
            whole = torch.randperm(len(self.data.train), generator=order)
        on_step = self.on_step
        told = None if on_step is None else lambda share: on_step(progress.epoch + share)
        return Batches(whole.to(self.data.train.device), config.batch_size, told)

    def batch(self, index: Tensor) -> Tensor:
        return self.data.train_batch(index)

    def begin_check(self, model: nn.Module, record: Record, config: LoopConfig, fabric: Fabric) -> Callable[[], Record]:
        nll = validation_nll(model, self.data.valid, config, fabric)
        return lambda: dict.fromkeys(("valid_nll", "score"), nll())


class OnDraws(Task[Any]):
    """Steps on samples from the model: an index stands for one sample. Subclasses define what to check between epochs."""

    def begin(self, fabric: Fabric, config: DrawsConfig) -> None:
        if config.batch_size < fabric.world_size:
            raise DohyoError(f"batch_size is {config.batch_size}, fewer than the {fabric.world_size} processes")

    def batches(self, config: DrawsConfig, progress: Progress, order: torch.Generator) -> Iterator[Tensor]:
        for _ in range(min(config.check_every, config.steps - progress.step)):
            yield torch.arange(config.batch_size)
            if self.on_step is not None:
                self.on_step(progress.step)

    def batch(self, index: Tensor) -> Tensor:
        return index


@dataclass
class Tensors:
    """Tensors as data; one row for each datum."""

    train: Tensor
    valid: Tensor

    def train_batch(self, index: Tensor) -> Tensor:
        return self.train[index]

    def to(self, device: torch.device) -> "Tensors":
        return Tensors(self.train.to(device), self.valid.to(device))


class OnLoader(OnData):
    """Epochs over a loader, in its own order and batches; it shuffles with torch's RNG, so that the run's seed decides."""

    def __init__(self, loader: Iterable[Any], valid: Tensor) -> None:
        super().__init__(Tensors(valid[:0], valid))
        self.loader, self.current = loader, valid

    def begin(self, fabric: Fabric, config: LoopConfig) -> None:
        if fabric.world_size > 1:
            raise DohyoError(f"a loader for {fabric.world_size} processes; give tensors, of which each process takes its part")
        self.data = self.data.to(fabric.device)

    def batches(self, config: LoopConfig, progress: Progress, order: torch.Generator) -> Any:
        count = 0
        for x in tensors(self.loader):
            self.current = x.to(self.data.valid.device)
            count += 1
            yield torch.arange(len(x))
        if not count:
            raise DohyoError(_NO_BATCH)

    def batch(self, index: Tensor) -> Tensor:
        return self.current[index]

    def pilot(self) -> Tensor:
        first, count = [], 0
        for x in tensors(self.loader):
            first.append(x)
            if (count := count + len(x)) >= PILOT:
                break
        if not first:
            raise DohyoError(_NO_BATCH)
        return torch.cat(first)[:PILOT].to(self.data.valid.device)


def task_of(data: Trainable, seed: int) -> tuple[OnData, Tensor]:
    """The task of training on these data, and one or two of them to try the model on.
    A single tensor is divided: a tenth of it, chosen at random with the seed, is for validation."""
    if isinstance(data, Tensor):
        if len(data) < 2:
            raise DohyoError(f"the data are {tuple(data.shape)}; at least 2 are needed, one to train on and one to validate on")
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).to(data.device)
        held_out = -(-len(data) // 10)
        data = (data[order[held_out:]], data[order[:held_out]])
    if not isinstance(data, tuple):
        if not _is_data(data):
            raise DohyoError(f"the data are a {type(data).__name__}; {_WANTED}")
        return OnData(data), data.train_batch(torch.arange(min(2, len(data.train))))
    if len(data) != 2 or not all(isinstance(part, Tensor | Iterable) and not isinstance(part, Iterator) for part in data):
        came = ", ".join(type(part).__name__ for part in data)
        raise DohyoError(f"the data are ({came}), but batches are needed more than once; {_WANTED}")
    train, loader = data
    with torch.random.fork_rng():  # a loader that shuffles takes from it
        valid = loader if isinstance(loader, Tensor) else torch.cat(list(tensors(loader)) or [torch.empty(0)])
        first = train[:2] if isinstance(train, Tensor) else next(tensors(train), valid[:0])[:2]
    if min(len(first), len(valid)) == 0 or first.shape[1:] != valid.shape[1:]:
        raise DohyoError(
            f"a datum is {tuple(first.shape[1:])} in train and {tuple(valid.shape[1:])} in valid, which has {len(valid)}; "
            "both must have data, and of one shape"
        )
    return (OnData(Tensors(train, valid)) if isinstance(train, Tensor) else OnLoader(train, valid)), first


def _is_data(data: object) -> TypeGuard[Data]:
    return all(hasattr(data, name) for name in ("train", "valid", "train_batch", "to"))


def validation_nll(model: nn.Module, valid: Tensor, config: LoopConfig, fabric: Fabric) -> Callable[[], float]:
    """The mean NLL by IWAE over the validation data, divided among the processes, with a separate seed.

    It is begun, with matrix products as precise as in training; the function that is returned waits for it.
    """
    own = valid[fabric.global_rank :: fabric.world_size]
    terms = config.valid_terms
    if isinstance(model, Annealed):  # about as many passes through the decoder
        terms = max(1, 3 * terms // model.evaluations_per_weight)
    estimator = IWAE(terms)
    seed = config.seed + fabric.global_rank
    batch = max(1000, most_rows(own, config.max_rows) // terms)
    with matmul_precision(config, own.device):
        mean = mean_log_p(model, own, estimator, batch_size=batch, max_rows=config.max_rows, seed=seed)  # type: ignore[arg-type]

    def nll() -> float:
        if fabric.world_size == 1:
            return -mean()
        total = torch.tensor(mean() * len(own), dtype=torch.float64, device=fabric.device)
        return -float(sum_over_processes(fabric, [total])[0]) / len(valid)

    return nll
