"""What solvers made for quadratic problems find in a given time on the wall, beside what a policy found.

Simulated annealing, tabu search (both of dwave-samplers, C++) and 1-flip descent from random starts (torch) have `--seconds`
each, one after the other, on one thread. A policy's result is taken from its run's result.json, with the time that the
run took, on however many threads it had: give the solvers that time for an equal comparison. The solvers know the weights;
a policy sees rewards alone. Rewards of every x are computed anew by the problem.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from dohyo.lab.rewards import Quadratic, load, random_qpbo

from benchmarks.solvers import SOLVERS
from benchmarks.weights import environment, save


def policy_row(path: Path, problem: Quadratic) -> dict[str, Any]:
    """A run's result as a row of the table; a ValueError if it is that of another problem."""
    result = json.loads(path.read_text(encoding="utf-8"))
    bits = torch.tensor([result["best_x"]])
    if bits.shape[1] != problem.variables or abs(problem(bits).item() - result["best_reward"]) > problem.tolerance:
        raise ValueError(f"{path}: its best x with reward {result['best_reward']} is not that of this problem, {problem.name}")
    settings = ("policy", "estimator", "entropy", "restarts", "steps", "seed")
    return {
        "solver": f"policy {result['policy']}",
        **{key: result[key] for key in ("best_reward", "best_x", "seconds_to_best", "seconds")},
        "settings": {key: result[key] for key in settings if key in result},
    }


def gap(problem: Quadratic, value: float) -> float | None:
    return None if problem.maximum is None else (problem.maximum - value) / abs(problem.maximum)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instance", type=Path, help="a problem from a file: OR-Library's bqp, .qubo or Gset")
    parser.add_argument("--index", type=int, help="which problem of a file that holds several, from 1")
    parser.add_argument("--variables", type=int, help="of a random problem, in place of a file")
    parser.add_argument("--instance-seed", type=int, default=0, help="of a random problem")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each solver")
    parser.add_argument("--seed", type=int, default=0, help="of the solvers")
    parser.add_argument("--solvers", nargs="+", choices=list(SOLVERS), default=list(SOLVERS))
    parser.add_argument(
        "--result", type=Path, nargs="+", default=[], help="result.json of runs of dohyo qpbo on the same problem"
    )
    parser.add_argument("--out", type=Path, default=Path("results/qpbo_solvers.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if (options.instance is None) == (options.variables is None):
            raise ValueError("give --instance FILE or --variables N")
        if options.instance is not None:
            problem = load(options.instance, options.index)
        else:
            problem = random_qpbo(options.variables, options.instance_seed)
        rows = [policy_row(path, problem) for path in options.result]
        load_before = os.getloadavg()[0]
        rows += [dataclasses.asdict(SOLVERS[name](problem, options.seconds, options.seed)) for name in options.solvers]
    except (ValueError, OSError) as error:
        print(f"qpbo_solvers: error: {error}", file=sys.stderr)
        return 2
    for row in rows:
        row["gap"] = gap(problem, row["best_reward"])
    known = "" if problem.maximum is None else f", best known {problem.maximum:.10g}"
    print(f"{problem.name}{known}\n{'':24s} {'best':>14s} {'gap':>7s} {'best after':>11s} {'ran':>8s}")
    for row in rows:
        shown = "?" if row["gap"] is None else f"{row['gap']:.2%}"
        times = f"{row['seconds_to_best']:9.3f} s {row['seconds']:6.1f} s"
        print(f"{row['solver']:24s} {row['best_reward']:14.10g} {shown:>7s} {times}")
    config = environment() | {"problem": problem.name, "variables": problem.variables, "best_known": problem.maximum}
    config |= {"seconds": options.seconds, "seed": options.seed, "load_before_and_after": [load_before, os.getloadavg()[0]]}
    save(options.out, {"config": config, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
