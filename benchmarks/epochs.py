"""What an epoch of `dohyo.lab.fit` costs beside a training loop written by hand: the paper's VAE at 5 and 50 log-weights a datum.

The loop by hand is IWAE in plain PyTorch, as lean as one would write it; DReG, SUMO and MultilevelRR are compared with it too.
Both have the same network, optimiser, batches and validation, and neither clips. `fit` asks for PyTorch's fused Adam and most
people do not, so that there are two loops by hand, with and without it; the goals are judged by the one with it. Epochs of all
runs take turns. K is random, so its seed is one whose epochs cost what the law says. The clock is the CPU time of the main
thread, which other programs disturb little: on two threads it does all that is serial and half of the rest, so that this is the
time on the wall of an idle machine, provided that threads sleep while they wait (OMP_WAIT_POLICY=passive). Seconds on the wall
are given too.
"""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import dohyo
from dohyo.lab import LoopConfig, fit
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood

BATCH, STEPS, VALID, VALID_TERMS, SEED = 100, 20, 400, 20, 0
COSTS = (5, 50)
BY_HAND = {"by hand": True, "by hand, Adam not fused": False}
GOALS = {"iwae": 1.1, "iwae dreg": 1.25, "sumo": 1.25, "multilevel-rr": 1.25}


def objectives(cost: int) -> dict[str, MaximumLikelihood]:
    return {
        "iwae": MaximumLikelihood(dohyo.IWAE(cost)),
        "iwae dreg": MaximumLikelihood(dohyo.IWAE(cost), "dreg"),
        "sumo": MaximumLikelihood(dohyo.SUMO.at_cost(cost)),
        "multilevel-rr": MaximumLikelihood(dohyo.MultilevelRR.at_cost(cost)),
    }


def by_hand(train: Tensor, valid: Tensor, k: int, fused: bool) -> Iterator[float]:
    """Train by IWAE_k; yield the validation NLL after each epoch."""
    torch.manual_seed(SEED)
    encoder = nn.Sequential(nn.Linear(784, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 100))
    decoder = nn.Sequential(nn.Linear(50, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 784))
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=1e-3, eps=1e-4, amsgrad=True, fused=fused or None)

    def nll(x: Tensor, k: int) -> Any:
        mean, log_scale = encoder(x).chunk(2, -1)
        noise = torch.randn(k, *mean.shape)
        z = mean + log_scale.exp() * noise
        logits = decoder(z)
        log_lik = -binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none").sum(-1)
        log_w = log_lik - 0.5 * z.square().sum(-1) + (log_scale + 0.5 * noise.square()).sum(-1)
        return (math.log(k) - log_w.logsumexp(0)).mean()

    while True:
        total = torch.zeros(())
        for index in torch.randperm(len(train)).split(BATCH):
            loss = nll(train[index], k)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.detach()
        with torch.no_grad():
            checked = float(torch.stack([nll(x, VALID_TERMS) for x in valid.split(BATCH)]).mean())
        yield checked


class Counted(VAE):
    """The paper's VAE, counting its log-weights in training."""

    broadcasts = True
    rows = 0

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        self.rows += len(z) if self.training else 0
        return super().log_joint(x, z)


def seed_of_k(estimator: dohyo.Estimator, steps: int) -> int:
    """Of the first 2,000 seeds the one whose K, after the first epoch, cost most nearly what the law says on average."""

    def miss(seed: int) -> float:
        counts = estimator.shared_plans(steps, torch.Generator().manual_seed(seed + 1))[STEPS:]
        return abs(sum(counts) / len(counts) - estimator.expected_cost)

    return min(range(2000), key=miss)


def measure(threads: int, rounds: int, cost: int) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float]]:
    """CPU seconds of this thread and seconds on the wall for each epoch of each run, and the log-weights a datum."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    images = torch.rand(BATCH * STEPS + VALID, 784).bernoulli()
    train, valid = images[:-VALID], images[-VALID:]
    runs: dict[str, Iterator[Any]] = {name: by_hand(train, valid, cost, fused) for name, fused in BY_HAND.items()}
    models = {name: Counted() for name in GOALS}
    for name, objective in objectives(cost).items():
        varies = objective.estimator.depth_law.cap > 0
        k_seed = seed_of_k(objective.estimator, STEPS * (rounds + 1)) if varies else SEED
        config = LoopConfig(epochs=rounds + 1, valid_terms=VALID_TERMS, seed=SEED, k_seed=k_seed, device="cpu")
        runs[name] = fit(models[name], (train, valid), objective, config)
    for run in runs.values():  # the first epoch warms up
        next(run)
    before = {name: model.rows for name, model in models.items()}
    order = random.Random(SEED)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in order.sample(sorted(runs), len(runs)):
            begin, on_wall = time.thread_time(), time.perf_counter()
            next(runs[name])
            seconds[name].append(time.thread_time() - begin)
            wall[name].append(time.perf_counter() - on_wall)
    rows = {name: (model.rows - before[name]) / (rounds * len(train)) for name, model in models.items()}
    return seconds, wall, rows


def compared(threads: int, rounds: int, ratio: Callable[[list[float], list[float]], dict[str, Any]]) -> list[dict[str, Any]]:
    """Every run beside the loop by hand, with its goal, printed and returned."""
    found = []
    title = f"an epoch beside a loop by hand, {threads} thread(s)"
    print(f"\n{title:40s} {'of means':>9s} {'95% interval':>17s} {'median':>7s} {'wall':>7s} {'unfused':>8s}")
    for cost in COSTS:
        load = os.getloadavg()[0]
        seconds, wall, rows = measure(threads, rounds, cost)
        for name, goal in GOALS.items():
            own, on_wall, beside = (
                ratio(clock[name], clock[other])
                for clock, other in ((seconds, "by hand"), (wall, "by hand"), (seconds, "by hand, Adam not fused"))
            )
            own |= {"goal": goal, "met": own["of_means"] <= goal, "met_by_median": own["median"] <= goal}
            numbers = [own["of_means"], *own["interval"], own["median"], on_wall["median"], beside["of_means"]]
            verdict = f"goal {goal}: {'met' if own['met'] else 'MISSED'}"
            print(f"{f'{name} at {cost}':40s} " + " ".join(f"{number:8.3f}" for number in numbers) + f"  {verdict}")
            found.append({
                "run": name, "cost": cost, "threads": threads, "log_weights": rows[name],
                "estimator": dohyo.to_dict(objectives(cost)[name].estimator), "ratio": own, "ratio_on_the_wall": on_wall,
                "ratio_to_adam_not_fused": beside,
                "mean_seconds": statistics.mean(seconds[name]), "mean_seconds_by_hand": statistics.mean(seconds["by hand"]),
                "load_before_and_after": [load, os.getloadavg()[0]],
            })  # fmt: skip
    return found
