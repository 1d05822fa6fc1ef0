"""How much faster a training step of the latent policy is than one of an autoregressive policy, at d = 500 and batch 100.

A step is the loop's own `train_step`: draw 100 samples, compute their rewards, estimate log p(x) (SUMO at cost 15, one K for
each sample, with entropy two estimates) or compute it, backward, Adam. Policies have 200 hidden units; they are at the start
of training, on which the cost of a step does not depend. Each round takes, in random order, one step of every autoregressive
policy and several of the fast ones, whose mean counts: K is random, and rare long steps count. Ratios are of means over
rounds with bootstrap intervals; medians are given too. Goal: 19.2 times, the paper's figure, against each autoregressive
network. On one thread the clock is CPU time, which others on the machine hardly disturb; on two it is the wall, which wants
a quiet machine. `sample` is the time to draw the 100 samples alone.

The GRU's gates and NADE's cumulative sums run in torch without further tuning: another implementation may be faster.
"""

import argparse
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dohyo
from dohyo.lab.experiments.qpbo import Best, Optimise, QPBOConfig
from dohyo.lab.rewards import random_qpbo
from dohyo.lab.training.processes import launch
from dohyo.lab.training.state import State
from dohyo.lab.training.step import Totals, train_step

from benchmarks.throughput import now, ratio
from benchmarks.weights import environment, save

VARIABLES, BATCH, COST, SEED, ENTROPY = 500, 100, 15.0, 0, 0.1
GOAL = 19.2
REPEATS = {"latent": 8, "independent": 8, "gru": 1, "nade": 1}  # steps in a round
SLOW = ("gru", "nade")


def stepper(policy: str, entropy: float) -> tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]:
    """A training step, the drawing of its samples alone, and how it is set up."""
    name: Any = policy
    config = QPBOConfig(variables=VARIABLES, batch_size=BATCH, policy=name, cost=COST, entropy=entropy, seed=SEED, device="cpu")
    problem, fabric = random_qpbo(VARIABLES, seed=0), launch("cpu")
    scale = float(problem(torch.randint(2, (1000, VARIABLES)).float()).std())
    task = Optimise(Best(problem), scale)
    objective = config.objective(task.best, entropy, scale)
    model: Any = config.build_policy(VARIABLES)
    state = State.start(model, config, fabric, objective.shared)
    totals, index = Totals.start(None, fabric.device), torch.arange(BATCH)
    setup: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if objective.estimator is not None:
        setup |= {"estimator": dohyo.to_dict(objective.estimator), "encoder": objective.encoder, "k_draw": config.k_draw}
        setup |= {"expected_cost": objective.estimator.expected_cost, "estimates": 2 if entropy > 0 else 1}

    def step() -> None:
        train_step(state, task.batch(index), BATCH, objective, config, fabric, totals)

    return step, lambda: model.sample(BATCH), setup


def mean_seconds(work: Callable[[], Any], times: int) -> float:
    begin = now()
    for _ in range(times):
        work()
    return (now() - begin) / times


def on_threads(threads: int, rounds: int, entropy: float) -> dict[str, Any]:
    """All policies on that many threads, printed and returned."""
    torch.set_num_threads(threads)
    load, order = os.getloadavg()[0], random.Random(SEED)
    steppers = {policy: stepper(policy, entropy) for policy in REPEATS}
    steps: dict[str, list[float]] = defaultdict(list)
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):  # the first one warms up
        for policy in order.sample(sorted(REPEATS), len(REPEATS)):
            step, sample, _ = steppers[policy]
            seconds, sampling = mean_seconds(step, REPEATS[policy]), mean_seconds(sample, REPEATS[policy])
            if number >= 0:
                steps[policy].append(seconds)
                samples[policy].append(sampling)
    ratios = {f"{policy} / latent": ratio(steps[policy], steps["latent"]) for policy in REPEATS if policy != "latent"}
    for policy in SLOW:
        found = ratios[f"{policy} / latent"]
        found |= {"goal": GOAL, "met": found["of_means"] >= GOAL, "met_by_median": found["median"] >= GOAL}
    print(f"\n{threads} thread(s), entropy {entropy:g}, load {load:.1f}")
    for policy, own in steps.items():
        print(
            f"{policy:20s} {1000 * statistics.mean(own):8.1f} ms a step, {1000 * statistics.mean(samples[policy]):8.1f} sampling"
        )
    for key, found in ratios.items():
        low, high = found["interval"]
        verdict = f"  goal {GOAL}: {'met' if found['met'] else 'MISSED'}" if "goal" in found else ""
        print(f"{key:20s} {found['of_means']:8.2f}  ({low:.2f} to {high:.2f}), median {found['median']:.2f}{verdict}")
    return {
        "threads": threads,
        "clock": "process CPU time" if threads == 1 else "wall",
        "entropy": entropy,
        "load_before_and_after": [load, os.getloadavg()[0]],
        "ratios": ratios,
        "mean_seconds": {policy: statistics.mean(own) for policy, own in steps.items()},
        "median_seconds": {policy: statistics.median(own) for policy, own in steps.items()},
        "mean_seconds_sampling": {policy: statistics.mean(own) for policy, own in samples.items()},
        "setup": {policy: steppers[policy][2] for policy in steps},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    config = environment() | {"variables": VARIABLES, "batch": BATCH, "cost": COST, "hidden": 200, "latent": 20, "goal": GOAL}
    config |= {"seed": SEED, "rounds": options.rounds, "steps_in_a_round": REPEATS}
    passes = [on_threads(threads, options.rounds, entropy) for threads in options.threads for entropy in (0.0, ENTROPY)]
    save(options.out / "policy_step.json", {"config": config, "passes": passes})


if __name__ == "__main__":
    main()
