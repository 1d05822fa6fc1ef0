"""What a verdict is worth: how often the mean is beyond two and three stated errors of the truth where the error bar is trusted.

The weights are made up, so that log p(x) is known: it is zero for every datum. Log-normal weights, Pareto weights, and those of a
Gaussian posterior under too narrow a Gaussian proposal; some of the data get heavy ones, the others log-normal ones with a k-hat
of 0.3. The estimator is MultilevelRR. `half` is the rule of version 0.2, which looked only at the share of heavy data.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dohyo
from dohyo.diagnostics import khat
from dohyo.evaluation import summarise
from dohyo.files import plain
from dohyo.verdict import BEARABLE, heavy_share

from benchmarks.weights import environment, save

RULES = ("verdict", "half")
COST, WEIGHTS = 50, 500  # of an estimate; of a datum for k-hat
POOL, SHAPES = 40_000, 1_500  # estimates and k-hats of each kind, from which repetitions are drawn


def lognormal(sigma: float) -> Callable[[int], Tensor]:
    return lambda n: sigma * torch.randn(n, dtype=torch.float64) - sigma**2 / 2


def pareto(k: float) -> Callable[[int], Tensor]:
    return lambda n: math.log(1 - k) - k * torch.rand(n, dtype=torch.float64).log()


def narrow(variance: float, size: int = 5) -> Callable[[int], Tensor]:
    """The posterior is N(0, I), the proposal N(0, variance I): weights with k = 1 - variance."""

    def log_weights(n: int) -> Tensor:
        square = torch.randn(n, size, dtype=torch.float64).square().sum(-1)
        return (1 - variance) * square / 2 + size / 2 * math.log(variance)

    return log_weights


KINDS = {f"lognormal {s:g}": lognormal(s) for s in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)}
KINDS |= {f"pareto {k:g}": pareto(k) for k in (0.5, 0.7, 0.85)} | {f"narrow {v:g}": narrow(v) for v in (0.5, 0.3, 0.15)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1_000, help="evaluations of each case")
    parser.add_argument("--seed", type=int, default=0, help="of all noise")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    estimator, pools, cases = dohyo.MultilevelRR.at_cost(COST), {}, []
    for name in KINDS:
        pools[name] = pool(KINDS[name], estimator)
    for kind in KINDS:
        for data in (6, 20, 64):
            for heavy in sorted({1, data // 5, data // 2, data}):
                for replicates in (1, 4):
                    cases.append(case(pools, kind, data, heavy, replicates, estimator, options.repeats))
                    print(cases[-1], flush=True)
    worst = {
        f"{name} {rule}": max(one[f"{name}, {rule}"] for one in cases) for name in ("beyond 2", "beyond 3") for rule in RULES
    }
    config = environment() | {"seed": options.seed, "repeats": options.repeats, "cost": COST, "khat_weights": WEIGHTS}
    print(worst)
    save(options.out / "verdict.json", plain({"config": config, "worst": worst, "cases": cases}))


def pool(log_weights: Callable[[int], Tensor], estimator: Any) -> tuple[Tensor, Tensor]:
    """Estimates and k-hats of one kind of weights."""
    parts = [dohyo.estimate(lambda rows: log_weights(len(rows)), 2_000, estimator) for _ in range(POOL // 2_000)]
    return torch.cat(parts), khat(log_weights(SHAPES * WEIGHTS).view(SHAPES, WEIGHTS))


def case(
    pools: dict[str, tuple[Tensor, Tensor]], kind: str, data: int, heavy: int, replicates: int, estimator: Any, repeats: int
) -> dict[str, Any]:
    """How often evaluations with so many heavy data are trusted, and are so but for a mean beyond 2 and 3 stated errors."""
    seen = {f"{what}, {rule}": 0 for what in ("trusted", "beyond 2", "beyond 3") for rule in RULES}
    for _ in range(repeats):
        values, shapes = (torch.cat([_some(pools[kind][i], heavy, n), _some(pools["lognormal 1"][i], data - heavy, n)])
                          for i, n in ((0, replicates), (1, 1)))  # fmt: skip
        shapes = shapes[:, 0]
        found = summarise(values, estimator, 0, shapes)
        error = abs(found.mean) / (found.noise_stderr or found.stderr)
        for rule, trusted in zip(RULES, (found.verdict.trusted, heavy_share(shapes) <= BEARABLE), strict=True):
            if trusted:
                seen[f"trusted, {rule}"] += 1
                seen[f"beyond 2, {rule}"] += error > 2
                seen[f"beyond 3, {rule}"] += error > 3
    shares = {name: count / repeats for name, count in seen.items()}
    return {"kind": kind, "khat": float(pools[kind][1].median()), "data": data, "heavy": heavy, "replicates": replicates} | shares


def _some(pool: Tensor, rows: int, n: int) -> Tensor:
    return pool[torch.randint(len(pool), (rows, n))]


if __name__ == "__main__":
    main()
