"""SIGKILL at random moments, from the start of the process to the last picture: 0 different bits, 0 leftovers.

DOHYO_KILLS sets how many in all, 200 by default; DOHYO_SEED which ones.
"""

import json
import os
import random
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import real
from attack.arena import SMALL, contents

KILLS = int(os.environ.get("DOHYO_KILLS", "200"))
RUNS = {
    "train": ["train", *SMALL, "--epochs", "12", "--checkpoint-seconds", "0"],
    "replicas": ["train", *SMALL, "--epochs", "8", "--replicas", "2", "--checkpoint-seconds", "0"],
    "reverse-kl": shlex.split("reverse-kl --target funnel --estimator iwae --cost 3 --hidden 8 --latent 2 --steps 30 "
                              "--check-every 10 --check-draws 50 --test-draws 100 --checkpoint-seconds 0 --device cpu"),
    "qpbo": shlex.split("qpbo --variables 9 --policy latent --hidden 8 --latent 2 --steps 40 --check-every 9 "
                        "--checkpoint-seconds 0 --device cpu"),
    "reproduce": shlex.split("reproduce convergence --scale smoke --trials 2 --device cpu"),
}  # fmt: skip


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(part) for key, part in value.items() if "seconds" not in str(key)}
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    return [timeless(part) for part in value] if isinstance(value, list | tuple) else value


def read(path: Path) -> Any:
    """What a file says, without the time that it took."""
    if path.suffix == ".json":
        return timeless(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [timeless(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".pt":
        return timeless(torch.load(path, weights_only=True))
    if path.suffix == ".npz":
        return {name: array.tobytes() for name, array in np.load(path).items() if name != "about"}  # which holds the time
    return path.read_bytes()


def different(a: Path, b: Path, command: str) -> list[str]:
    """The files of a that b has not, or has with other bits, and the reverse."""
    one, two = (
        {name for name, kind in contents(folder).items() if kind != "folder" and "tfevents" not in name} for folder in (a, b)
    )
    timed = {name for name in one & two if name.endswith(".svg") or (command == "qpbo" and name == "learning_curves.png")}
    return sorted(one ^ two) + sorted(name for name in one & two - timed if read(a / name) != read(b / name))


def progress(folder: Path) -> int:
    """Rises with every epoch and every cell."""
    return sum(path.stat().st_size for path in folder.rglob("metrics.jsonl")) + len(list(folder.glob("cells/*.json")))


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_killed_again_and_again(command: str, tmp_path: Path) -> None:
    line, chance = RUNS[command], random.Random(command + os.environ.get("DOHYO_SEED", ""))
    for name in ("warm", "alone"):  # the first loads what is slow to load
        begun = time.monotonic()
        assert real.finished(real.command(*line, "--out", name), tmp_path, drawn=True).returncode == 0
        usual = time.monotonic() - begun
    assert different(tmp_path / "warm", tmp_path / "alone", command) == []
    kills, through, share, ended = 0, 0, max(1, KILLS // len(RUNS)), False
    folder, error = tmp_path / "killed0", tmp_path / "error"
    while kills < share or not ended:
        resumed = command != "reproduce" and (folder / "config.yaml").exists()
        again = [line[0], "--resume", folder.name] if resumed else [*line, "--out", folder.name]
        begun = time.monotonic()
        process = real.started(real.command(*again), tmp_path, error=error, drawn=True)
        if kills < share and chance.random() < 0.5:  # most of a small run is start and pictures, so every second one is hit later
            known = progress(folder)
            while process.is_alive() and progress(folder) <= known:
                time.sleep(0.005)
            process.join(chance.uniform(0, usual / 8))
        else:
            process.join(chance.uniform(0, 1.1 * usual) if kills < share else 300)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        took = time.monotonic() - begun
        assert process.exitcode in (0, -signal.SIGKILL), error.read_text()
        ended = process.exitcode == 0
        if ended:  # it got through: compare, and begin anew
            assert different(folder, tmp_path / "alone", command) == []
            through += 1
            usual = usual if resumed else took  # other programs may make it longer or shorter
            folder = tmp_path / f"killed{through}"
            print(f"{command}: {kills} kills, {through} runs that got through, {usual:.1f} s each alone", flush=True)
