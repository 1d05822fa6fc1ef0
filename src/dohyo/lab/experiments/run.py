"""A run in its folder, whatever the task: the config first, then checkpoint, records, result and pictures."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from lightning_fabric import Fabric
from torch import nn

from dohyo.errors import DohyoError, reporting
from dohyo.estimators import ESTIMATORS, Estimator, to_dict
from dohyo.files import plain, remove_leftovers
from dohyo.lab.folder import (
    CHECKPOINT,
    CONFIG,
    LOCK,
    METRICS,
    RESULT,
    SCHEMA_VERSION,
    TENSORBOARD,
    Values,
    check_places,
    read_config,
    read_result,
    versions,
    write_config,
    write_result,
)
from dohyo.lab.parsing import config_parser
from dohyo.lab.training import train
from dohyo.lab.training.config import Options, StepConfig, option
from dohyo.lab.training.processes import check_common, on_first, only_writer
from dohyo.lab.training.state import load_checkpoint, load_progress
from dohyo.names import named

C = TypeVar("C", bound=StepConfig)
OnEpoch = Callable[[dict[str, Any]], None]
OnTest = Callable[[int, int], None]
_MOST_REPLICAS = 1000


@dataclass
class EstimatorConfig(Options):
    """The size of the latent-variable model, the estimator of its log p(x), and how many such runs."""

    hidden: int = option(200, "Units in each hidden layer.")
    latent: int = option(20, "Latent dimensions.")
    estimator: str = option("sumo", "What theta follows.")
    cost: float = option(15.0, "The expected number of log-weights for each estimate, as near as the estimator can come.")

    replicas: int = option(
        1,
        "How many runs, with seeds from `seed` on, in one program where the model allows it; the result is their mean and "
        "spread. Each has its own data order and noise; K is common to all.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the loop's config
        if not 1 <= self.replicas <= _MOST_REPLICAS:
            wanted = f"it must be at least 1 and at most {_MOST_REPLICAS}: start several commands for more"
            raise DohyoError(f"replicas is {self.replicas}; {wanted}")

    def make_estimator(self, max_terms: int | None = None) -> Estimator:
        return named(ESTIMATORS, self.estimator, "estimator").at_cost(self.cost, max_terms)


def about_estimator(config: Any, estimator: Estimator) -> dict[str, Any]:
    """What a result says about the estimator, including its actual expected cost."""
    return {
        "estimator": config.estimator,
        "expected_cost": estimator.expected_cost,
        "estimator_arguments": to_dict(estimator),
        "encoder": config.encoder,
    }


_SIGNS = {"data": "train", "target": "reverse-kl", "policy": "qpbo"}  # options that only the runs of one command have


def config_of(folder: Path, command: str) -> Values:
    """The config of the run that a folder holds, as plain data; a DohyoError if it is a run of another command."""
    values = read_config(folder)
    made = next((made for key, made in _SIGNS.items() if key in values), command)
    if made != command:
        hint = f"; dohyo divergence {folder} measures its divergence" if made == "reverse-kl" else ""
        raise DohyoError(f"{folder}: holds a run of dohyo {made}, and one of dohyo {command} is needed here{hint}")
    return values


def silent(*_: Any) -> None:
    """Reports no progress."""


def _remove(made: list[Path], logs: list[Path]) -> None:
    for folder in logs:
        shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(made, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):  # it is not there, or is a folder that holds somebody's files
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


class Run(ABC, Generic[C]):
    """A run in its folder. A subclass says what is trained on what, and what comes after training.

    Attributes:
        command: The subcommand of `dohyo` that starts and resumes such runs.
        config_type: Its config.
        tested_by: The fields of the last test that the result repeats: where they differ, the run is tested again.
        at_first: What runs had that began before there was an option for it, where its default is something else.
    """

    command: ClassVar[str]
    config_type: ClassVar[type]
    tested_by: ClassVar[tuple[str, ...]] = ()
    at_first: ClassVar[Values] = {}

    def __init__(self, folder: Path, config: C) -> None:
        self.folder, self.config = folder, config

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The run that a folder holds."""
        check_places(folder)
        values = {**cls.at_first, **config_of(folder, cls.command)}
        try:
            return cls(folder, cls.config_type(**config_parser(cls.config_type).parse_object(values).as_dict()))
        except DohyoError as error:
            raise DohyoError(f"{folder / CONFIG}: {error}") from error

    def write_config(self) -> None:
        write_config(self.folder, self.config)

    @property
    def length(self) -> str:
        """The config's field that says how long to train: epochs or steps."""
        return f"{self.config.unit}s"

    @property
    def notes(self) -> list[str]:
        """What to say before training, such as how the data were read."""
        return []

    @property
    def result(self) -> dict[str, Any] | None:
        """What result.json holds, if it is there."""
        return read_result(self.folder)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do. An older result may come from a shorter run, or from another test."""
        result = self.result
        if result is None:
            return False
        progress = load_progress(self.folder)
        tested = all(result.get(name, now) == now for name in self.tested_by for now in [getattr(self.config, name)])
        return self.config.over(progress) and result.get(self.length) == getattr(progress, self.config.unit) and tested

    @cached_property
    def parts(self) -> tuple[nn.Module, Any, Any]:
        """The untrained model, the task and the objective."""
        return self.make_parts()

    @abstractmethod
    def make_parts(self) -> tuple[nn.Module, Any, Any]: ...

    @abstractmethod
    def finish(self, fabric: Fabric, on_test: OnTest) -> dict[str, Any]:
        """Test the trained model, plot the pictures, and return the result's own keys; on every process."""

    @property
    def folders(self) -> list[Path]:
        """The folders that the run writes to."""
        return [self.folder]

    @contextmanager
    def writing(self, fabric: Fabric) -> Iterator[None]:
        """Be the only process that writes to the run's folders, and remove what killed ones have left there."""
        with only_writer(*self.folders, fabric=fabric):
            check_common(fabric, self.folder / LOCK)
            for folder in self.folders if fabric.is_global_zero else ():
                remove_leftovers(folder)
            yield

    @contextmanager
    def beginning(self, fabric: Fabric) -> Iterator[None]:
        """`writing` for a new run. If it fails before its first checkpoint nothing of it stays: there is nothing to continue."""
        made = [path for own in self.folders for path in (*own.parents, own, own / LOCK) if not path.exists()]
        with self.writing(fabric):
            on_first(fabric, self.check_new)  # from here on nobody else can begin
            made += [own / name for own in self.folders for name in (CONFIG, METRICS)]
            logs = [own / TENSORBOARD for own in self.folders if not (own / TENSORBOARD).exists()]
            try:
                yield
            except Exception:
                if fabric.world_size == 1 and not any((own / CHECKPOINT).exists() for own in self.folders):
                    _remove(made, logs)
                raise

    def check_new(self) -> None:
        """A DohyoError if the folder holds a run, or parts of one: they would be mixed with the new one's."""
        foreign = [name for folder in self.folders for name in (CHECKPOINT, METRICS, RESULT) if (folder / name).exists()]
        if (self.folder / CONFIG).exists():  # looked for last: another process may be beginning here, and writes it first
            again = f"dohyo {self.command} --resume {self.folder}"
            raise DohyoError(f"{self.folder} already holds a run; continue it ({again}), or choose another --out")
        if foreign:
            raise DohyoError(f"{self.folder} holds {foreign[0]} of another run, without its {CONFIG}; choose another --out")
        for folder in self.folders:
            check_places(folder)

    def check(self, fabric: Fabric) -> None:
        """A DohyoError for anything that can be found wrong before the first file is written."""
        if self.config.batch_size < fabric.world_size:
            raise DohyoError(
                f"batch_size is {self.config.batch_size} for {fabric.world_size} processes; each needs a part of every batch: "
                f"set it to {fabric.world_size} or more, or start fewer processes"
            )
        _, task, _ = self.parts
        task.begin(fabric, self.config)

    def trained(self, average: bool = False) -> nn.Module:
        """The best model so far, or that with the averaged parameters."""
        model, checkpoint = self.parts[0], load_checkpoint(self.folder)
        if average and "average" not in checkpoint:
            raise DohyoError(f"{self.folder}: has no averaged parameters; train with --average 10, say")
        with reporting(f"{self.folder}: the checkpoint does not fit the model of {CONFIG} ({{}})"):
            model.load_state_dict(checkpoint["average" if average else "best"])
        return model

    def complete(self, fabric: Fabric, on_epoch: OnEpoch = silent, on_test: OnTest = silent) -> dict[str, Any]:
        """The result; the run is finished first if it is not yet."""
        result = self.result if self.finished else None
        if result is not None:
            return result
        with self.writing(fabric):
            result = self.result if self.finished else None  # another process may have finished it by now
            return self._train(fabric, on_epoch, on_test) if result is None else result

    def train(self, fabric: Fabric, on_epoch: OnEpoch = silent, on_test: OnTest = silent) -> dict[str, Any]:
        """Train from where the folder stands, test the best parameters, write the result and the pictures."""
        with self.writing(fabric):
            return self._train(fabric, on_epoch, on_test)

    def _train(self, fabric: Fabric, on_epoch: OnEpoch, on_test: OnTest) -> dict[str, Any]:
        model, task, objective = self.parts
        resumed = (self.folder / CHECKPOINT).exists()  # then the config is written, with its new length, once that has been read
        if fabric.is_global_zero and not resumed:
            self.write_config()
        for record in train(model, task, objective, self.config, self.folder, fabric):
            if fabric.is_global_zero and resumed:
                self.write_config()
                resumed = False
            on_epoch(record)
        if fabric.is_global_zero and resumed:
            self.write_config()
        found = self.finish(fabric, on_test)
        numbers = load_checkpoint(self.folder)["numbers"]
        result: dict[str, Any] = plain({
            "schema_version": SCHEMA_VERSION,
            **found,
            "seed": self.config.seed,
            "epochs": numbers["epoch"],
            "steps": numbers["step"],
            "seconds": numbers["seconds"],
            "versions": versions(),
        })  # fmt: skip
        if fabric.is_global_zero:
            write_result(self.folder, result)
        return result
