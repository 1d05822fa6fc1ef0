"""A run's folder, whatever the task: config.yaml first, then checkpoint, metrics, result and pictures."""

import dataclasses
import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
import yaml
from lightning_fabric import Fabric
from torch import nn

import dohyo
from dohyo.errors import DohyoError
from dohyo.files import plain, replacing
from dohyo.lab.training import train
from dohyo.lab.training.config import Progress
from dohyo.lab.training.state import load_checkpoint
from dohyo.lab.training.tasks import Objective, Task

CONFIG, RESULT = "config.yaml", "result.json"
SCHEMA_VERSION = 1
C = TypeVar("C", bound=Any)
OnEpoch = Callable[[dict[str, Any]], None]
OnTest = Callable[[int, int], None]


class Run(ABC, Generic[C]):
    """A run in its folder. A subclass says what is trained on what, and what comes after training.

    Attributes:
        command: The subcommand of `dohyo` that starts and resumes such runs.
        config_type: Its config.
        length: The config's key for how long to train: epochs or steps.
        free: The keys that a resumed run may change.
    """

    command: ClassVar[str]
    config_type: ClassVar[type]
    length: ClassVar[str]
    free: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Path, config: C) -> None:
        self.folder, self.config = folder, config

    @classmethod
    def open(cls, folder: Path) -> Self:
        from jsonargparse import ArgumentError, ArgumentParser

        path = folder / CONFIG
        if not path.is_file():
            raise DohyoError(f"{folder}: holds no run (there is no {CONFIG} in it)")
        try:
            parser = ArgumentParser(exit_on_error=False)
            parser.add_class_arguments(cls.config_type)
            values = parser.parse_object(yaml.safe_load(path.read_text(encoding="utf-8")))
            return cls(folder, cls.config_type(**values.as_dict()))
        except (yaml.YAMLError, ArgumentError, TypeError, AttributeError, ValueError) as error:
            raise DohyoError(f"{path}: {error}") from error

    def write_config(self) -> None:
        values = {key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(self.config).items()}
        with replacing(self.folder / CONFIG) as temporary:
            temporary.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        result = self.result
        if result is None:
            return False
        progress = Progress(**load_checkpoint(self.folder)["numbers"])
        done = {"epochs": progress.epoch, "steps": progress.step}[self.length]
        return bool(self.config.over(progress) and result[self.length] == done)  # an older result is that of a shorter run

    @property
    def result(self) -> dict[str, Any] | None:
        """What result.json holds, if it is there."""
        path = self.folder / RESULT
        if not path.exists():
            return None
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DohyoError(f"{path}: is damaged ({error}); remove it, and --resume makes it anew") from error

    @cached_property
    def parts(self) -> tuple[nn.Module, Task[Any], Objective]:
        """The untrained model, the task and the objective: asked for before a folder is made, so that errors come first."""
        return self.make_parts()

    @abstractmethod
    def make_parts(self) -> tuple[nn.Module, Task[Any], Objective]: ...

    @abstractmethod
    def finish(self, fabric: Fabric, on_test: OnTest) -> dict[str, Any]:
        """Look at the trained model, draw the pictures, and return the result's own keys; on every process."""

    def trained(self) -> nn.Module:
        """The best model so far."""
        model = self.parts[0]
        try:
            model.load_state_dict(load_checkpoint(self.folder)["best"])
        except RuntimeError as error:
            raise DohyoError(f"{self.folder}: the checkpoint does not fit the model of {CONFIG} ({error})") from error
        return model

    def complete(
        self,
        fabric: Fabric,
        on_epoch: OnEpoch = lambda record: None,
        on_test: OnTest = lambda done, total: None,
    ) -> dict[str, Any]:
        """The result; trained only as far as it is not yet."""
        result = self.result if self.finished else None
        if result is None:
            if fabric.is_global_zero:
                self.write_config()
            result = self.train(fabric, on_epoch, on_test)
        return result

    def train(
        self,
        fabric: Fabric,
        on_epoch: OnEpoch = lambda record: None,
        on_test: OnTest = lambda done, total: None,
    ) -> dict[str, Any]:
        """Train from where the folder stands, look at the best parameters, write result.json and the pictures."""
        model, task, objective = self.parts
        for record in train(model, task, objective, self.config, self.folder, fabric):
            on_epoch(record)
        found = self.finish(fabric, on_test)
        numbers = load_checkpoint(self.folder)["numbers"]
        result = plain({
            "schema_version": SCHEMA_VERSION,
            **found,
            "seed": self.config.seed,
            "epochs": numbers["epoch"],
            "steps": numbers["step"],
            "seconds": numbers["seconds"],
            "versions": versions(),
        })  # fmt: skip
        if fabric.is_global_zero:
            for leftover in self.folder.glob(".*-????????.*"):  # of a kill while writing
                leftover.unlink()
            write_json(self.folder / RESULT, result)  # last: it says that the run is finished
        return dict(result)


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(plain(value), indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    return {"dohyo": dohyo.__version__, "torch": torch.__version__, "python": platform.python_version()}
