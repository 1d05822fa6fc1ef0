"""The training loop, shared by all tasks."""

from dohyo.lab.training.config import DrawsConfig, LoopConfig
from dohyo.lab.training.loop import fit, train

__all__ = ["DrawsConfig", "LoopConfig", "fit", "train"]
