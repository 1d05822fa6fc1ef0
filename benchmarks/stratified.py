"""Whether `plan(stratified=True)` lowers the variance of a batch's mean.

Measured on the log-weights of a small VAE, trained for about a minute, with batches of B = 100 data at cost 15, all capped
at 128 terms. With f_i(s) the mean estimate of datum i when its K comes from stratum s, a random permutation of the strata
gives two data the covariance -Cov_s(f_i, f_j) / (B - 1), so that the variance relative to the plain plan's is
1 - mean_{i != j} Cov_s(f_i, f_j) / mean_i Var_i. Both means are taken from `estimator.paths` with every K weighted by its
probability, so that no rare K is missed; the error bar is a jackknife over groups of data. Batches planned by
`estimator.plan` itself, on the same weights, check the formula (for SUMO they are too few: its variance lies in rare K).
"""

import math
from typing import Any

import torch
from torch import Tensor

import dohyo
from dohyo.diagnostics import cut, depth_probabilities, stratified_moments

from benchmarks.weights import CAP, arguments, make_bank, multilevel, save

BATCH, COST, BATCHES, GROUPS = 100, 15, 20_000, 20


def stratum_probabilities(estimator: dohyo.Estimator, depths: int) -> Tensor:
    """P(K = k | stratum s), (BATCH, depths): u is even on (s / BATCH, (s + 1) / BATCH], and K = k for S(k+1) < u <= S(k)."""
    survival = estimator.depth_law.survival(torch.arange(depths + 1))
    low = torch.arange(BATCH, dtype=torch.float64)[:, None] / BATCH
    below = (survival - low).clamp(0, 1 / BATCH) * BATCH
    return below[:, :-1] - below[:, 1:]


def ratio(paths: Tensor, probability: Tensor, strata: Tensor) -> float:
    """Var(stratified) / Var(plain) of a batch's mean, from paths (data, blocks, depths)."""
    variance = stratified_moments(paths, probability)[1].mean()
    f = paths.mean(1) @ strata.T
    f = f - f.mean(-1, keepdim=True)
    data = len(f)
    pairs = (f.sum(0).square() - f.square().sum(0)) / (data * (data - 1))  # i != j: noise of the f's does not enter
    return float(1 - pairs.mean() / variance)


def with_jackknife(paths: Tensor, probability: Tensor, strata: Tensor) -> tuple[float, float]:
    """The ratio and its standard error over data."""
    group = torch.arange(len(paths)) % GROUPS
    left_out = torch.tensor([ratio(paths[group != g], probability, strata) for g in range(GROUPS)])
    stderr = math.sqrt((GROUPS - 1) * float(left_out.var(correction=0)))
    return ratio(paths, probability, strata), stderr


def simulated(estimator: dohyo.Estimator, paths: Tensor, stratified: bool) -> Tensor:
    """The noise of the means of many batches, (BATCHES,): random data, a random block of weights for each, a real plan."""
    generator = torch.Generator().manual_seed(1)
    _, probability, _ = depth_probabilities(estimator, CAP)
    noise = paths - (paths.mean(1, keepdim=True) * probability).sum(-1, keepdim=True)
    means = []
    for _ in range(BATCHES):
        depth = estimator.depth(estimator.plan(BATCH, generator, stratified=stratified))
        data = torch.randperm(len(paths), generator=generator)[:BATCH]
        block = torch.randint(paths.shape[1], (BATCH,), generator=generator)
        means.append(noise[data, block, depth].mean())
    return torch.stack(means)


def simulated_ratio(estimator: dohyo.Estimator, paths: Tensor) -> tuple[float, float]:
    """The same ratio by brute force, with the standard error that the sizes of the squares give."""
    squares = [simulated(estimator, paths, stratified).square() for stratified in (True, False)]
    above, below = (float(square.mean()) for square in squares)
    relative = [float(square.std()) / float(square.mean()) / math.sqrt(BATCHES) for square in squares]
    return above / below, above / below * math.hypot(*relative)


def conclude(rows: list[dict[str, Any]]) -> str:
    """One sentence; what is within 1%, or two standard errors, of no change counts as none."""
    verdicts: dict[str, list[str]] = {"lowers": [], "hardly changes": [], "raises": []}
    for row in rows:
        change, margin = row["ratio"] - 1, max(0.01, 2 * row["stderr"])
        verdict = "hardly changes" if abs(change) <= margin else "lowers" if change < 0 else "raises"
        verdicts[verdict].append(f"{row['estimator']} (x {row['ratio']:.3f} ± {row['stderr']:.3f})")
    parts = [f"{verdict} it for {', '.join(names)}" for verdict, names in verdicts.items() if names]
    return f"The variance of the mean of {BATCH} data at cost {COST}: a stratified plan {'; it '.join(parts)}."


def main() -> None:
    options = arguments(__doc__)
    pilot, log_w, config = make_bank(options)
    estimators = {
        "SUMO": dohyo.SUMO.at_cost(COST, CAP),
        "SymmetricSUMO": dohyo.SymmetricSUMO.at_cost(COST, CAP),
        "MultilevelRR": multilevel(dohyo.MultilevelRR, 8, COST),
        "tuned": dohyo.tune(pilot, COST, CAP),
    }
    blocks, _ = cut(log_w, CAP)
    rows: list[dict[str, Any]] = []
    print(f"{'estimator':14s} {'exact ratio':>16s} {'simulated ratio':>18s}")
    for name, estimator in estimators.items():
        paths = estimator.paths(blocks.flatten(0, 1)).unflatten(0, blocks.shape[:2])
        depths, probability, _ = depth_probabilities(estimator, CAP)
        exact, stderr = with_jackknife(paths, probability, stratum_probabilities(estimator, len(depths)))
        check, check_stderr = simulated_ratio(estimator, paths)
        rows.append({"estimator": name, "settings": dohyo.to_dict(estimator), "cost": estimator.expected_cost})
        rows[-1] |= {"ratio": exact, "stderr": stderr, "simulated": check, "simulated_stderr": check_stderr}
        print(f"{name:14s} {exact:8.3f} ± {stderr:5.3f} {check:10.3f} ± {check_stderr:5.3f}")
    conclusion = conclude(rows)
    print(conclusion)
    config |= {
        "batch": BATCH,
        "cost": COST,
        "cap": CAP,
        "simulated_batches": BATCHES,
        "simulation_seed": 1,
        "jackknife_groups": GROUPS,
    }
    save(options.out / "stratified.json", {"config": config, "conclusion": conclusion, "rows": rows})


if __name__ == "__main__":
    main()
