"""The training loop, the one loop of all tasks."""

from dohyo.lab.training.config import DrawsConfig, LoopConfig
from dohyo.lab.training.loop import fit, train

__all__ = ["DrawsConfig", "LoopConfig", "fit", "train"]
