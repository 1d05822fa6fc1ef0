"""What dropping parts of theta's gradient saves in reverse KL: its variance and its time at a trained model.

The model is the one that `dohyo reverse-kl --estimator multilevel-rr --cost 15` leaves, trained first if it is not there yet (a
few minutes). Run as `python -m benchmarks.reverse_kl`. The learning curves of every estimator are `dohyo reproduce funnel`.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

import dohyo
from dohyo.lab.experiments.reverse_kl import ReverseKLConfig, ReverseKLRun
from dohyo.lab.targets import Funnel
from dohyo.lab.training.processes import launch
from dohyo.objectives import ReverseKL

from benchmarks.weights import environment, save

STEPS = 400


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/reverse_kl"), help="the folder of the run")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    save(options.out / "reverse_kl_paths.json", {"gradients": paths(options.work)} | environment())


if __name__ == "__main__":
    main()
