"""Policies on quadratic problems: what each reaches, what entropy does, and the paper's figure.

Three parts, each a list of runs in folders of their own, so that a study that was stopped goes on where it was:
`library`, OR-Library's problems with the latent policy, at most so many seconds each (files in $DOHYO_DATA/qubo); `entropy`,
policies with and without entropy regularisation on a random problem as the paper's with 100 variables (NADE
stands for the autoregressive ones, for a GRU would take an hour); `figure`, the paper's figure at 500 variables: every policy
for the same wall-clock time, with and without entropy. Run as `python -m benchmarks.qpbo --part library`.
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from dohyo.experiments.qpbo import QPBOConfig, QPBORun
from dohyo.plots.rewards import plot_reward_curves
from dohyo.training.log import read_records
from dohyo.training.processes import launch

from benchmarks.weights import environment, save

ANNEALED = {"policy": "latent", "epsilon": 1e-8, "entropy_decay": "linear"}
SMALL = ANNEALED | {"estimator": "sumo", "cost": 5.0, "learning_rate": 5e-3, "entropy": 0.02, "steps": 400_000, "restarts": 1000,
                    "check_every": 200}  # fmt: skip
LARGE = ANNEALED | {"estimator": "multilevel-rr", "cost": 8.0, "learning_rate": 1e-3, "entropy": 0.05, "steps": 2500}
POLICIES: dict[str, dict[str, Any]] = {
    "latent, SUMO": {"policy": "latent", "estimator": "sumo"},
    "latent, IWAE": {"policy": "latent", "estimator": "iwae"},
    "independent": {"policy": "independent", "learning_rate": 0.03},
    "NADE": {"policy": "nade"},
    "GRU": {"policy": "gru"},
}
KEPT = ("best_reward", "mean_reward", "best_known", "gap", "seconds", "seconds_per_step", "seconds_to_best", "steps",
        "evaluations")  # fmt: skip


def run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The run's options and result; trained only as far as it is not yet."""
    result = QPBORun(folder, QPBOConfig(device="cpu", **options)).complete(launch("cpu"))
    found = {key: result[key] for key in KEPT}
    print(folder.name, found, flush=True)
    return {"options": {key: v.name if isinstance(v, Path) else v for key, v in options.items()}, "result": found}


def library(work: Path, size: int, seconds: float) -> dict[str, Any]:
    """The problems of one file with the latent policy: small ones in many short trainings, large ones in one."""
    path = Path(os.environ["DOHYO_DATA"]) / "qubo" / f"bqp{size}.txt"
    found = {}
    for index in range(1, 6):
        name = f"bqp{size}.{index} latent"
        own = SMALL if size <= 100 else LARGE
        found[name] = run(work / name.replace(" ", "_"), own | {"instance": path, "index": index, "max_seconds": seconds})
    return found


def entropy(work: Path, count: int) -> dict[str, Any]:
    """Policies with and without entropy, 2,000 steps each, one and the same random problem."""
    found, curves = {}, {}
    for label, options in POLICIES.items():
        if label == "GRU":
            continue
        for weight in (0.0, 0.02):
            both = {"learning_rate": 1e-3, "epsilon": 1e-8, "steps": 2000, "check_every": 50, "variables": 100} | options
            both |= {"entropy": weight, "entropy_decay": "linear"}
            name = f"{label}, entropy {weight}"
            found[name], curves[name] = seeds(work, name, both, count)
    return {"found": found, "curves": curves}


def figure(work: Path, seconds: float, count: int) -> dict[str, Any]:
    """500 variables, every policy for the same time."""
    common = {"learning_rate": 1e-3, "epsilon": 1e-8, "steps": 1_000_000, "check_every": 5, "variables": 500}
    found, curves = {}, {}
    for weight in (0.0, 0.02):
        for label, options in POLICIES.items():
            both = common | options | {"entropy": weight, "max_seconds": seconds}
            name = f"{label}, entropy {weight}"
            found[name], curves[name] = seeds(work, f"500 {label} {weight}", both, count)
    return {"found": found, "curves": curves}


def seeds(work: Path, name: str, options: dict[str, Any], count: int) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Runs with their mean and spread, and their curves."""
    folders = [work / f"{name} seed {seed}".replace(" ", "_").replace(",", "") for seed in range(count)]
    runs = [run(folder, options | {"seed": seed}) for seed, folder in enumerate(folders)]
    found: dict[str, Any] = {"runs": runs}
    for key in ("best_reward", "mean_reward"):
        values = [each["result"][key] for each in runs]
        found |= {f"{key}_mean": statistics.fmean(values), f"{key}_sd": statistics.stdev(values) if count > 1 else None}
    return found, [read_records(folder) for folder in folders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("library", "entropy", "figure"), required=True)
    parser.add_argument("--size", type=int, default=100, help="of the problems of `library`: 50, 100, 250 or 500 variables")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each problem of `library`, each policy of `figure`")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each policy in `entropy` and `figure`")
    parser.add_argument("--work", type=Path, default=Path("runs/qpbo"), help="the folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.part == "library":
        found = library(options.work, options.size, options.seconds)
        save(options.out / f"qpbo_bqp{options.size}.json", {"runs": found} | environment())
        return
    by_time = options.part == "figure"
    made = figure(options.work, options.seconds, options.seeds) if by_time else entropy(options.work, options.seeds)
    name = {"entropy": "qpbo_entropy", "figure": "qpbo_500"}[options.part]
    save(options.out / f"{name}_runs.json", {"runs": made["found"]} | environment())
    plot_reward_curves(made["curves"], options.out / f"{name}_curves.png")


if __name__ == "__main__":
    main()
