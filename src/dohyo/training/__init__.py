"""The training loop, the one loop of all tasks."""

from dohyo.training.config import DrawsConfig, LoopConfig
from dohyo.training.loop import fit, train

__all__ = ["DrawsConfig", "LoopConfig", "fit", "train"]
