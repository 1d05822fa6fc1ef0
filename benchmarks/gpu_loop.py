"""What training costs on a CUDA GPU besides a density model's step (`gpu_step`): whole epochs, chains, reverse KL, policies.

Epochs: three replicas of the paper's VAE, with validation (10,000 images, IWAE-20), records and folders, as `dohyo train` runs
them; goal: at most 1.15 times the steps, and 0.15 s at cost 5. Chains (`--only chains`): a step through 2 chains of 8
leapfrogs, 4 of 4 and 8 of 8, with three replicas and with eight, against IWAE (DReG) with as many passes through the decoder,
forward and backward as the record of a run counts them; goal: at most 1.3 times its time. Reverse KL on the funnel, latent
policies on 500 variables, with the defaults of their commands and entropy: microseconds of a step, plain and captured; goal:
ten times the plain loop's steps in the same time. For these the largest difference of a parameter between the programs after 40
steps is given too.

Each kind has a process of its own: all get ready at the same time, and each is timed as soon as it is ready, one after the other,
while others may still be compiling on other cores. The median of `--epochs` is given, and the least, by which chains are compared
with IWAE: other processes can only make an epoch longer. A row is printed and saved once it is
measured, so that a run that is cut short leaves what it has; what is still awaited is said on stderr. The images are random:
nothing here depends on what they show.
"""

import argparse
import contextlib
import dataclasses
import os
import queue
import statistics
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dohyo.lab.data import Dataset
from dohyo.lab.experiments.density_config import DensityConfig, decoder_passes
from dohyo.lab.experiments.qpbo import Best, Optimise, QPBOConfig
from dohyo.lab.experiments.reverse_kl import ReverseKLConfig, TowardsTarget
from dohyo.lab.fast.programs import Program
from dohyo.lab.fast.together import Replica, choose_for, program_of, train_epoch, train_together
from dohyo.lab.rewards import random_qpbo
from dohyo.lab.targets import Funnel
from dohyo.lab.training import tasks
from dohyo.lab.training.loop import RunLog, Training, train
from dohyo.lab.training.loop import train_epoch as plain_epoch
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import State
from dohyo.lab.training.tasks import OnData
from dohyo.models import GaussianLVM

from benchmarks.gpu_step import kernels
from benchmarks.weights import environment, save

VARIABLES, PLAIN_STEPS = 500, 100
FASTER = 10  # captured against plain


def kinds() -> list[dict[str, Any]]:
    """What is measured; `of` names the row that it is compared with."""
    density: dict[str, Any] = {"objective": "density", "replicas": 3, "program": "captured"}
    rows: list[dict[str, Any]] = [density | {"estimator": "iwae", "cost": 5, "whole": True}]
    rows += [density | {"estimator": name, "cost": 15, "whole": True} for name in ("iwae", "sumo")]
    for chains, steps, replicas in ((2, 8, 3), (4, 4, 3), (8, 8, 3), (2, 8, 8)):
        passes = decoder_passes(DensityConfig(anneal=steps, cost=chains).objective(), steps)
        equal = round(sum(passes.values()) / 3)  # IWAE takes one forward and two backward
        own = density | {"estimator": "iwae", "replicas": replicas, "group": "chains"}
        rows.append(own | {"cost": chains, "anneal": steps, "equal": equal, "passes": passes})
        rows.append(own | {"cost": equal, "encoder": "dreg", "passes": {"forward": equal, "backward": 2 * equal}})
    for objective, names in (("reverse-kl", ("sumo", "multilevel-rr")), ("policy", ("sumo",))):
        for name in names:
            for program, replicas in (("plain", 1), ("captured", 1), ("captured", 3)):
                rows.append({"objective": objective, "estimator": name, "cost": 15, "replicas": replicas, "program": program})
    return [row for row in rows if (row["estimator"], row["program"], row["replicas"]) != ("multilevel-rr", "captured", 1)]


def images() -> Dataset:
    grey = torch.rand(50_000, 784, generator=torch.Generator().manual_seed(0))
    return Dataset("random", grey, grey[:10_000].round(), grey[:100].round(), "grey", (28, 28))


def members(row: dict[str, Any], folder: Path | None, program: str, replicas: int, **changes: Any) -> tuple[list[Replica], Any]:
    """The runs of a row, and their objective."""
    common: dict[str, Any] = {
        "estimator": row["estimator"],
        "cost": row["cost"],
        "k_seed": 0,
        "device": "cuda",
        "program": program,
    }
    made: list[Replica] = []
    objective: Any = None
    for seed in range(replicas):
        config: Any
        task: Any
        if row["objective"] == "density":
            chains = {"anneal": row.get("anneal", 0), "anneal_from": 0.0}
            config = DensityConfig(seed=seed, encoder=row.get("encoder"), **chains, **common, **changes)
            task = made[0].task if made else OnData(images())
            torch.manual_seed(seed)
            model, own = config.build_model(task.data), config.objective()
        elif row["objective"] == "reverse-kl":
            config = ReverseKLConfig(seed=seed, on_divergence="continue", steps=10**6, **common, **changes)
            torch.manual_seed(seed)
            own = config.objective(Funnel())
            model, task = GaussianLVM(2, config.hidden, config.latent), TowardsTarget(Funnel(), own)
        else:
            config = QPBOConfig(seed=seed, variables=VARIABLES, policy="latent", entropy=0.1, steps=10**6, **common, **changes)
            task = Optimise(Best(random_qpbo(VARIABLES, seed=0)), 50.0)
            own = config.objective(task.best, lambda task=task: task.entropy, lambda task=task: task.scale)
            model = config.build_policy(VARIABLES)
        objective = objective or own
        made.append(Replica(model, task, config, folder and folder / str(seed)))
    return made, objective


def prepared(row: dict[str, Any]) -> tuple[Any, int]:
    """What takes an epoch's steps, and how many there are."""
    plain, fabric = row["program"] == "plain", launch("cuda")
    changes = {} if row["objective"] == "density" else {"check_every": PLAIN_STEPS if plain else 500}
    team, objective = members(row, None, row["program"], row["replicas"], **changes)
    if not plain:
        choice = choose_for(team, objective, fabric)
    else:
        team[0].task.begin(fabric, team[0].config)
    runs = [Training(r.model, r.task, objective, r.config, None, fabric, own_noise=not plain) for r in team]
    for run in runs:
        run.task.prepare(run.state, run.config)
    steps = 500 if row["objective"] == "density" else changes["check_every"]
    if plain:
        run = runs[0]
        return partial(plain_epoch, run.state, run.task, objective, run.config, fabric), steps
    program = program_of(objective)(
        [run.state for run in runs], [run.task for run in runs], objective, runs[0].config, choice.captured
    )
    row["captured"] = choice.captured
    return partial(train_epoch, program, runs), steps


def measure(row: dict[str, Any], epochs: int, turn: Any, found: Any) -> None:
    """Adds the times to a row and hands it on; in a process of its own, which waits until no other is being timed."""
    begun = time.monotonic()
    work: Any = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            epoch, steps = prepared(row)
            for _ in range(1 if row["program"] == "plain" else 3):
                epoch()
            if row.get("whole"):
                team, objective = members(row, Path(folder), "captured", row["replicas"], epochs=epochs + 3)
                work = train_together(team, objective)
                for _ in range(2 * row["replicas"]):
                    next(work)
            if row["objective"] != "density" and row["program"] == "captured" and row["replicas"] == 1:
                row["difference"] = difference(row)
            torch.cuda.synchronize()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        finally:
            row["ready_seconds"] = time.monotonic() - begun
        with turn:
            if "error" not in row:
                row |= timed(epoch, steps, epochs, work, row["replicas"])
                if row.get("group") == "chains":
                    row["kernels"] = kernels(epoch.args[0])
        if work is not None:
            work.close()
    found.put(row)


def timed(epoch: Any, steps: int, epochs: int, work: Any, replicas: int) -> dict[str, Any]:
    times, whole = [], []
    for _ in range(epochs):
        start = time.perf_counter()
        epoch()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps * 1e6)
    for _ in range(epochs if work is not None else 0):
        start = time.perf_counter()
        for _ in range(replicas):
            next(work)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    found: dict[str, Any] = {"microseconds": statistics.median(times), "least": min(times), "most": max(times)}
    if whole:
        found |= {"epoch_seconds": statistics.median(whole), "steps_seconds": found["microseconds"] * steps / 1e6}
        own: dict[str, float] = {}
        with parts(own):
            for _ in range(replicas):
                next(work)
        found["parts"] = own
    return found


@contextlib.contextmanager
def parts(found: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds of an epoch's parts, each between two synchronisations; parts may lie inside others."""
    named: dict[str, tuple[Any, str]] = {"order": (OnData, "batches"), "steps": (Program, "steps")}
    named |= {"check": (Training, "begin_check"), "validation": (tasks, "validation_nll")}
    named |= {"record": (Training, "count_epoch"), "best": (State, "after_epoch"), "log": (RunLog, "append")}
    with contextlib.ExitStack() as stack:
        for name, (owner, attribute) in named.items():
            stack.enter_context(unittest.mock.patch.object(owner, attribute, timing(name, getattr(owner, attribute), found)))
        yield


def timing(name: str, function: Any, found: dict[str, float]) -> Any:
    def timed(*arguments: Any) -> Any:
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            torch.cuda.synchronize()
            found[name] = found.get(name, 0.0) + time.perf_counter() - start

    return timed


def difference(row: dict[str, Any]) -> float:
    """The largest difference of a parameter after 40 steps, from the plain loop."""
    changes: dict[str, Any] = {"check_every": 20}
    if row["objective"] == "reverse-kl":
        changes |= {"check_draws": 25, "check_terms": 10}
    ends = []
    for program in ("captured", "plain"):
        team, objective = members(row, None, program, 1, **changes)
        (one,) = team
        config = dataclasses.replace(one.config, steps=40, decay="none")
        list(train(one.model, one.task, objective, config))
        ends.append(torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()]))
    return float((ends[0] - ends[1]).abs().max())


def name(row: dict[str, Any]) -> str:
    """A row in words."""
    chains = f", {row['anneal']} leapfrogs" if "anneal" in row else ""
    encoder = f", {row['encoder']}" if "encoder" in row else ""
    return (
        f"{row['objective']} {row['estimator']} at {row['cost']}{chains}{encoder}, {row['replicas']} replica(s), {row['program']}"
    )


def goals(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    rows = [row for row in measured if "error" not in row]
    for row in rows:
        if "epoch_seconds" in row:
            found[f"epoch / steps: {name(row)}"] = {"most": 1.15, "found": row["epoch_seconds"] / row["steps_seconds"]}
            if row["cost"] == 5:
                found[f"seconds of an epoch: {name(row)}"] = {"most": 0.15, "found": row["epoch_seconds"]}
        for other in rows:
            equal = (row.get("equal"), row["replicas"]) == (other["cost"], other["replicas"])
            if equal and other.get("encoder") == "dreg":
                key = f"{row['cost']} chains of {row['anneal']} / IWAE-{other['cost']}, {row['replicas']} replicas"
                found[key] = {"most": 1.3, "found": row["least"] / other["least"]}
            same = all(row[key] == other[key] for key in ("objective", "estimator", "cost"))
            if same and row["program"] == "captured" and other["program"] == "plain":
                faster = row["replicas"] * other["microseconds"] / row["microseconds"]
                found[f"steps in the time of a plain one: {name(row)}"] = {"least": FASTER, "found": faster}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    parser.add_argument("--epochs", type=int, default=5, help="timed epochs of each")
    parser.add_argument("--only", nargs="+", default=["density", "chains", "reverse-kl", "policy"], help="what to measure")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_loop: torch sees no CUDA GPU")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are many processes already
    options.out.mkdir(parents=True, exist_ok=True)
    rows, begun = [row for row in kinds() if row.get("group", row["objective"]) in options.only], time.monotonic()
    config = environment() | {"gpu": torch.cuda.get_device_name(), "epochs": options.epochs, "variables": VARIABLES}
    spawn = torch.multiprocessing.get_context("spawn")
    turn, found = spawn.Lock(), spawn.Queue()
    processes = [spawn.Process(target=measure, args=(row, options.epochs, turn, found)) for row in rows]
    for process in processes:
        process.start()
    measured: list[dict[str, Any]] = []
    while len(measured) < len(rows) and (any(process.is_alive() for process in processes) or not found.empty()):
        try:
            row = found.get(timeout=15)
        except queue.Empty:
            waiting = [name(row) for row in rows if name(row) not in map(name, measured)]
            print(f"{time.monotonic() - begun:.0f} s: waiting for {'; '.join(waiting)}", file=sys.stderr, flush=True)
            continue
        measured.append(row)
        print({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        measured.sort(key=name)
        whole = {"config": config, "goals": goals(measured), "rows": measured, "seconds": time.monotonic() - begun}
        save(options.out / "gpu_loop.json", whole)
    print(*(f"{key}: {value}" for key, value in goals(measured).items()), sep="\n")
    failed = len(rows) - len([row for row in measured if "error" not in row])
    if failed:
        raise SystemExit(f"gpu_loop: {failed} of {len(rows)} failed")


if __name__ == "__main__":
    main()
