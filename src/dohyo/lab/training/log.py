"""metrics.jsonl, always written, and TensorBoard beside it."""

import json
import math
from pathlib import Path
from typing import Any

from dohyo.errors import DohyoError
from dohyo.files import plain, replacing

METRICS = "metrics.jsonl"


class RunLog:
    """One line of JSON for each epoch. Opened at an epoch, it forgets what a killed run wrote beyond it."""

    def __init__(self, folder: Path, epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / METRICS
        kept = [record for record in read_records(folder) if record["epoch"] <= epoch]
        with replacing(self.path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=epoch + 1)

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record)) + "\n")
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
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
            record["epoch"] + 1
        except (ValueError, TypeError, KeyError) as error:
            raise DohyoError(f"{path}: line {number} is not a record of an epoch; remove it") from error
        records.append(record)
    return records
