"""How much longer `import dohyo` takes than `import torch`.

Each is imported in a fresh interpreter, the two in turn and in random order, many times over; the time is that of the
import statement alone, without the start of the interpreter, and what is reported is the median of the ratios of each
round. The goal is at most 1.5. The slowest modules of dohyo's own share are listed from one `python -X importtime`.
"""

import argparse
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.weights import environment, save

GOAL = 1.5
CLOCK = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"


def seconds(module: str) -> float:
    """The time of `import module` in a fresh interpreter."""
    found = subprocess.run([sys.executable, "-c", CLOCK.format(module)], capture_output=True, text=True, check=True)
    return float(found.stdout)


def slowest(count: int = 8) -> list[dict[str, Any]]:
    """The modules that `import dohyo` adds to `import torch`, by the milliseconds of their own."""
    code = "import torch, sys; print('torch done', file=sys.stderr); import dohyo"
    lines = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True).stderr
    _, _, added = lines.partition("torch done")
    rows = [line.removeprefix("import time:").split("|") for line in added.splitlines() if line.startswith("import time:")]
    found: list[dict[str, Any]] = [{"module": name.strip(), "ms": int(own) / 1000} for own, _, name in rows]
    return sorted(found, key=lambda row: -row["ms"])[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    order = random.Random(0)
    times: dict[str, list[float]] = {"torch": [], "dohyo": []}
    for module in times:  # so that neither pays for a cold disk
        seconds(module)
    for _ in range(options.rounds):
        for module in order.sample(sorted(times), 2):
            times[module].append(seconds(module))
    ratios = [a / b for a, b in zip(times["dohyo"], times["torch"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    result: dict[str, Any] = {
        "config": environment() | {"rounds": options.rounds, "seed": 0, "goal": GOAL},
        "ratio": quartiles[1],
        "ratio_quartiles": quartiles,
        "met": quartiles[1] <= GOAL,
        "median_seconds": {module: statistics.median(own) for module, own in times.items()},
        "seconds": times,
        "slowest_beyond_torch": slowest(),
    }
    for module, own in result["median_seconds"].items():
        print(f"import {module:6s} {own:7.3f} s (median of {options.rounds})")
    print(f"ratio {quartiles[1]:.3f} (quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}), goal {GOAL}: {result['met']}")
    save(options.out / "import_time.json", result)


if __name__ == "__main__":
    main()
