"""SIGKILL at random moments, from the start of the process to the last picture: 0 different bits, 0 leftovers.

DOHYO_KILLS sets how many in all, 200 by default.
"""

import json
import os
import random
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import real
from attack.arena import SMALL, contents

KILLS = int(os.environ.get("DOHYO_KILLS", "200"))
RUNS = {
    "train": ["train", *SMALL, "--epochs", "6", "--checkpoint-seconds", "0"],
    "replicas": ["train", *SMALL, "--epochs", "4", "--replicas", "2", "--checkpoint-seconds", "0"],
    "reverse-kl": shlex.split("reverse-kl --target funnel --estimator iwae --cost 3 --hidden 8 --latent 2 --steps 30 "
                              "--check-every 10 --check-draws 50 --test-draws 100 --checkpoint-seconds 0 --device cpu"),
    "qpbo": shlex.split("qpbo --variables 9 --policy latent --hidden 8 --latent 2 --steps 40 --check-every 9 "
                        "--checkpoint-seconds 0 --device cpu"),
    "reproduce": shlex.split("reproduce convergence --scale smoke --trials 2 --device cpu"),
}  # fmt: skip


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(part) for key, part in value.items() if "seconds" not in key}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def same(command: str, a: Path, b: Path) -> bool:
    if command == "reproduce":
        one, two = (timeless(json.loads((folder / "study.json").read_text())) for folder in (a, b))
        return one == two and {path.name for path in a.glob("*.*")} == {path.name for path in b.glob("*.*")}
    if command == "replicas":
        results = [timeless(json.loads((folder / "result.json").read_text())) for folder in (a, b)]
        return results[0] == results[1]
    return real.same_run(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_killed_again_and_again(command: str, tmp_path: Path) -> None:
    line, chance = RUNS[command], random.Random(command)
    assert real.finished(real.command(*line, "--out", "warm"), tmp_path).returncode == 0  # loads what is slow to load
    begun = time.monotonic()
    assert real.finished(real.command(*line, "--out", "alone"), tmp_path).returncode == 0
    usual, kills, through, share = time.monotonic() - begun, 0, 0, max(1, KILLS // len(RUNS))
    folder, error = tmp_path / "killed0", tmp_path / "error"
    while kills < share or not through:
        resumed = command != "reproduce" and (folder / "config.yaml").exists()
        again = [line[0], "--resume", folder.name] if resumed else [*line, "--out", folder.name]
        process = real.started(real.command(*again), tmp_path, error=error)
        process.join(chance.uniform(0, 1.1 * usual) if kills < share else 300)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), error.read_text()
        if process.exitcode == 0:  # it got through: compare, and begin anew
            assert same(command, folder, tmp_path / "alone")
            assert not [name for name in contents(folder) if Path(name).name.startswith(".dohyo-")]
            through += 1
            folder = tmp_path / f"killed{through}"
    print(f"{command}: {kills} kills, {through} runs that got through, {usual:.1f} s each alone")
