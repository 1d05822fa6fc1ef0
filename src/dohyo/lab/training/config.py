"""The numbers of the loop, and when it lowers the learning rate and ends."""

import math
from dataclasses import dataclass

import torch

from dohyo.errors import DohyoError
from dohyo.names import named

OPTIMISERS = {"adam": "Adam", "amsgrad": "Adam with AMSGrad's maximum", "rmsprop": "RMSprop, without momentum"}

PROGRAMS = ("auto", "plain", "captured")


@dataclass
class Progress:
    """How far a run is."""

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


@dataclass
class StepConfig:
    """How to take a step, whatever the task.

    Attributes:
        batch_size: Data in a step, over all processes.
        optimiser: adam, amsgrad or rmsprop.
        learning_rate: Of the optimiser.
        beta1: Of Adam; RMSprop has no momentum.
        beta2: Of Adam; for RMSprop the decay of its mean square.
        epsilon: Of the optimiser.
        clip_decoder: The most that the norm of theta's gradient may be; null for no clipping.
        clip_encoder: The most that the norm of phi's gradient may be; null for no clipping.
        max_rows: The most rows given to the network at a time in evaluation: this bounds memory; null for 2,000 on a CPU and
            200,000 on a GPU.
        checkpoint_seconds: How old the checkpoint may grow before the end of an epoch writes a new one.
        seed: Of everything: parameters, data order, noise and K.
        device: cpu, cuda, mps or auto.
        tf32: Let a CUDA GPU round the factors of matrix products to 11 bits in training, for speed; evaluation never does.
    """

    batch_size: int = 100
    optimiser: str = "amsgrad"
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-4
    clip_decoder: float | None = None
    clip_encoder: float | None = None
    max_rows: int | None = None
    checkpoint_seconds: float = 5.0
    seed: int = 0
    device: str = "auto"
    tf32: bool = True

    def __post_init__(self) -> None:
        named(OPTIMISERS, self.optimiser, "optimiser")
        self._at_least_one("batch_size", "max_rows")
        for name in ("learning_rate", "epsilon", "clip_decoder", "clip_encoder"):
            value = getattr(self, name)
            if isinstance(value, float | int) and not (value > 0 and math.isfinite(value)):
                raise DohyoError(f"{name} is {value}; it must be positive and finite")
        self.beta1, self.beta2 = float(self.beta1), float(self.beta2)
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise DohyoError("beta1 and beta2 must lie in [0, 1)")

    def _at_least_one(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise DohyoError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass
class LoopConfig(StepConfig):
    """How to train on data; the defaults are the paper's.

    Attributes:
        epochs: The most passes over the training data.
        lr_factor: What the learning rate is multiplied by after `lr_patience` epochs without improvement.
        lr_patience: Epochs without a better validation NLL until then.
        stop_patience: Epochs without a better validation NLL until training stops.
        valid_terms: The validation NLL is by IWAE with this many terms.
        k_seed: Of K alone; null for `seed`. Replicas in one program share the K of their first.
        program: plain, the readable step; captured, the same compiled and on a CUDA GPU recorded whole; auto, captured on a
            CUDA GPU where that is possible. The numbers are the same to rounding.
    """

    epochs: int = 2000
    lr_factor: float = 0.8
    lr_patience: int = 50
    stop_patience: int = 300
    valid_terms: int = 20
    k_seed: int | None = None
    program: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        named(dict.fromkeys(PROGRAMS), self.program, "program")
        self._at_least_one("epochs", "lr_patience", "stop_patience", "valid_terms")
        if not 0 < self.lr_factor < 1:
            raise DohyoError(f"lr_factor is {self.lr_factor}; it must lie strictly between 0 and 1")

    def over(self, progress: Progress) -> bool:
        return progress.stopped or progress.epoch >= self.epochs or progress.stale >= self.stop_patience

    def captured_on(self, device: torch.device) -> bool:
        """Whether the captured step is to be tried."""
        return self.program == "captured" or (self.program == "auto" and device.type == "cuda")

    def rate(self, progress: Progress) -> float:
        return self.learning_rate * self.lr_factor**progress.drops

    def drops(self, progress: Progress) -> bool:
        """Whether the learning rate falls after this epoch."""
        return progress.stale > 0 and progress.stale % self.lr_patience == 0


@dataclass
class DrawsConfig(StepConfig):
    """How to train on draws of the model itself. An epoch is `check_every` steps.

    Attributes:
        steps: How many steps.
        check_every: Steps from one check, record and possible checkpoint to the next.
        max_seconds: The run ends at the first check after so long; null for no limit.
        decay: linear: the learning rate falls to zero over the steps, a little after each check; or none.
        tf32: As for data, but off unless asked for: nobody has measured what it does here.
    """

    steps: int = 10_000
    check_every: int = 500
    max_seconds: float | None = None
    decay: str = "linear"
    tf32: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("steps", "check_every")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise DohyoError(f"max_seconds is {self.max_seconds}; it must be positive, or null for no limit")
        named({"linear": 0, "none": 0}, self.decay, "decay")

    def over(self, progress: Progress) -> bool:
        late = self.max_seconds is not None and progress.seconds >= self.max_seconds
        return progress.stopped or progress.step >= self.steps or late

    def rate(self, progress: Progress) -> float:
        return self.learning_rate * (1 - progress.step / self.steps if self.decay == "linear" else 1.0)

    def drops(self, progress: Progress) -> bool:
        return False
