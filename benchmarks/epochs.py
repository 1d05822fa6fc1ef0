"""What an epoch of `dohyo.lab.fit` costs beside a training loop written by hand: the paper's VAE at 5 and 50 log-weights a datum.

The loop by hand is IWAE in plain PyTorch, as lean as one would write it; DReG, SUMO and MultilevelRR are compared with it too.
Both have the same network, optimiser, batches and validation, and neither clips. `fit` asks for PyTorch's fused Adam and most
people do not, so that there are two loops by hand, with and without it; the goals are judged by the one with it. Epochs of all
runs take turns. K is random, and rare large ones take much of the time, so that epochs with a few numbers of log-weights, each
the same in all steps, are timed instead, and the mean over the law is that of lines through them; `beyond_the_last` is the share
of log-weights in steps for which the last line is extended. The clock is the CPU time of the main thread, which other
programs disturb little: on two threads it does all that is serial and half of the rest, so that this is the time on the wall of
an idle machine, provided that threads sleep while they wait (OMP_WAIT_POLICY=passive). Seconds on the wall are given too.
"""

import copy
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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


def depths(estimator: dohyo.Estimator) -> tuple[list[float], list[float]]:
    """The numbers of log-weights that it may ask for, with their probabilities, but for a few millionths of the time."""
    counts: list[float] = []
    shares: list[float] = []
    depth, left = 0, 1.0
    while left * (counts[-1] if counts else 1) > 1e-6 * estimator.expected_cost:
        below = float(estimator.depth_law.survival(torch.tensor([depth + 1]))[0])
        counts.append(float(estimator.terms(torch.tensor([depth], dtype=torch.float64))[0]))
        shares.append(left - below)
        depth, left = depth + 1, below
    return counts, shares


def timed_counts(estimator: dohyo.Estimator) -> list[int]:
    """The numbers of log-weights whose epochs are timed: the least, and doubles of it up to four or five times the mean."""
    counts = [int(count) for count, share in zip(*depths(estimator), strict=True) if share > 0]
    found = [counts[0]]
    while estimator.depth_law.cap > 0 and found[-1] < 3 * estimator.expected_cost:
        found.append(next(count for count in counts if count >= 2 * found[-1]))
    return found


def mean_over_law(estimator: dohyo.Estimator, seconds: dict[int, float]) -> float:
    """The mean of the epochs' seconds, by lines between the numbers of log-weights that were timed, and on beyond the last."""
    counts, shares = depths(estimator)
    nodes, times = list(seconds), list(seconds.values())
    if len(nodes) == 1:
        return times[0]
    slope = (times[-1] - times[-2]) / (nodes[-1] - nodes[-2])
    found = [times[-1] + slope * (n - nodes[-1]) if n > nodes[-1] else float(np.interp(n, nodes, times)) for n in counts]
    return float(np.dot(found, shares)) / sum(shares)


def at_count(objective: MaximumLikelihood, n: int) -> MaximumLikelihood:
    """The objective with n log-weights in every step, whatever K is drawn."""
    if objective.estimator.depth_law.cap == 0:
        return objective
    estimator = copy.copy(objective.estimator)
    object.__setattr__(estimator, "plan", lambda *given: torch.full_like(objective.estimator.plan(*given), n))
    return MaximumLikelihood(estimator, objective.encoder)


def beyond_the_last(estimator: dohyo.Estimator) -> float:
    """The share of log-weights in steps with more of them than in any epoch that is timed."""
    counts, shares = (np.array(each) for each in depths(estimator))
    weights = counts * shares
    return float(weights[counts > timed_counts(estimator)[-1]].sum() / weights.sum())


def measure(threads: int, rounds: int, cost: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU seconds of this thread and seconds on the wall for an epoch of each run, in each round."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    images = torch.rand(BATCH * STEPS + VALID, 784).bernoulli()
    train, valid = images[:-VALID], images[-VALID:]
    runs: dict[tuple[str, int], Iterator[Any]] = {
        (name, cost): by_hand(train, valid, cost, fused) for name, fused in BY_HAND.items()
    }
    wanted = objectives(cost)
    for name, objective in wanted.items():
        for n in timed_counts(objective.estimator):
            config = LoopConfig(epochs=rounds + 1, valid_terms=VALID_TERMS, seed=SEED, device="cpu")
            runs[name, n] = fit(VAE(), (train, valid), at_count(objective, n), config)
    for run in runs.values():  # the first epoch warms up
        next(run)
    order = random.Random(SEED)
    clocks: tuple[dict[str, list[float]], ...] = ({}, {})
    for _ in range(rounds):
        here: tuple[dict[str, dict[int, float]], ...] = ({}, {})
        for name, n in order.sample(sorted(runs), len(runs)):
            begin = time.thread_time(), time.perf_counter()
            next(runs[name, n])
            for clock, now, start in zip(here, (time.thread_time(), time.perf_counter()), begin, strict=True):
                clock.setdefault(name, {})[n] = now - start
        for found, each in zip(clocks, here, strict=True):
            for name, own in each.items():
                times = dict(sorted(own.items()))
                mean = mean_over_law(wanted[name].estimator, times) if name in wanted else times[cost]
                found.setdefault(name, []).append(mean)
    return clocks[0], clocks[1]


def compared(threads: int, rounds: int, ratio: Callable[[list[float], list[float]], dict[str, Any]]) -> list[dict[str, Any]]:
    """Every run beside the loop by hand, with its goal, printed and returned."""
    found = []
    title = f"an epoch beside a loop by hand, {threads} thread(s)"
    print(f"\n{title:40s} {'of means':>9s} {'95% interval':>17s} {'median':>7s} {'wall':>7s} {'unfused':>8s}")
    for cost in COSTS:
        load = os.getloadavg()[0]
        seconds, wall = measure(threads, rounds, cost)
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
                "run": name, "cost": cost, "threads": threads, "timed_at": timed_counts(objectives(cost)[name].estimator),
                "beyond_the_last": beyond_the_last(objectives(cost)[name].estimator),
                "estimator": dohyo.to_dict(objectives(cost)[name].estimator), "ratio": own, "ratio_on_the_wall": on_wall,
                "ratio_to_adam_not_fused": beside,
                "mean_seconds": statistics.mean(seconds[name]), "mean_seconds_by_hand": statistics.mean(seconds["by hand"]),
                "load_before_and_after": [load, os.getloadavg()[0]],
            })  # fmt: skip
    return found
