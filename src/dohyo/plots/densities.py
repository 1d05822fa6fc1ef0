"""Pictures of a model beside the density it was fitted to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_density_run(target: Any, draws: Any, records: Sequence[dict[str, Any]], model: Any, folder: Path) -> None:
    pass
