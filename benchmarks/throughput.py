"""What a random K costs in time: one forward and backward pass of the paper's VAE, batch 100, at 15 log-weights a datum.

Each round times, in random order: a pass with IWAE-15, and for SUMO, SymmetricSUMO and MultilevelRR a pass by
`dohyo.log_marginal` (one K for each datum, packed), the arithmetic of `reduce` alone on the same counts, forward and
backward, and the same pass with every datum padded to the longest count in the network. Means over rounds are compared,
with bootstrap intervals, because K is random and rare long passes count; medians are given too. Goals: SUMO at most 1.15 of
IWAE-15, its `reduce` under a tenth of its pass. All is done on one thread, by CPU time, which others on the machine hardly
disturb, and on two, by the wall, where the network gains and `reduce` does not; there the means want a quiet machine. Last
come time and peak memory of leave-one-out differences, which SymmetricSUMO needs, by all pairs and by power sums. Before all
that, `benchmarks.epochs` puts whole epochs of `fit` beside a loop written by hand. `--only` measures one of these and keeps the
rest of the file.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dohyo
from dohyo import bounds
from dohyo.models import VAE
from dohyo.packing import reduce_packed

from benchmarks import epochs
from benchmarks.weights import environment, save

BATCH, COST, SEED = 100, 15, 0
DATA, WIDTHS = 4, (32, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_ROWS = 40_000  # a padded pass beyond this is not run (memory); its rows still count
ESTIMATORS = {
    "iwae": dohyo.IWAE(COST),
    "sumo": dohyo.SUMO.at_cost(COST),
    "symmetric-sumo": dohyo.SymmetricSUMO.at_cost(COST),
    "multilevel-rr": dohyo.MultilevelRR.at_cost(COST),
}
GOALS = {"sumo / iwae": 1.15, "sumo reduce / sumo": 0.10}


def now() -> float:
    """CPU seconds on one thread; on several, whose waiting counts too, seconds on the wall."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def clock(work: Callable[[], Tensor]) -> float:
    """Seconds of a forward and backward pass."""
    begin = now()
    work().mean().backward()
    return now() - begin


def padded(model: VAE, x: Tensor, estimator: dohyo.Estimator, counts: Tensor) -> Tensor:
    """The estimates when the network runs on max(counts) rows for every datum; the arithmetic is packed all the same."""
    width = int(counts.max())
    log_w = model.bind(x)(dohyo.rows(torch.full_like(counts, width))).view(len(counts), width)
    return reduce_packed(estimator.reduce, log_w[torch.arange(width) < counts[:, None]], counts)


def measure(rounds: int, padded_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Seconds of everything in each round, and network rows, packed and padded, of each plan."""
    torch.manual_seed(SEED)
    model, x = VAE(), torch.rand(BATCH, 784).bernoulli()
    generator, order = torch.Generator().manual_seed(SEED), random.Random(SEED)
    seconds: dict[str, list[float]] = defaultdict(list)
    network_rows: dict[str, list[int]] = defaultdict(list)
    for step in range(-10, rounds):  # the first ones warm up
        for name in order.sample(sorted(ESTIMATORS), len(ESTIMATORS)):
            estimator = ESTIMATORS[name]
            state = generator.get_state()
            own = {name: clock(partial(dohyo.log_marginal, model, x, estimator, generator))}
            counts = estimator.plan(BATCH, generator.set_state(state))  # the counts of that pass
            leaf = torch.randn(int(counts.sum()), requires_grad=True)
            own[f"{name} reduce"] = clock(partial(reduce_packed, estimator.reduce, leaf, counts))
            rectangle = BATCH * int(counts.max())
            if name != "iwae" and 0 <= step < padded_rounds and rectangle <= MOST_ROWS:
                own[f"{name} padded"] = clock(partial(padded, model, x, estimator, counts))
                own[f"{name} packed"] = own[name]
            model.zero_grad()
            if step >= 0:
                for key, value in own.items():
                    seconds[key].append(value)
                network_rows[name].append(int(counts.sum()))
                network_rows[f"{name} padded"].append(rectangle)
    return seconds, network_rows


def ratio(above: list[float], below: list[float]) -> dict[str, Any]:
    """The ratio of the means over paired rounds with a 95% bootstrap interval, and the median of the ratios."""
    a, b = torch.tensor(above, dtype=torch.float64), torch.tensor(below, dtype=torch.float64)
    pick = torch.randint(len(a), (2000, len(a)), generator=torch.Generator().manual_seed(SEED))
    ratios = a[pick].mean(-1) / b[pick].mean(-1)
    return {
        "of_means": float(a.mean() / b.mean()),
        "stderr": float(ratios.std()),
        "interval": ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist(),
        "median": float((a / b).median()),
        "rounds": len(a),
    }


def differences(width: int, pairs: bool, repeats: int = 5) -> tuple[float, float]:
    """Seconds on one core and peak memory of leave-one-out differences, forward and backward; for a fresh process, whose peak is
    its own."""
    torch.set_num_threads(1)
    bounds._MOST_PAIRED = (width if pairs else 0,)  # type: ignore[assignment]
    log_w = torch.randn(DATA, width, dtype=torch.float64, requires_grad=True)

    def work(log_w: Tensor) -> float:
        begin = now()
        bounds.leave_one_out_differences(log_w, 2).sum().backward()
        return now() - begin

    work(log_w[:, :8].detach().requires_grad_())
    before = peak_mib()
    seconds = statistics.median(work(log_w) for _ in range(repeats))
    return seconds, peak_mib() - before


def wide_differences() -> list[dict[str, Any]]:
    """Both ways side by side, from few terms to many, printed and returned."""
    found = []
    print(f"\nleave-one-out differences of {DATA} data, forward and backward, on one thread")
    print(f"{'terms':>8s} {'pairs':>18s} {'power sums':>18s}")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for width in WIDTHS:
            row: dict[str, Any] = {"data": DATA, "width": width}
            for name, pairs in (("pairs", True), ("powers", False)):
                row |= dict(zip((f"{name}_seconds", f"{name}_mib"), pool.apply(differences, (width, pairs)), strict=True))
            cells = [f"{1000 * row[f'{name}_seconds']:7.1f} ms {row[f'{name}_mib']:4.0f} MiB" for name in ("pairs", "powers")]
            print(f"{width:8d} " + " ".join(cells))
            found.append(row)
    return found


def peak_mib() -> float:
    """The most memory this process has held, from Linux; getrusage would start at the parent's peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def compared(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Every ratio, and whether the goals are met by means and by medians."""
    ratios = {f"{name} / iwae": ratio(seconds[name], seconds["iwae"]) for name in ESTIMATORS if name != "iwae"}
    ratios |= {f"{name} reduce / {name}": ratio(seconds[f"{name} reduce"], seconds[name]) for name in ESTIMATORS}
    for name in ESTIMATORS:
        if f"{name} padded" in seconds:
            ratios[f"{name} padded / packed"] = ratio(seconds[f"{name} padded"], seconds[f"{name} packed"])
    for key, goal in GOALS.items():
        found = ratios[key]
        found |= {"goal": goal, "met": found["of_means"] <= goal, "met_by_median": found["median"] <= goal}
    return ratios


def on_threads(threads: int, rounds: int, padded_rounds: int) -> dict[str, Any]:
    """All passes on that many threads, printed and returned."""
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    seconds, network_rows = measure(rounds, padded_rounds)
    ratios = compared(seconds)
    print(f"\n{f'ratio on {threads} thread(s)':40s} {'of means':>9s} {'95% interval':>17s} {'median':>7s}")
    for key, found in ratios.items():
        verdicts = [f"{'met' if found[by] else 'MISSED'}" for by in ("met", "met_by_median") if by in found]
        verdict = f"  goal {found['goal']}: {verdicts[0]}, by median {verdicts[1]}" if verdicts else ""
        low, high = found["interval"]
        print(f"{key:40s} {found['of_means']:9.3f} {low:8.3f} {high:8.3f} {found['median']:7.3f}{verdict}")
    return {
        "threads": threads,
        "clock": "process CPU time" if threads == 1 else "wall",
        "load_before_and_after": [load, os.getloadavg()[0]],
        "ratios": ratios,
        "mean_seconds": {key: statistics.mean(own) for key, own in seconds.items()},
        "median_seconds": {key: statistics.median(own) for key, own in seconds.items()},
        "network_rows": {key: {"mean": statistics.mean(own), "max": max(own)} for key, own in network_rows.items()},
    }


def epochs_record(threads: list[int], rounds: int) -> dict[str, Any]:
    """Epochs of `fit` beside a loop by hand, and how they were measured."""
    config = environment() | {"batch": BATCH, "steps": epochs.STEPS, "rounds": rounds, "validation_data": epochs.VALID}
    config |= {"validation_terms": epochs.VALID_TERMS, "seed": epochs.SEED, "goals": epochs.GOALS}
    config |= {"clock": "CPU time of the main thread", "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")}
    return {"config": config, "runs": [row for n in threads for row in epochs.compared(n, rounds, ratio)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--padded-rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--epoch-rounds", type=int, default=10)
    parser.add_argument("--only", choices=("epochs", "differences"))
    options = parser.parse_args()
    path = options.out / "throughput.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if options.only and path.exists() else {}
    if options.only != "differences":
        kept |= {"epochs": epochs_record(options.threads, options.epoch_rounds)}
    if not options.only:
        config = environment() | {"batch": BATCH, "cost": COST, "seed": SEED, "model": "VAE 784-200-200-50", "goals": GOALS}
        config |= {"rounds": options.rounds, "padded_rounds": options.padded_rounds, "most_padded_rows": MOST_ROWS}
        config["estimators"] = {name: dohyo.to_dict(estimator) for name, estimator in ESTIMATORS.items()}
        kept |= {"config": config, "passes": [on_threads(n, options.rounds, options.padded_rounds) for n in options.threads]}
    if options.only != "epochs":
        kept |= {"differences": {"config": environment(), "rows": wide_differences()}}
    save(path, kept)


if __name__ == "__main__":
    main()
