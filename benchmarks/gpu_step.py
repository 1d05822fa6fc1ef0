"""Microseconds of a captured training step on a CUDA GPU: IWAE and SUMO at costs 5, 15 and 50 with 1, 3 and 8 replicas.

The paper's VAE, batch 100, AMSGrad, clipping; data, binarisation, the backward pass and the optimiser are in the step. SUMO
has the DReG encoder; beside plain IWAE stands IWAE with the DReG encoder. Whole
epochs are timed between two synchronisations, after one that compiles, and after every number of log-weights that 10,000 steps
ask for has been recorded, as in a long run; the median of `--epochs` is given. Each kind has a process of its own: they get ready
at the same time (so `ready_seconds` is no measure of a run alone), and are then timed one after the other, alone on the card.
Beside it stand the plain step, the kernels that a step launches, what the card copies and multiplies at best, and the time that
the step's matrix products would take at that rate (in TF32, the default of training); and the seconds of a test: IWAE-5000 of
10,000 images with three models, in single precision. The images are random: nothing here depends on what they show.
"""

import argparse
import contextlib
import dataclasses
import os
import queue
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dohyo
from dohyo.contract import split
from dohyo.lab.data import Dataset
from dohyo.lab.fast.programs import Program, choose
from dohyo.lab.fast.together import train_epoch
from dohyo.lab.training.config import LoopConfig, ProgramName
from dohyo.lab.training.loop import Training
from dohyo.lab.training.loop import train_epoch as plain_epoch
from dohyo.lab.training.processes import launch
from dohyo.lab.training.tasks import Batches, OnData
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood

from benchmarks.weights import environment, save

GOALS = {5: 300, 15: 400, 50: 700}  # microseconds of IWAE by cost, with 3 replicas
OBJECTIVES: dict[str, tuple[Any, str]] = {
    "iwae": (dohyo.IWAE, "same"),
    "iwae+dreg": (dohyo.IWAE, "dreg"),
    "sumo": (dohyo.SUMO, "dreg"),
}
STEPS, BATCH = 500, 100


def ceilings(device: torch.device) -> dict[str, float]:
    """What the card does at best: bytes read and written a second in a copy, operations in a large matrix product."""
    source = torch.rand(2**28, device=device)
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device=device)
    found = {"copy_bytes_per_second": 2 * source.nbytes / seconds(lambda: target.copy_(source))}
    for name, precision in (("float32", "highest"), ("tf32", "high")):
        torch.set_float32_matmul_precision(precision)
        found[f"{name}_operations_per_second"] = 2 * 8192**3 / seconds(lambda: torch.mm(a, a))
    torch.set_float32_matmul_precision("highest")
    return found


def seconds(work: Any, repeats: int = 10) -> float:
    """The median of device events around single calls."""
    found: list[float] = []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1000)
    return statistics.median(found[3:])


def evaluation(device: torch.device) -> dict[str, float]:
    """The test of three replicas, after a small one that wakes the card up."""
    test, terms, models = images().train[:10_000].round().to(device), 5000, [VAE().to(device) for _ in range(3)]
    dohyo.evaluate(models[0], test[:100], dohyo.IWAE(terms))
    start = time.perf_counter()
    for model in models:
        dohyo.evaluate(model, test, dohyo.IWAE(terms))
    return {"images": len(test), "terms": terms, "models": len(models), "seconds": time.perf_counter() - start}


def images() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    grey = torch.rand(STEPS * BATCH, 784, generator=generator)
    return Dataset("random", grey, grey[:100].round(), grey[:100].round(), "grey", (28, 28))


def prepared(name: str, cost: int, replicas: int, data: Dataset, program: ProgramName) -> tuple[Program, list[Training], Any]:
    fabric = launch("cuda")
    estimator, encoder = OBJECTIVES[name]
    objective = MaximumLikelihood(estimator.at_cost(cost), encoder)  # type: ignore[arg-type]
    config = LoopConfig(batch_size=BATCH, clip_decoder=20.0, clip_encoder=125.0, program=program, k_seed=0, device="cuda")
    task, runs = OnData(data), []
    choice = choose([VAE()], task, objective, config, fabric)
    for seed in range(replicas):
        torch.manual_seed(seed)
        runs.append(Training(VAE(), task, objective, dataclasses.replace(config, seed=seed), None, fabric, own_noise=True))
    made = Program([run.state for run in runs], [task] * replicas, objective, config, choice.captured)
    return made, runs, objective


def measure(row: dict[str, Any], epochs: int, all_ready: Any, turn: Any, found: Any) -> None:
    """Adds the times to a row and hands it on; in a process of its own, which waits for the others and is then alone."""
    begun = time.monotonic()
    try:
        made, runs, objective = prepared(row["estimator"], row["cost"], row["replicas"], images(), row["program"])
        run: Any = partial(train_epoch, made, runs)
        if row["program"] == "plain":
            first = runs[0]
            run = partial(plain_epoch, first.state, first.task, objective, first.config, first.fabric)
        run()
        if made.graphs is not None:  # record what an epoch may ask for, as a long run has
            index = torch.zeros(row["replicas"], BATCH, dtype=torch.long, device="cuda")
            with made:
                for n in 2 * sorted(set(objective.estimator.shared_plans(20 * STEPS, torch.Generator().manual_seed(1)))):
                    made.graphs(index, n)
        torch.cuda.synchronize()
    finally:
        row["ready_seconds"] = time.monotonic() - begun
        all_ready.wait()
    times = []
    with turn:
        for _ in range(epochs):
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / STEPS * 1e6)
        row |= {"microseconds": statistics.median(times), "least": min(times), "most": max(times)}
        if made.captured:
            row["kernels"] = kernels(made)
    rows = row["replicas"] * BATCH * objective.estimator.expected_cost
    weights = sum(p.numel() for p in split(runs[0].state.model)[0] if p.ndim > 1)
    found.put(row | {"matrix_operations": 2.0 * rows * weights * 3})  # forward, the activations' gradient, the weights'


def kernels(made: Program) -> float:
    """Launched on the device by a step, on average over a few."""
    order = Batches(torch.zeros(20 * BATCH, dtype=torch.long, device="cuda"), BATCH)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler, made:
        made.steps([order] * len(made.states))
        torch.cuda.synchronize()
    return len([event for event in profiler.events() if event.device_type.name == "CUDA"]) / 20


def goals(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    three = {(row["estimator"], row["cost"]): row["microseconds"] for row in measured if row["replicas"] == 3}
    found = {}
    for cost, most in GOALS.items():
        if ("iwae", cost) in three:
            found[f"iwae {cost}, microseconds"] = {"most": most, "found": three["iwae", cost]}
        for other in ("iwae", "iwae+dreg"):
            if {("sumo", cost), (other, cost)} <= three.keys():
                found[f"sumo / {other} at {cost}"] = {"most": 1.2, "found": three["sumo", cost] / three[other, cost]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    parser.add_argument("--epochs", type=int, default=5, help="timed epochs of each")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--costs", type=int, nargs="+", default=[5, 15, 50])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_step: torch sees no CUDA GPU")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are many processes already
    best, test = ceilings(torch.device("cuda")), evaluation(torch.device("cuda"))
    config = environment() | {"gpu": torch.cuda.get_device_name(), "batch": BATCH, "steps": STEPS, "epochs": options.epochs}
    kinds = [(name, cost, replicas, "captured") for replicas in options.replicas for cost in options.costs for name in OBJECTIVES]
    kinds = [kind for kind in kinds if kind[0] != "iwae+dreg" or kind[2] == 3]
    kinds += [("iwae", 15, 1, "plain"), ("sumo", 15, 1, "plain")]
    rows = [dict(zip(("estimator", "cost", "replicas", "program"), kind, strict=True)) for kind in kinds]
    spawn = torch.multiprocessing.get_context("spawn")
    shared = spawn.Barrier(len(rows), timeout=900), spawn.Lock(), spawn.Queue()
    processes = [
        spawn.Process(target=measure, args=(row, options.epochs if row["program"] == "captured" else 1, *shared)) for row in rows
    ]
    for process in processes:
        process.start()
    measured: list[dict[str, Any]] = []
    while len(measured) < len(rows) and (any(process.is_alive() for process in processes) or not shared[2].empty()):
        with contextlib.suppress(queue.Empty):
            row = shared[2].get(timeout=1)
            row["matrix_microseconds"] = row["matrix_operations"] / best["tf32_operations_per_second"] * 1e6
            measured.append(row)
            print({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
            measured.sort(key=lambda row: (row["program"], row["replicas"], row["cost"], row["estimator"]))
            whole = {"config": config, "ceilings": best, "evaluation": test, "goals": goals(measured), "steps": measured}
            save(options.out / "gpu_step.json", whole)
    if len(measured) < len(rows):
        raise SystemExit(f"gpu_step: {len(rows) - len(measured)} of {len(rows)} failed")


if __name__ == "__main__":
    main()
