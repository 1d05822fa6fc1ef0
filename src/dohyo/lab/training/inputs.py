"""What `fit` may be given as data: a data set, tensors, or loaders of batches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from lightning_fabric import Fabric
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.evaluation import tensors
from dohyo.lab.training.config import LoopConfig, Progress
from dohyo.lab.training.tasks import Data, OnData

Batches = Tensor | Iterable[Any]  # a tensor with one row for each datum, or a loader
Trainable = Data | Tensor | tuple[Batches, Batches]

_WANTED = "give a data set, a tensor, or a pair (train, valid) of tensors or loaders"


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
            raise DohyoError("the loader gave no batch; give at least one datum")

    def batch(self, index: Tensor) -> Tensor:
        return self.current[index]


def task_of(data: Trainable, seed: int) -> tuple[OnData, Tensor]:
    """The task of training on these data, and one or two of them to try the model on.

    A single tensor is divided: a tenth of it, chosen at random with the seed, is for validation.
    """
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
