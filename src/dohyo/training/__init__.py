"""The training loop, the one loop of all tasks."""

from dohyo.training.config import LoopConfig
from dohyo.training.loop import fit

__all__ = ["LoopConfig", "fit"]
