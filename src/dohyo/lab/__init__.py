"""The laboratory: training runs, experiments, studies, pictures, reports and the command. It needs `dohyo[cli]`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dohyo.lab import bank, data, rewards, targets, training
    from dohyo.lab.data import load
    from dohyo.lab.experiments.fit_target import fit_target
    from dohyo.lab.training import DrawsConfig, LoopConfig, fit, train

__all__ = ["DrawsConfig", "LoopConfig", "bank", "data", "fit", "fit_target", "load", "rewards", "targets", "train", "training"]


def __getattr__(name: str) -> object:
    """Everything is loaded at its first use."""
    if name in ("bank", "data", "rewards", "targets", "training"):
        return import_module(f"dohyo.lab.{name}")
    if name in __all__:
        place = {"load": "data", "fit_target": "experiments.fit_target"}.get(name, "training")
        return getattr(import_module(f"dohyo.lab.{place}"), name)
    raise AttributeError(f"module 'dohyo.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
