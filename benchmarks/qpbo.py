"""What the latent policy reaches on OR-Library's quadratic problems, in at most so many seconds each; or, with --plain, how soon
`dohyo qpbo --instance FILE --index I` and nothing else comes close to the best known values.

Each run has a folder of its own and goes on where it was stopped. The files are in $DOHYO_DATA/qubo. Run as
`python -m benchmarks.qpbo --size 100`. The policies side by side, with and without entropy, are `dohyo reproduce qpbo`.
"""

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dohyo.lab.experiments.qpbo import QPBOConfig, QPBORun
from dohyo.lab.training.processes import launch

from benchmarks.weights import environment, save

ANNEALED = {"policy": "latent", "epsilon": 1e-8, "entropy_decay": "linear"}
SMALL = ANNEALED | {"estimator": "sumo", "cost": 5.0, "learning_rate": 5e-3, "entropy": 0.02, "steps": 400_000, "restarts": 1000,
                    "check_every": 200}  # fmt: skip
LARGE = ANNEALED | {"estimator": "multilevel-rr", "cost": 8.0, "learning_rate": 1e-3, "entropy": 0.05, "steps": 2500}
KEPT = ("best_reward", "mean_reward", "best_known", "gap", "seconds", "seconds_per_step", "seconds_to_best", "steps",
        "evaluations")  # fmt: skip


def run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The run's options and result; trained only as far as it is not yet."""
    result = QPBORun(folder, QPBOConfig(device="cpu", **options)).complete(launch("cpu"))
    found = {key: result[key] for key in KEPT}
    print(folder.name, found, flush=True)
    return {"options": {key: v.name if isinstance(v, Path) else v for key, v in options.items()}, "result": found}


def library(work: Path, size: int, seconds: float) -> dict[str, Any]:
    """The problems of one file: small ones in many short trainings, large ones in one."""
    path = Path(os.environ["DOHYO_DATA"]) / "qubo" / f"bqp{size}.txt"
    own, found = SMALL if size <= 100 else LARGE, {}
    for index in range(1, 6):
        name = f"bqp{size}.{index} latent"
        found[name] = run(work / name.replace(" ", "_"), own | {"instance": path, "index": index, "max_seconds": seconds})
    return found


class _Close(Exception):  # noqa: N818
    pass


def plain(size: int, index: int, seed: int, gap: float) -> dict[str, Any]:
    """The plain command's run, ended at the first check within the gap: its steps, and seconds of processor and clock."""
    path = Path(os.environ["DOHYO_DATA"]) / "qubo" / f"bqp{size}.txt"
    found: dict[str, Any] = {}
    cpu, clock = time.process_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        own = QPBORun(Path(folder), QPBOConfig(instance=path, index=index, seed=seed, device="cpu"))
        known = own.problem.maximum or 0

        def on_epoch(record: dict[str, Any]) -> None:
            found.update(step=record["step"], gap=1 - record["best_reward"] / known)
            if found["gap"] <= gap:
                raise _Close

        with contextlib.suppress(_Close):
            own.train(launch("cpu"), on_epoch)
    found |= {"steps_in_all": own.config.steps, "cpu_seconds": time.process_time() - cpu, "seconds": time.monotonic() - clock}
    print(size, index, seed, found, flush=True)
    return {"size": size, "index": index, "seed": seed, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=100, help="of the problems: 50, 100, 250 or 500 variables")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each problem")
    parser.add_argument("--plain", type=float, help="a gap, 0.005 say: the plain command until then, on 100 and 500 variables")
    parser.add_argument("--work", type=Path, default=Path("runs/qpbo"), help="the folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.plain is not None:
        cases = [(size, index, seed) for size in (100, 500) for index in range(1, 6) for seed in (0, 1)]
        runs = [plain(*case, options.plain) for case in cases]
        save(options.out / "qpbo_plain.json", {"gap": options.plain, "runs": runs} | environment())
        return
    found = library(options.work, options.size, options.seconds)
    save(options.out / f"qpbo_bqp{options.size}.json", {"runs": found} | environment())


if __name__ == "__main__":
    main()
