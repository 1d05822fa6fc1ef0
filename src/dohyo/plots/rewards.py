"""Pictures of what a policy earns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_reward_curves(runs: Mapping[str, Sequence[dict[str, Any]]], path: Path, best_known: float | None = None) -> None:
    pass
