"""metrics.jsonl, always written, and TensorBoard beside it."""

import json
import math
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class RunLog:
    """One line of JSON for each epoch. Opened at an epoch, it forgets what a killed run wrote beyond it."""

    def __init__(self, folder: Path, epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / METRICS
        kept = [record for record in read_records(folder) if record["epoch"] <= epoch]
        self.path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=epoch + 1)

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if isinstance(value, float) and math.isfinite(value):
                self.writer.add_scalar(name, value, record["epoch"])

    def close(self) -> None:
        self.writer.close()


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run so far; a last line that a kill cut short is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
