"""The numbers of the loop."""

import math
from dataclasses import dataclass


@dataclass
class LoopConfig:
    """How to train; the defaults are the paper's.

    Attributes:
        epochs: The most passes over the training data.
        batch_size: Data in a step, over all processes.
        learning_rate: Of AMSGrad.
        beta1: Of AMSGrad.
        beta2: Of AMSGrad.
        epsilon: Of AMSGrad.
        lr_factor: What the learning rate is multiplied by after `lr_patience` epochs without improvement.
        lr_patience: Epochs without a better validation NLL until then.
        stop_patience: Epochs without a better validation NLL until training stops.
        clip_decoder: The most that the norm of theta's gradient may be; null for no clipping.
        clip_encoder: The most that the norm of phi's gradient may be; null for no clipping.
        valid_terms: The validation NLL is by IWAE with this many terms.
        max_rows: The most rows given to the network at a time in evaluation: this bounds memory.
        checkpoint_seconds: How old the checkpoint may grow before the end of an epoch writes a new one.
        seed: Of everything: parameters, data order, noise and K.
        device: cpu, cuda, mps or auto.
    """

    epochs: int = 2000
    batch_size: int = 100
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-4
    lr_factor: float = 0.8
    lr_patience: int = 50
    stop_patience: int = 300
    clip_decoder: float | None = None
    clip_encoder: float | None = None
    valid_terms: int = 20
    max_rows: int = 2_000
    checkpoint_seconds: float = 5.0
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr_patience", "stop_patience", "valid_terms", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("learning_rate", "epsilon", "clip_decoder", "clip_encoder"):
            value = getattr(self, name)
            if isinstance(value, float | int) and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be positive and finite")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 < self.lr_factor < 1):
            raise ValueError("beta1 and beta2 must lie in [0, 1), lr_factor strictly between 0 and 1")
