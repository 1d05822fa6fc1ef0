"""The settings of the loop, when it lowers the learning rate and when it ends."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch

from dohyo.errors import DohyoError
from dohyo.names import check_choices

Optimiser = Literal["adam", "amsgrad", "rmsprop"]
ProgramName = Literal["auto", "plain", "captured"]
Decay = Literal["linear", "none"]
Device = Literal["auto", "cpu", "cuda", "mps"]

# A resumed run may change the fields that carry this metadata, and no others.
RESUMABLE: dict[str, bool] = {"resume": True}


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
class StepConfig(ABC):
    """How to take a step, whatever the task.

    Attributes:
        unit: What the run's length is counted in, epoch or step.
        batch_size: Data in a step, over all processes.
        optimiser: The optimiser.
        learning_rate: The optimiser's learning rate.
        beta1: Adam's beta1.
        beta2: Adam's beta2; for RMSprop the decay of its mean square.
        epsilon: The optimiser's epsilon.
        clip_decoder: The largest norm of theta's gradient; null for no clipping.
        clip_encoder: The largest norm of phi's gradient; null for no clipping.
        max_rows: The most rows given to the network at a time in evaluation, which limits memory; null for 2,000 on a CPU
            and 200,000 on a GPU.
        checkpoint_seconds: A new checkpoint is written at the end of an epoch if the last one is older than this.
        seed: The seed of everything: parameters, data order, noise and K.
        k_seed: The seed of K only; null for `seed`. Replicas in one program share the K of the first.
        device: Where to compute.
        tf32: Let a CUDA GPU round the factors of matrix products to 11 bits in training, for speed; never in evaluation.
    """

    unit: ClassVar[Literal["epoch", "step"]]

    batch_size: int = 100
    optimiser: Optimiser = "amsgrad"
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-4
    clip_decoder: float | None = None
    clip_encoder: float | None = None
    max_rows: int | None = field(default=None, metadata=RESUMABLE)
    checkpoint_seconds: float = field(default=5.0, metadata=RESUMABLE)
    seed: int = 0
    k_seed: int | None = None
    device: Device = field(default="auto", metadata=RESUMABLE)
    tf32: bool = True

    def __post_init__(self) -> None:
        check_choices(self)
        self._at_least_one("batch_size", "max_rows")
        for name in ("learning_rate", "epsilon", "clip_decoder", "clip_encoder"):
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

    @property
    @abstractmethod
    def length(self) -> int:
        """The largest number of epochs or steps."""

    @abstractmethod
    def over(self, progress: Progress) -> bool:
        """Whether the run ends here."""

    @abstractmethod
    def rate(self, progress: Progress) -> float:
        """The learning rate of the next epoch."""

    def drops(self, progress: Progress) -> bool:
        """Whether to lower the learning rate after this epoch because nothing has improved."""
        return False


@dataclass
class LoopConfig(StepConfig):
    """How to train on data; the defaults are the paper's.

    Attributes:
        epochs: The largest number of passes over the training data.
        lr_factor: What the learning rate is multiplied by after `lr_patience` epochs without improvement.
        lr_patience: Epochs without a better validation NLL before the learning rate is lowered.
        stop_patience: Epochs without a better validation NLL before training stops.
        valid_terms: The validation NLL is estimated by IWAE with this many terms.
        program: How the step is run; the numbers are the same up to rounding.
    """

    unit = "epoch"

    epochs: int = field(default=2000, metadata=RESUMABLE)
    lr_factor: float = 0.8
    lr_patience: int = 50
    stop_patience: int = field(default=300, metadata=RESUMABLE)
    valid_terms: int = 20
    program: ProgramName = field(default="auto", metadata=RESUMABLE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("epochs", "lr_patience", "stop_patience", "valid_terms")
        if not 0 < self.lr_factor < 1:
            raise DohyoError(f"lr_factor is {self.lr_factor}; it must lie strictly between 0 and 1")

    @property
    def length(self) -> int:
        return self.epochs

    def over(self, progress: Progress) -> bool:
        return progress.stopped or progress.epoch >= self.epochs or progress.stale >= self.stop_patience

    def captured_on(self, device: torch.device) -> bool:
        """Whether to try the captured step."""
        return self.program == "captured" or (self.program == "auto" and device.type == "cuda")

    def rate(self, progress: Progress) -> float:
        return self.learning_rate * self.lr_factor**progress.drops

    def drops(self, progress: Progress) -> bool:
        return progress.stale > 0 and progress.stale % self.lr_patience == 0


@dataclass
class DrawsConfig(StepConfig):
    """How to train on samples from the model itself. An epoch is `check_every` steps.

    Attributes:
        steps: The number of steps.
        check_every: Steps from one check, record and possible checkpoint to the next.
        max_seconds: The run ends at the first check after this time; null for no limit.
        decay: Whether the learning rate falls; it is lowered after each check.
        tf32: Let a CUDA GPU round the factors of matrix products to 11 bits in training; nobody has measured what it does here.
    """

    unit = "step"

    steps: int = field(default=10_000, metadata=RESUMABLE)
    check_every: int = 500
    max_seconds: float | None = field(default=None, metadata=RESUMABLE)
    decay: Decay = "linear"
    tf32: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("steps", "check_every")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise DohyoError(f"max_seconds is {self.max_seconds}; it must be positive, or null for no limit")

    @property
    def length(self) -> int:
        return self.steps

    def over(self, progress: Progress) -> bool:
        late = self.max_seconds is not None and progress.seconds >= self.max_seconds
        return progress.stopped or progress.step >= self.steps or late

    def rate(self, progress: Progress) -> float:
        return self.learning_rate * (1 - progress.step / self.steps if self.decay == "linear" else 1.0)
