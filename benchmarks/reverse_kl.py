"""What a bound does to reverse KL, and what an unbiased estimate does: the paper's experiment on the funnel, in an hour or two.

Three parts, each a list of runs in folders of their own, so that a study that was stopped goes on where it was:
`defaults`, the unbiased estimators at cost 15 with the command's defaults, three seeds; `curves`, every estimator at costs 5,
15 and 50 (and minimax IWAE at 200), 3,000 or 1,500 steps, one seed, none stopped where it diverges; `paths`, what dropping
parts of the gradient saves, as the variance and the time of theta's gradient at a trained model. Run as
`python -m benchmarks.reverse_kl`; --part names one.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

import dohyo
from dohyo.experiments.reverse_kl import ReverseKLConfig, ReverseKLRun
from dohyo.models import GaussianLVM
from dohyo.objectives import reverse_kl
from dohyo.plots.densities import plot_density_comparison
from dohyo.plots.divergence import Curve, plot_reverse_kl_curves
from dohyo.targets import Funnel
from dohyo.training.log import read_records
from dohyo.training.processes import launch
from dohyo.training.state import load_checkpoint

from benchmarks.weights import environment, save

RECORDED = ("step", "estimate", "estimate_stderr", "objective", "reverse_kl", "stderr", "by_encoder", "by_prior", "above",
            "diverged", "seconds")  # fmt: skip


def curve_runs() -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    for cost in (5, 15, 50):
        for label, options in {
            "ELBO": {"estimator": "elbo"},
            "IWAE": {"estimator": "iwae"},
            "minimax IWAE": {"estimator": "iwae", "encoder": "iwae"},
            "SUMO": {"estimator": "sumo"},
            "SymmetricSUMO": {"estimator": "symmetric-sumo"},
            "MultilevelRR": {"estimator": "multilevel-rr"},
        }.items():
            runs[f"{label} {cost}"] = {**options, "cost": cost}
    runs["minimax IWAE 200"] = {"estimator": "iwae", "encoder": "iwae", "cost": 200}
    common = {"check_every": 250, "on_divergence": "continue"}
    return {name: {**common, "steps": 3000 if options["cost"] < 50 else 1500, **options} for name, options in runs.items()}


def default_runs() -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {"sumo 20000": {"estimator": "sumo", "cost": 15, "seed": 0, "steps": 20_000}}
    for seed in (0, 1, 2):
        for name in ("sumo", "multilevel-rr", "symmetric-sumo"):
            runs[f"{name} seed {seed}"] = {"estimator": name, "cost": 15, "seed": seed, "steps": 10_000}
    return runs


def run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The run's result and its curve; trained only as far as it is not yet."""
    result = ReverseKLRun(folder, ReverseKLConfig(device="cpu", **options)).complete(launch("cpu"))
    curve = [{key: record[key] for key in RECORDED} for record in read_records(folder)]
    return {"options": options, "result": result, "curve": curve}


def collect(runs: dict[str, dict[str, Any]], work: Path) -> dict[str, Any]:
    done = {}
    for name, options in runs.items():
        done[name] = run(work / name.replace(" ", "_"), options)
        result = done[name]["result"]
        keys = ("reverse_kl", "reverse_kl_stderr", "training_estimate", "training_estimate_stderr", "diverged", "seconds")
        print(name, {key: result[key] for key in keys}, flush=True)
    return done


def paths(work: Path) -> dict[str, Any]:
    """Variance (trace of the covariance) and time of theta's gradient for each set of paths, at a trained model."""
    model = GaussianLVM()
    model.load_state_dict(load_checkpoint(work / "multilevel-rr_seed_0")["best"])
    theta, found = list(model.decoder_parameters()), {}
    for encoder in ("sleep", "iwae"):
        for kept in ("all", "x", "decoder"):
            objective = reverse_kl(dohyo.MultilevelRR.at_cost(15), Funnel(), encoder, paths=kept)
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(1)
            gradients, begin = [], time.process_time()
            for _ in range(400):
                losses = objective(model, torch.arange(100), generator)
                parts = torch.autograd.grad(losses.theta, theta)
                gradients.append(torch.cat([part.flatten() for part in parts]))
            seconds = (time.process_time() - begin) / 400
            every = torch.stack(gradients)
            variance = float(every.var(0).sum())
            half = [float(part.var(0).sum()) for part in every.chunk(8)]
            found[f"{encoder}, {kept}"] = {"variance": variance, "variance_of_eighths": half, "seconds": seconds}
            print(encoder, kept, variance, seconds, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("defaults", "curves", "paths"), action="append", help="by default all three")
    parser.add_argument("--work", type=Path, default=Path("runs/reverse_kl"), help="the folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    wanted = options.part or ["defaults", "curves", "paths"]
    if "defaults" in wanted:
        save(options.out / "funnel_defaults.json", {"runs": collect(default_runs(), options.work)} | environment())
    if "curves" in wanted:
        runs = collect(curve_runs(), options.work)
        save(options.out / "funnel_runs.json", {"runs": runs} | environment())
        draw(runs, options.work, options.out)
    if "paths" in wanted:
        save(options.out / "reverse_kl_paths.json", {"gradients": paths(options.work)} | environment())


def draw(runs: dict[str, Any], work: Path, out: Path) -> None:
    curves = [Curve(name.rsplit(" ", 1)[0], each["options"]["cost"], each["curve"]) for name, each in runs.items()]
    plot_reverse_kl_curves(curves, out / "funnel_curves.png")
    models = {}
    for title, folder in {"IWAE, cost 15": "IWAE_15", "SUMO, cost 15": "sumo_20000"}.items():
        if (work / folder / "checkpoint.pt").exists():
            models[title] = GaussianLVM()
            models[title].load_state_dict(load_checkpoint(work / folder)["best"])
    plot_density_comparison(Funnel(), models, out / "funnel_densities.png")


if __name__ == "__main__":
    main()
