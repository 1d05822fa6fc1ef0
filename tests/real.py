"""Real processes, the folders they leave, and the pictures in them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dohyo.lab.folder import read_records
from dohyo.lab.training.state import load_checkpoint


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dohyo", *arguments]


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]


def finished(line: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process that has ended."""
    return subprocess.run(
        line, cwd=folder, capture_output=True, text=True, check=False, timeout=300, env=environment(), **options
    )  # fmt: skip


def kill_until_done(first: list[str], again: list[str], folder: Path, name: str, most: int = 2) -> int:
    """SIGKILL at random times, at most so often, until the run called `name` gets through; returns how often it was killed."""
    generator, kills, line = random.Random(0), 0, first
    while True:
        process = subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment())
        # The start takes most of the time: wait until the run is under way, then strike at a random moment.
        begun, known = time.monotonic(), len(read_records(folder / name))
        while kills < most and process.poll() is None and time.monotonic() - begun < 60:
            if len(read_records(folder / name)) > known:
                break
            time.sleep(0.01)
        try:
            process.wait(generator.uniform(0, 0.3) if kills < most else 120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        assert process.stderr is not None
        error = process.stderr.read()
        process.stderr.close()
        if process.returncode == 0:
            return kills
        assert process.returncode == -signal.SIGKILL, error
        if (folder / name / "config.yaml").exists():
            line = again


def killed_when(ready: Callable[[], bool], line: list[str], folder: Path) -> None:
    """Start a process, and SIGKILL it as soon as `ready`."""
    process = subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    while process.poll() is None and not ready():
        time.sleep(0.002)
    process.kill()
    process.wait()


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if "seconds" not in key}


def same_run(a: Path, b: Path) -> bool:
    """Bit for bit, but for the time they took: parameters, optimiser, noise, the task's own state, records and result."""
    one, two = load_checkpoint(a), load_checkpoint(b)
    tensors = all(torch.equal(one[part][key], two[part][key]) for part in ("model", "best") for key in one[part])
    states = [[state[key] for state in c["optimiser"]["state"].values() for key in state] for c in (one, two)]
    optimiser = all(torch.equal(x, y) for x, y in zip(*states, strict=True))
    noise = all(torch.equal(one["noise"][0][key], two["noise"][0][key]) for key in ("cpu", "depth"))
    tasks, numbers = [[timeless(c["noise"][0]["task"]) for c in (one, two)], [timeless(c["numbers"]) for c in (one, two)]]
    records = [[timeless(record) for record in read_records(folder)] for folder in (a, b)]
    results = [timeless(json.loads((folder / "result.json").read_text())) for folder in (a, b)]
    equal = all(pair[0] == pair[1] for pair in (tasks, numbers, records, results))
    return tensors and optimiser and noise and equal


def picture(path: Path) -> dict[str, Any]:
    """The numbers beside a picture that is one."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    numbers: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return numbers
