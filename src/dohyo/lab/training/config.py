"""The settings of the loop, when it lowers the learning rate and when it ends."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch

from dohyo.errors import DohyoError, check_seed
from dohyo.names import check_choices, named

Optimiser = Literal["adam", "amsgrad", "rmsprop"]
ProgramName = Literal["auto", "plain", "captured"]
Decay = Literal["linear", "none"]
Schedule = Literal["plateau", "cosine"]
RecipeName = Literal["paper", "ours"]
Device = Literal["auto", "cpu", "cuda", "mps"]

_LARGEST_BATCH = 2**24
_MOST = dict.fromkeys(("valid_terms", "test_terms", "check_terms"), 10**9) | dict.fromkeys(("check_draws", "test_draws"), 10**7)
_LAST_RATE = 0.01  # of the learning rate, where a cosine ends

# Defaults under one name, for the options of a `LoopConfig` that are left out. Ours is what trained best for its length.
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"optimiser": "amsgrad", "learning_rate": 1e-3, "epsilon": 1e-4, "schedule": "plateau", "average": 0},
    "ours": {"optimiser": "adam", "learning_rate": 2e-3, "epsilon": 1e-8, "schedule": "cosine", "average": 10},
}


def option(default: Any, text: str = "", resume: bool = False) -> Any:
    """A field of a config: `text` is its help, "" for that of a base class; `resume` says whether a resumed run may change it."""
    return field(default=default, metadata={"text": text, "resume": resume})


class Options:
    """A config whose fields are made by `option`: their texts become part of its docstring, for the reference."""

    def __init_subclass__(cls) -> None:
        texts = {name: each.metadata["text"] for name, each in vars(cls).items() if isinstance(each, Field)}
        lines = "".join(f"        {name}: {text}\n" for name, text in texts.items() if text)
        cls.__doc__ = f"{cls.__doc__}\n\n    Attributes:\n{lines}    " if lines else cls.__doc__


@dataclass
class Progress:
    """How far a run has come."""

    epoch: int = 0
    step: int = 0
    stale: int = 0
    drops: int = 0
    best_score: float = math.inf
    best_epoch: int = 0
    baseline: float | None = None
    seconds: float = 0.0
    step_seconds: float = 0.0
    stopped: bool = False


def resumable_fields(config: Any) -> list[str]:
    """The names of the fields that a resumed run may change, for a config or its class."""
    return [each.name for each in fields(config) if each.metadata.get("resume")]


@dataclass
class StepConfig(Options, ABC):
    """How to take a step, whatever the task."""

    unit: ClassVar[Literal["epoch", "step"]]  # what the run's length is counted in

    batch_size: int = option(100, "Data, or samples of the model, in a step, over all processes.")
    optimiser: Optimiser = option("amsgrad", "The optimiser.")
    learning_rate: float = option(1e-3, "The optimiser's learning rate.")
    beta1: float = option(0.9, "Adam's beta1.")
    beta2: float = option(0.999, "Adam's beta2; for RMSprop the decay of its mean square.")
    epsilon: float = option(1e-4, "The optimiser's epsilon.")
    clip_decoder: float | None = option(None, "The largest norm of theta's gradient; null for no clipping.")
    clip_encoder: float | None = option(None, "The largest norm of phi's gradient; null for no clipping.")
    max_rows: int | None = option(
        None,
        "The most rows given to the network at a time in evaluation, which limits memory; null for 2,000 on a CPU and 200,000 "
        "on a GPU.",
        resume=True,
    )
    checkpoint_seconds: float = option(
        5.0, "A new checkpoint is written after an epoch or check if the last one is older than this.", resume=True
    )
    max_seconds: float | None = option(None, "The run ends at the first check after this time; null for no limit.", resume=True)
    seed: int = option(0, "The seed of everything: parameters, data order, noise and K.")
    k_seed: int | None = option(None, "The seed of K only; null for `seed`. Replicas in one program share the K of the first.")
    device: Device = option("auto", "Where to compute.", resume=True)
    program: ProgramName = option("auto", "How the step is run; the numbers are the same up to rounding.", resume=True)
    tf32: bool = option(
        True, "Let a CUDA GPU round the factors of matrix products to 11 bits in training, for speed; never in evaluation."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        self._at_least_one("batch_size", "max_rows")
        if self.batch_size > _LARGEST_BATCH:
            raise DohyoError(f"batch_size is {self.batch_size}; it must be at most {_LARGEST_BATCH}")
        for name in ("seed", "k_seed"):
            check_seed(name, getattr(self, name))
        if not self.checkpoint_seconds >= 0:
            raise DohyoError(f"checkpoint_seconds is {self.checkpoint_seconds}; it must be at least 0")
        for name in ("learning_rate", "epsilon", "clip_decoder", "clip_encoder", "max_seconds"):
            value = getattr(self, name)
            if isinstance(value, float | int) and not (value > 0 and math.isfinite(value)):
                raise DohyoError(f"{name} is {value}; it must be positive and finite")
        self.beta1, self.beta2 = float(self.beta1), float(self.beta2)
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise DohyoError(f"beta1 is {self.beta1} and beta2 {self.beta2}; both must lie in [0, 1)")

    def _at_least_one(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise DohyoError(f"{name} is {getattr(self, name)}; it must be at least 1")
            if name in _MOST and getattr(self, name) > _MOST[name]:
                raise DohyoError(f"{name} is {getattr(self, name)}; it must be at most {_MOST[name]}, or it would never end")

    @property
    def length(self) -> int:
        """The largest number of epochs or steps."""
        return int(getattr(self, f"{self.unit}s"))

    def over(self, progress: Progress) -> bool:
        """Whether the run ends here."""
        late = self.max_seconds is not None and progress.seconds >= self.max_seconds
        return progress.stopped or late or getattr(progress, self.unit) >= self.length

    def captured_on(self, device: torch.device) -> bool:
        """Whether to try the captured step."""
        return self.program == "captured" or (self.program == "auto" and device.type == "cuda")

    @abstractmethod
    def rate(self, progress: Progress) -> float:
        """The learning rate of the next epoch."""

    def drops(self, progress: Progress) -> bool:
        """Whether to lower the learning rate after this epoch because nothing has improved."""
        return False

    @staticmethod
    def implied(values: Mapping[str, Any]) -> dict[str, Any]:
        """What options of such a config are if they are left out, as far as these values of others decide it."""
        return {}


@dataclass
class LoopConfig(StepConfig):
    """How to train on data; the defaults are the paper's."""

    unit = "epoch"

    recipe: RecipeName = option("paper", "The defaults of the optimiser and its schedule; options given beside it win.")
    # These five are the recipe's once the config is made.
    optimiser: Optimiser = option(None, "The optimiser; by default the recipe's.")
    learning_rate: float = option(None, "The optimiser's learning rate; by default the recipe's.")
    epsilon: float = option(None, "The optimiser's epsilon; by default the recipe's.")
    schedule: Schedule = option(None, "How the learning rate falls, epoch by epoch; by default the recipe's.")
    average: int = option(
        None,
        "Keep, test and save parameters averaged over the last epochs too, about so many; 0 for none; by default the recipe's.",
    )
    epochs: int = option(2000, "The largest number of passes over the training data.", resume=True)
    anneal_from: float = option(
        0.0,
        "With a `dohyo.Annealed` model: the share of the training in which theta first follows IWAE on a few samples of the "
        "encoder, whose epochs are short; 0 for chains from the beginning.",
    )
    lr_factor: float = option(0.8, "Plateau: the factor of the learning rate after `lr_patience` epochs without improvement.")
    lr_patience: int = option(50, "Plateau: epochs without a better validation NLL before the learning rate is lowered.")
    stop_patience: int = option(300, "Plateau: epochs without a better validation NLL before training stops.", resume=True)
    valid_terms: int = option(20, "The validation NLL is estimated by IWAE with this many terms.")

    def __post_init__(self) -> None:
        implied = self.implied(vars(self)).items()
        vars(self).update((name, value) for name, value in implied if getattr(self, name) is None)
        super().__post_init__()
        self._at_least_one("epochs", "lr_patience", "stop_patience", "valid_terms")
        if self.average < 0:
            raise DohyoError(f"average is {self.average}; it must be a number of epochs, or 0 for no averaged parameters")
        if not 0 <= self.anneal_from < 1:
            raise DohyoError(f"anneal_from is {self.anneal_from}; it must be a share of the training, at least 0 and below 1")
        if not 0 < self.lr_factor < 1:
            raise DohyoError(f"lr_factor is {self.lr_factor}; it must lie strictly between 0 and 1")

    @staticmethod
    def implied(values: Mapping[str, Any]) -> dict[str, Any]:
        return named(RECIPES, values["recipe"], "recipe") if "recipe" in values else {}

    def over(self, progress: Progress) -> bool:
        return super().over(progress) or (self.schedule == "plateau" and progress.stale >= self.stop_patience)

    def by_chains(self, progress: Progress) -> bool:
        """Whether theta follows chains from here on, if it ever does."""
        of_time = progress.seconds / (self.max_seconds or math.inf)
        return progress.epoch >= int(self.anneal_from * self.epochs * (1 + 1e-9)) or of_time >= self.anneal_from

    def rate(self, progress: Progress) -> float:
        if self.schedule == "plateau":
            return self.learning_rate * self.lr_factor**progress.drops
        share = max(progress.epoch / self.epochs, progress.seconds / (self.max_seconds or math.inf))
        return self.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * min(share, 1.0))) / 2)

    def drops(self, progress: Progress) -> bool:
        return progress.stale > 0 and progress.stale % self.lr_patience == 0


@dataclass
class DrawsConfig(StepConfig):
    """How to train on samples from the model itself. An epoch is `check_every` steps."""

    unit = "step"

    steps: int = option(10_000, "The number of steps.", resume=True)
    check_every: int = option(500, "Steps from one check, record and possible checkpoint to the next.")
    decay: Decay = option("linear", "Whether the learning rate falls; it is lowered after each check.")
    program: ProgramName = option(
        "plain", "How the step is run; auto is plain here: a captured one takes minutes to get ready on a GPU.", resume=True
    )
    tf32: bool = option(
        False,
        "Let a CUDA GPU round the factors of matrix products to 11 bits in training; nobody has measured what it does here.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("steps", "check_every")

    def captured_on(self, device: torch.device) -> bool:
        return self.program == "captured"

    def rate(self, progress: Progress) -> float:
        return self.learning_rate * (1 - progress.step / self.steps if self.decay == "linear" else 1.0)
