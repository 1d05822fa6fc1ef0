"""Reverse KL on a CPU: what dropping parts of theta's gradient saves, and what compiling the step does.

The first, variance and time of the gradient, is measured at the model that `dohyo reverse-kl --estimator multilevel-rr --cost 15`
leaves, which is trained first if it is not there yet (a few minutes). The second, `--only programs`, times steps of
`--program plain` and `captured` on one thread, in turns, and how long the first 100 captured steps take, compiling included.
Run as `python -m benchmarks.reverse_kl`. The learning curves of every estimator are `dohyo reproduce funnel`.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dohyo
from dohyo.lab.experiments.reverse_kl import ReverseKLConfig, ReverseKLRun, TowardsTarget
from dohyo.lab.targets import Funnel
from dohyo.lab.training.config import ProgramName
from dohyo.lab.training.loop import train
from dohyo.lab.training.processes import launch
from dohyo.models import GaussianLVM
from dohyo.objectives import ReverseKL

from benchmarks.weights import environment, save

STEPS = 400
COMPARED = {"sumo": (5, 15, 50), "multilevel-rr": (5, 15, 50), "symmetric-sumo": (5,)}
EVERY, ROUNDS = 100, 8
PROGRAMS: tuple[ProgramName, ...] = ("plain", "captured")


def paths(folder: Path) -> dict[str, Any]:
    """Variance (trace of the covariance) and time of theta's gradient for each set of paths, at a trained model."""
    run = ReverseKLRun(folder, ReverseKLConfig(device="cpu", estimator="multilevel-rr", cost=15, steps=10_000))
    run.complete(launch("cpu"))
    model: Any = run.trained()
    theta, found = list(model.decoder_parameters()), {}
    for encoder in ("sleep", "iwae"):
        for kept in ("all", "x", "decoder"):
            objective = ReverseKL(dohyo.MultilevelRR.at_cost(15), Funnel(), encoder, paths=kept)
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(1)
            gradients, begin = [], time.process_time()
            for _ in range(STEPS):
                loss = objective(model, torch.arange(100), generator).loss
                parts = torch.autograd.grad(loss, theta)
                gradients.append(torch.cat([part.flatten() for part in parts]))
            seconds = (time.process_time() - begin) / STEPS
            every = torch.stack(gradients)
            variance = float(every.var(0).sum())
            eighths = [float(part.var(0).sum()) for part in every.chunk(8)]
            found[f"{encoder}, {kept}"] = {"variance": variance, "variance_of_eighths": eighths, "seconds": seconds}
            print(encoder, kept, variance, seconds, flush=True)
    return found


def programs() -> list[dict[str, Any]]:
    """Milliseconds of a step of both programs, the medians over rounds of `EVERY` steps that take turns."""
    found = []
    for name, costs in COMPARED.items():
        for cost in costs:
            runs, ready, times = {}, 0.0, dict[str, list[float]](plain=[], captured=[])
            for program in PROGRAMS:
                config = ReverseKLConfig(
                    device="cpu", program=program, estimator=name, cost=cost, steps=(ROUNDS + 1) * EVERY, check_every=EVERY,
                    check_draws=25, check_terms=10, on_divergence="continue",
                )  # fmt: skip
                torch.manual_seed(0)
                objective = config.objective(Funnel())
                model, task = GaussianLVM(2, config.hidden, config.latent), TowardsTarget(Funnel(), objective)
                runs[program], begin = train(model, task, objective, config), time.perf_counter()
                next(runs[program])
                ready = time.perf_counter() - begin  # of the last, the captured one
            for _ in range(ROUNDS):
                for program, run in runs.items():
                    begin = time.perf_counter()
                    next(run)
                    times[program].append((time.perf_counter() - begin) / EVERY)
            medians = {f"{program}_milliseconds": 1000 * statistics.median(own) for program, own in times.items()}
            found.append({"estimator": name, "cost": cost, **medians, "first_captured_seconds": ready})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/reverse_kl"), help="the folder of the run")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    parser.add_argument("--only", choices=("paths", "programs"))
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.only != "programs":
        save(options.out / "reverse_kl_paths.json", {"gradients": paths(options.work)} | environment())
    if options.only != "paths":
        with tempfile.TemporaryDirectory() as cache:  # of the compiler: earlier work has filled its own
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            save(options.out / "reverse_kl_programs.json", {"programs": programs()} | environment())


if __name__ == "__main__":
    main()
