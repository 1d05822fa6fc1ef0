"""From which share of the training on should theta follow chains, after IWAE on few samples of the encoder? At equal time, on a
core each; or, with `--epochs 20 --samples 14`, in equal epochs at about as many passes through the decoder.

Every row begins with the same parameters for a seed. By our recipe the rate falls along one cosine over the whole training. In
rows of two stages, for equal epochs alone, it is constant at first, and falls in the last quarter, which begins with the best
parameters so far: the row `chains` of table 1, and IWAE trained just so. Test NLL by annealed weights, and by IWAE.
"""

import argparse
import multiprocessing
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

import dohyo
from dohyo.lab import LoopConfig, fit
from dohyo.lab.data import load
from dohyo.lab.training import chains as turn
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood

from benchmarks.weights import environment, save

SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
STAGES = ("two stages, samples", "two stages, then chains")
SIZES = {"mnist": (784, 200, 50), "omniglot": (784, 200, 50), "digits": (64, 64, 16)}
TERMS, STEPS, WEIGHTS = 500, 16, 64  # of IWAE; of the chains that all models are tested by, and their number
MOST = 64  # chains of an unbiased estimator


def trained(name: str, data: Any, options: argparse.Namespace, seed: int) -> tuple[VAE, list[dict[str, Any]]]:
    """The model of one row and seed, and the records of its epochs."""
    records: list[dict[str, Any]] = []
    size, hidden, latent = SIZES[options.data]
    torch.manual_seed(seed)
    model = VAE(data=size, hidden=hidden, latent=latent)
    model.start_from(data.train)
    through = dohyo.Annealed(model, options.steps)
    over = dohyo.MultilevelRR.at_cost(options.chains, MOST) if options.unbiased else dohyo.IWAE(options.chains)
    chains = MaximumLikelihood(over, "dreg")
    turn.SAMPLES = options.samples
    samples, epochs = turn.by_samples(chains, options.steps), options.epochs or 10**9
    common: dict[str, Any] = {"recipe": "ours", "average": 0, "clip_decoder": 10.0, "clip_encoder": 125.0, "device": "cpu"}
    common["max_seconds"] = None if options.epochs else options.seconds

    def run(module: Any, objective: Any, length: int, seed: int, **changes: Any) -> None:
        config = LoopConfig(epochs=length, seed=seed, **common | changes)
        records.extend(fit(module, data, objective, config))

    if name in STAGES:
        last = max(1, epochs // 4)
        run(model, samples, epochs - last, seed, learning_rate=1e-3, schedule="plateau", lr_patience=10**9, stop_patience=10**9)
        module, objective = (through, chains) if name == STAGES[1] else (model, samples)
        run(module, objective, last, seed + 1000, learning_rate=1e-3)
    elif float(name) == 1.0:
        run(model, samples, epochs, seed)
    else:
        run(through, chains, epochs, seed, anneal_from=float(name))
    return model, records


def measured(job: tuple[str, int, argparse.Namespace]) -> dict[str, Any]:
    """One run, and its test NLL."""
    name, seed, options = job
    torch.set_num_threads(1)
    data = load(options.data, seed=0).flat()
    begin = time.perf_counter()
    model, records = trained(name, data, options, seed)
    seconds, x = time.perf_counter() - begin, data.test[: options.images]
    annealed = dohyo.Annealed(model, STEPS)
    annealed.tune(x, iterations=100, mixing=False, seed=0)
    values = dohyo.evaluate(annealed, x, dohyo.IWAE(WEIGHTS), khat_data=64, seed=0)
    bound = dohyo.evaluate(model, x, dohyo.IWAE(TERMS), khat_samples=0, seed=0)
    heavy = float((values.khat > 0.7).double().mean())
    return {
        "row": name, "seed": seed, "epochs": len(records), "seconds": seconds,
        "nll_annealed": -values.mean, "nll_iwae": -bound.mean,
        "khat_above_0.7": heavy, "of_images": [round(-value, 3) for value in values.per_datum.tolist()],
    }  # fmt: skip


def joined(runs: list[dict[str, Any]], base: str) -> dict[str, Any]:
    """Means of each row, and its difference from the row of samples, paired by seeds and by images."""
    rows: dict[str, Any] = {}
    for name in dict.fromkeys(run["row"] for run in runs):
        own = {run["seed"]: run for run in runs if run["row"] == name}
        beside = {run["seed"]: run for run in runs if run["row"] == base}
        keys = ("nll_annealed", "nll_iwae", "epochs", "seconds", "khat_above_0.7")
        rows[name] = {key: statistics.fmean(run[key] for run in own.values()) for key in keys}
        common = sorted(own.keys() & beside.keys())
        less = [own[seed]["nll_annealed"] - beside[seed]["nll_annealed"] for seed in common]
        if name != base and len(common) > 1:
            pairs = [zip(own[seed]["of_images"], beside[seed]["of_images"], strict=True) for seed in common]
            of_images = [statistics.fmean(each) for each in zip(*([a - b for a, b in pair] for pair in pairs), strict=True)]
            errors = [statistics.stdev(values) / len(values) ** 0.5 for values in (less, of_images)]
            rows[name]["less_samples"] = [statistics.fmean(less), *errors]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=list(SIZES), default="mnist")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=300)
    length.add_argument("--epochs", type=int, help="in place of seconds")
    parser.add_argument("--samples", type=int, default=turn.SAMPLES, help="of the encoder, at most, before chains")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--unbiased", action="store_true", help="MultilevelRR over so many chains on average, in place of IWAE")
    parser.add_argument("--steps", type=int, default=8, help="leapfrogs of a chain")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=500, help="test images")
    parser.add_argument("--rows", nargs="+", choices=[*map(str, SHARES), *STAGES], help="all, the two stages for epochs alone")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    rows = options.rows or [*map(str, SHARES), *(STAGES if options.epochs else ())]
    if options.epochs is None and set(rows) & set(STAGES):
        parser.error("rows of two stages have their lengths in epochs; give --epochs 20")
    jobs = [(name, seed, options) for seed, name in product(range(options.seeds), rows)]
    config = environment() | {key: value for key, value in vars(options).items() if key not in ("out", "rows")}
    file = f"chain_start_{options.data}" + ("" if options.epochs else f"_{options.seconds:.4g}s")
    file += "_unbiased" * options.unbiased
    config |= {"test_terms": TERMS, "test_steps": STEPS, "test_weights": WEIGHTS}
    runs: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for run in pool.imap(measured, jobs):
            runs.append(run)
            print({key: value for key, value in run.items() if key != "of_images"}, flush=True)
            kept = [{key: value for key, value in one.items() if key != "of_images"} for one in runs]
            save(options.out / f"{file}.json", {"config": config, "rows": joined(runs, "1.0"), "runs": kept})


if __name__ == "__main__":
    main()
