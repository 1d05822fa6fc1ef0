"""The test NLL of finished cells of `table1 --scale paper` by annealed weights, in files that `full_length` reads.

    python -m benchmarks.full_length_annealed CELLS/mnist_015_iwae CELLS/mnist_015_sumo --out mnist_015.json

For each replica chains are tuned on some of the test images, with noise of another seed, and the log-mean of their weights is
taken for every test image. A model that the file holds already is left alone. About 15 s for each model on an H200.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import dohyo
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.folder import WORK, write_json
from dohyo.lab.training.state import load_checkpoint

SETTINGS = {"images": 10_000, "weights": 64, "steps": 48, "tune": 100, "iterations": 100, "batch": 1000, "khat": 64, "seed": 0}


def annealed_nll(run: DensityRun, device: str, settings: dict[str, int]) -> dict[str, Any]:
    """The NLL of a run's best parameters, by images and in the mean, with what `full_length` needs to know of the run."""
    begin, x = time.perf_counter(), run.data.test[: settings["images"]].to(device)
    annealed = dohyo.Annealed(run.trained().to(device).eval(), settings["steps"])  # type: ignore[arg-type]
    annealed.tune(x[: settings["tune"]], iterations=settings["iterations"], seed=settings["seed"], mixing=False)
    tuned = time.perf_counter()
    found = dohyo.evaluate(
        annealed,
        x,
        dohyo.IWAE(settings["weights"]),
        khat_data=settings["khat"],
        batch_size=settings["batch"],
        seed=settings["seed"],
    )
    numbers = load_checkpoint(run.folder)["numbers"]
    return {
        "nll": -found.mean,
        "stderr": found.stderr,
        "lost": annealed.lost,
        "khat": found.to_dict()["khat"],
        "nll_per_image": (-found.per_datum).tolist(),
        "numbers": {"epoch": numbers["epoch"], "best_epoch": numbers["best_epoch"]},
        "seconds": {"tuning": tuned - begin, "evaluation": time.perf_counter() - tuned},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, nargs="+", help="folders of one cell each, named by it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, or to add models to")
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args(arguments))
    cells, device, out = options.pop("cells"), options.pop("device"), options.pop("out")
    models = json.loads(out.read_text(encoding="utf-8"))["models"] if out.exists() else {}
    for folder in cells:
        run = DensityRun.open(folder / WORK / folder.name)
        for place, replica in enumerate(run.replicas):
            if (name := f"{folder.name}.{place}") not in models:
                models[name] = annealed_nll(replica, device, options)
                write_json(out, {"options": {**options, "data": run.config.data, "device": device}, "models": models})
                print(f"{name}: {models[name]['nll']:.3f}, {models[name]['seconds']}", flush=True)


if __name__ == "__main__":
    main()
