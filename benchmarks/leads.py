"""Which way of limiting an unbiased estimator's noise trains the best model? Small VAEs on the bundled digits, several seeds.

Each row has the seeds of IWAE at the same cost, a sequence of K of its own with each, and is compared seed by seed. There the
encoder is good, so that the NLL by IWAE with 500 terms is that of the model. Minutes for each run on one core.

With `--after` all rows begin with the models that so many epochs of IWAE have trained; with a low `--rate` or a large `--batch`
noise is averaged then, and a bias is not.
"""

import argparse
import copy
import statistics
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dohyo
from dohyo.lab import LoopConfig, fit
from dohyo.lab.data import load
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood
from dohyo.objectives.weighing import coefficients, safe_ratio

from benchmarks.weights import environment, save

TERMS = 500
RATE = 2e-3


@dataclass(frozen=True)
class Corrected(MaximumLikelihood):
    """Maximum likelihood where only the correction is clipped: what an estimate's coefficients add to those of IWAE."""

    most: float = 1.0

    def coefficients(
        self, log_w: Tensor, counts: Tensor, baseline: Tensor | None = None, *, batch: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        value, phi, log_px, iwae = coefficients(log_w, counts, baseline, estimator=self.estimator, encoder=str(self.encoder))
        own = torch.arange(log_w.shape[1]) < counts[:, None]
        bound = torch.where(own, log_w.double(), -torch.inf).softmax(-1)
        size = (value - bound).abs().sum(-1)
        value = bound + (value - bound) * (self.most / size.clamp(min=1e-30)).clamp(max=1.0)[:, None]
        parts = safe_ratio(-value / batch, phi / batch)
        return -log_px, -iwae, (size > self.most).double(), *(part.to(dtype) for part in parts)


class Retuned:
    """Maximum likelihood by the estimator whose gradient has the least variance on the model at hand, tuned again now and then.

    Unbiased for IWAE with 128 terms. The gradient is that of the decoder's last bias, x - p(x | z), one number for each pixel.
    """

    shared = running_baseline = False
    TERMS, DATA, SAMPLES, EVERY = 128, 50, 256, 1000  # steps from one tuning to the next

    def __init__(self, cost: int) -> None:
        self.cost, self.steps, self.estimators = cost, 0, [""]
        self.objective = MaximumLikelihood(dohyo.MultilevelRR.at_cost(cost), k_draw="stratified", clip_datum=3.0)
        self.estimator = self.objective.estimator

    def __call__(self, model: Any, x: Tensor, *rest: Any) -> Any:
        if self.steps % self.EVERY == 1 and len(x) >= self.DATA:  # the first call is a trial
            with torch.no_grad(), torch.random.fork_rng():
                chosen = self.tuned(model, x[: self.DATA])
            self.objective = MaximumLikelihood(chosen, k_draw="stratified", clip_datum=3.0)
            self.estimators.append(str(chosen).partition(", law")[0].partition(", centre")[0])
        self.steps += 1
        return self.objective(model, x, *rest)

    def tuned(self, model: VAE, x: Tensor) -> dohyo.Estimator:
        every = x.repeat_interleave(self.SAMPLES, 0)
        q = model.posterior(model.encode(every))
        z = q.sample()
        log_w = model.log_joint(every, z) - q.log_prob(z)
        slopes = every - model.likelihood(z).mean
        log_w, slopes = (part.unflatten(0, (len(x), -1)).double() for part in (log_w, slopes))
        return dohyo.tune(log_w, self.cost, self.TERMS, slopes)

    def skip(self, generator: torch.Generator) -> None:
        """Nothing is shared between processes."""


def rows(cost: int) -> dict[str, Any]:
    sumo, multilevel = dohyo.SUMO.at_cost(cost), dohyo.MultilevelRR.at_cost(cost)
    return {
        "IWAE": MaximumLikelihood(dohyo.IWAE(cost), "dreg"),
        "IWAE at ten times the cost": MaximumLikelihood(dohyo.IWAE(10 * cost), "dreg"),  # what less bias can gain at all
        "SUMO, one K for the batch": MaximumLikelihood(sumo),
        "SUMO, one for each datum, clip-datum 3": MaximumLikelihood(sumo, k_draw="datum", clip_datum=3.0),
        "MultilevelRR, one for each datum, clip-datum 3": MaximumLikelihood(multilevel, k_draw="datum", clip_datum=3.0),
        "MultilevelRR, stratified": MaximumLikelihood(multilevel, k_draw="stratified"),
        "MultilevelRR, stratified, clip-datum 3": MaximumLikelihood(multilevel, k_draw="stratified", clip_datum=3.0),
        "MultilevelRR, stratified, only the correction clipped, at 1": Corrected(multilevel, k_draw="stratified"),
        "tuned again for the gradient's variance, stratified, clip-datum 3": Retuned(cost),
    }


def train(model: VAE, objective: Any, seed: int, epochs: int, rate: float, batch: int = 100) -> dict[str, Any]:
    """The last record."""
    clip = 20.0 if objective.estimator.depth_law.cap > 0 else 10.0
    config = LoopConfig(
        epochs=epochs, optimiser="adam", learning_rate=rate, epsilon=1e-8, schedule="cosine", clip_decoder=clip,
        clip_encoder=125.0, batch_size=batch, seed=seed, device="cpu",
    )  # fmt: skip
    *_, last = fit(model, load("digits").flat(), objective, config)
    return last


@lru_cache(maxsize=1)
def begun(cost: int, seed: int, after: int) -> VAE:
    """A model after so many epochs of IWAE, or at its start."""
    torch.manual_seed(seed)
    model = VAE(data=64, hidden=64, latent=16)
    model.start_from(load("digits").flat().train)
    if after:
        train(model, rows(cost)["IWAE"], seed, after, RATE)
    return model


def trained(objective: Any, cost: int, seed: int, epochs: int, rate: float, after: int, batch: int) -> dict[str, Any]:
    """One run, and its NLL of test and training data."""
    model = copy.deepcopy(begun(cost, seed, after))
    begin = time.perf_counter()
    torch.manual_seed(seed + after)
    last = train(model, objective, seed + after, epochs, rate, batch)
    found = {"seed": seed, "seconds": time.perf_counter() - begin, "clipped_data": last["clipped_data"]}
    found |= {"estimators": objective.estimators[1:]} if isinstance(objective, Retuned) else {}
    data = load("digits").flat()
    with torch.random.fork_rng():
        torch.manual_seed(123)
        images = {"train": data.train.bernoulli()[:500], "test": data.test.bernoulli()}
    nll = {name: -dohyo.evaluate(model, x, dohyo.IWAE(TERMS), khat_samples=0, seed=1).mean for name, x in images.items()}
    return found | nll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=int, nargs="+", default=[5, 15])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--rate", type=float, default=RATE, help="the learning rate, which falls by a cosine")
    parser.add_argument("--batch", type=int, default=100, help="data in a step")
    parser.add_argument("--after", type=int, default=0, help="epochs of IWAE before, at the default rate")
    parser.add_argument("--rows", nargs="+", default=list(rows(5)), help="names of rows; IWAE is the first")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    how = {"epochs": options.epochs, "rate": options.rate, "after": options.after, "batch": options.batch}
    config = environment() | how | {"test_terms": TERMS, "model": "VAE 64-64-64-16"}
    file = options.out / ("leads_digits_late.json" if options.after else "leads_digits.json")
    found: dict[str, Any] = {str(cost): {} for cost in options.costs}
    for seed in range(options.seeds):
        for cost in options.costs:
            for name in options.rows:
                own = found[str(cost)].setdefault(name, {"runs": []})
                own["runs"].append(trained(rows(cost)[name], cost, seed, **how))
                pairs = list(zip(own["runs"], found[str(cost)]["IWAE"]["runs"], strict=True))
                less = {split: [one[split] - iwae[split] for one, iwae in pairs] for split in ("test", "train")}
                for suffix, each in zip(("", "_train"), less.values(), strict=True):
                    own[f"less_iwae{suffix}"] = statistics.fmean(each)
                    own[f"stderr{suffix}"] = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
                last = ", ".join(
                    f"{split} {own['runs'][-1][split]:.3f}, less IWAE {each[-1]:+.3f}" for split, each in less.items()
                )
                print(f"cost {cost}, {name}, seed {seed}: {last}", flush=True)
                save(file, {"config": config, "costs": found})


if __name__ == "__main__":
    main()
