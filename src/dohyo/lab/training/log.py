"""metrics.jsonl, which is always written, and TensorBoard's files if TensorBoard is installed."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from dohyo.files import plain, replacing
from dohyo.lab.folder import METRICS, TENSORBOARD, read_records


class RunLog:
    """One line of JSON for each epoch. Opening the log at an epoch drops what a killed run wrote after that epoch."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.path = folder / METRICS
        kept = [record for record in read_records(folder) if record["epoch"] <= epoch]
        with replacing(self.path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        self.writer: Any = None
        with contextlib.suppress(ImportError):  # not installed, or too old
            from torch.utils.tensorboard import SummaryWriter

            # A Ctrl-C inside its queue may lose the word that it is closed, and closing then waits for the next flush.
            self.writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=epoch + 1, flush_secs=2)

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record)) + "\n")
        for name, value in record.items() if self.writer is not None else ():
            if isinstance(value, float) and math.isfinite(value):
                self.writer.add_scalar(name, value, record["epoch"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
