"""What phi should follow where theta follows annealed chains, and whether debiasing pays there: on one core.

Theta follows IWAE over 4 chains of 4 leapfrogs (MultilevelRR at the same cost in one row) in all runs; phi follows
    dreg, iwae    IWAE on as many fresh samples of the encoder, by DReG or as it is;
    annealed      the annealed bound itself, differentiated through the leapfrogs (as in uncorrected Hamiltonian annealing);
    wake          log q(z; x) of the chains' ends, weighted by their self-normalised weights (the wake phase);
    wake-16       the same with 16 chains;
    wake-fixed    the same, but chains start from the encoder as it was when the phase began.
Every run has as many epochs, after `--before` epochs of IWAE-5; its seconds are CPU time without these. The test NLL is by
annealed weights (16 leapfrogs, tuned) and by IWAE. Now and then a run records the mean of q's log standard deviation, the mean
step size of its chains and how far from q's mean they end. A run whose loss is not finite ends there. Rows are saved as they are
measured.
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import dohyo
from dohyo.annealing.chain import Bridge, Constants
from dohyo.annealing.whitening import whiten
from dohyo.lab.data import load
from dohyo.lab.training.chains import tune_chains
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood

from benchmarks.weights import environment, save

CHAINS, STEPS, BATCH, RATE, PILOT = 4, 4, 100, 2e-3, 60
SIZES: dict[str, Any] = {"digits": {"data": 64, "hidden": 64, "latent": 16}, "mnist": {}}
ROWS = ("dreg", "iwae", "annealed", "wake", "multilevel-rr")


class Density(torch.nn.Module):
    """log p(x, z) as a function, so that theta can be given as a constant."""

    def __init__(self, model: VAE) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.model.log_joint(x, z)


def loss_of_chains(model: VAE, x: Tensor, log_w: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Theta's loss, IWAE over chains with their ends held fixed; and the chains' self-normalised weights."""
    share = log_w.detach().view(len(x), -1).softmax(-1).flatten()
    own = x.repeat_interleave(len(log_w) // len(x), 0)
    return -(share * model.log_joint(own, z.detach())).sum() / len(x), share


def annealed_loss(chains: dohyo.Annealed, x: Tensor) -> Tensor:
    """Phi follows the bound through the leapfrogs, theta the ends of the same chains."""
    model: Any = chains.model
    rows = torch.arange(len(x)).repeat_interleave(CHAINS)
    density, own = Density(model), x[rows]
    constant = {name: parameter.detach() for name, parameter in density.named_parameters()}
    given: Any = chains.constants
    constants = Constants(*(getattr(given, name).float() for name in ("step", "bridge", "persistence", "widening")))
    constants.step.requires_grad_()  # or there would be no graph through the leapfrogs
    whitening = whiten(model.posterior(model.encode(x)[rows]), constants.widening)
    ends = Bridge(lambda z: functional_call(density, constant, (own, z)), whitening, constants, learning=True).forwards()
    log_w = torch.where(ends.alive, ends.log_ratio + functional_call(density, constant, (own, ends.z)), -torch.inf)
    return loss_of_chains(model, x, log_w, ends.z)[0] - (log_w.view(len(x), -1).logsumexp(-1) - math.log(CHAINS)).mean()


def wake_loss(chains: dohyo.Annealed, x: Tensor, count: int = CHAINS, fixed: dohyo.Annealed | None = None) -> Tensor:
    """Phi makes the chains' ends more probable under q."""
    model: Any = chains.model
    rows = torch.arange(len(x)).repeat_interleave(count)
    z, log_w = (fixed or chains).chains(x, rows)
    theta, share = loss_of_chains(model, x, log_w, z)
    log_q: Tensor = model.posterior(model.encode(x)[rows]).log_prob(z)
    return theta - (share * log_q).sum() / len(x)


def losses(row: str, chains: dohyo.Annealed) -> Any:
    if row == "wake-fixed":
        fixed = dohyo.Annealed(copy.deepcopy(chains.model), STEPS)
        fixed.model.decoder = chains.model.decoder  # theta moves, the encoder stays

        def loss(chains: dohyo.Annealed, x: Tensor) -> Tensor:
            fixed.constants = chains.constants
            return wake_loss(chains, x, fixed=fixed)

        return loss
    if row in ("annealed", "wake", "wake-16"):
        return {"annealed": annealed_loss, "wake": wake_loss, "wake-16": partial(wake_loss, count=16)}[row]
    estimator = dohyo.MultilevelRR.at_cost(CHAINS) if row == "multilevel-rr" else dohyo.IWAE(CHAINS)
    objective = MaximumLikelihood(estimator, "iwae" if row == "iwae" else "dreg")
    return lambda chains, x: objective(chains, x).loss


def steps(data: Any, loss_of: Any, model: VAE, epochs: int) -> Iterator[tuple[int, Tensor]]:
    """Train, and yield the number and the last loss of each epoch; stop after a loss that is not finite."""
    adam = torch.optim.Adam(model.parameters(), RATE)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(1, epochs), RATE / 100)
    for epoch in range(epochs):
        for index in torch.randperm(len(data.train)).split(BATCH):
            loss = loss_of(data.train_batch(index))
            if not bool(loss.isfinite()):
                yield epoch, loss.detach()
                return
            adam.zero_grad()
            loss.backward()
            adam.step()
        cosine.step()
        yield epoch, loss.detach()


def run(name: str, row: str, seed: int, before: int, epochs: int) -> dict[str, Any]:
    """Train one model and test it."""
    data = load(name)
    data = data.flat()
    torch.manual_seed(seed)
    model = VAE(**SIZES[name])
    model.start_from(data.train)
    first = MaximumLikelihood(dohyo.IWAE(5), "dreg")
    for _ in steps(data, lambda x: first(model, x).loss, model, before):
        pass
    chains = dohyo.Annealed(model, STEPS)
    loss_of = losses(row, chains)
    found: dict[str, Any] = {"row": row, "seed": seed, "epochs": epochs, "curve": []}

    def tune(epoch: int) -> None:
        if epoch & (epoch - 1) == 0:
            tune_chains(chains, data.train_batch(torch.randint(len(data.train), (PILOT,))), seed, first=epoch == 0)

    begun = time.thread_time()
    tune(0)
    for epoch, loss in steps(data, lambda x: loss_of(chains, x), model, epochs):
        if not bool(loss.isfinite()):
            return found | {"diverged": epoch + 1}
        if epochs <= 20 or epoch & (epoch + 1) == 0:
            found["curve"].append({"epoch": epoch + 1, "loss": float(loss)} | watched(chains, data.valid[:500]))
        tune(epoch + 1)
    found["seconds"] = time.thread_time() - begun
    x = data.test[:500]
    tested = dohyo.Annealed(model, 16)
    tested.tune(x, iterations=100, mixing=False)  # as the committed result was made
    annealed = dohyo.evaluate(tested, x, dohyo.IWAE(128), khat_samples=0)
    plain = dohyo.evaluate(model, x, dohyo.IWAE(500))
    return found | {
        "nll_annealed": -annealed.mean,
        "nll_iwae_500": -plain.mean,
        "khat_above_0.7": float((plain.khat > 0.7).double().mean()),
    }


@torch.no_grad()
def watched(chains: dohyo.Annealed, x: Tensor) -> dict[str, float]:
    """How wide q is, how long the steps are, how far ends are from where chains start, in q's standard deviations."""
    model: Any = chains.model
    q = model.posterior(model.encode(x))
    z, log_w = chains.chains(x, torch.arange(len(x)))
    far = ((z - q.mean) / q.stddev).square().mean().sqrt()
    return {
        "log_sd": float(q.stddev.log().mean()),
        "step": float(torch.as_tensor(chains.step).mean()),
        "end_in_sd": float(far),
        "elbo": float(dohyo.log_marginal(model, x, dohyo.ELBO(8)).mean()),
        "annealed_elbo": float(log_w.mean()),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each row its mean, and its paired difference from dreg with a standard error over seeds."""
    found: dict[str, Any] = {}
    for row in dict.fromkeys(run["row"] for run in runs):
        own = {run["seed"]: run for run in runs if run["row"] == row}
        done = {seed: run for seed, run in own.items() if "nll_annealed" in run}
        found[row] = {"runs": len(own), "diverged": len(own) - len(done)}
        keys = ("nll_annealed", "nll_iwae_500", "khat_above_0.7", "seconds")
        found[row] |= {key: statistics.fmean(run[key] for run in done.values()) for key in keys if done}
        base = {run["seed"]: run for run in runs if run["row"] == "dreg" and "nll_annealed" in run}
        less = [done[seed]["nll_annealed"] - base[seed]["nll_annealed"] for seed in done if seed in base]
        if row != "dreg" and len(less) > 1:
            found[row]["less_dreg"] = [statistics.fmean(less), statistics.stdev(less) / math.sqrt(len(less))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", default="digits", choices=list(SIZES))
    parser.add_argument("--before", type=int, default=0, help="epochs of IWAE-5 before")
    parser.add_argument("--epochs", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    known = {"data": options.data, "before": options.before, "epochs": options.epochs}
    config = environment() | known | {"chains": CHAINS, "steps": STEPS, "batch": BATCH, "learning_rate": RATE}
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        for row in options.rows:
            runs.append(run(options.data, row, seed, options.before, options.epochs))
            print({key: value for key, value in runs[-1].items() if key != "curve"}, runs[-1]["curve"][-1:], flush=True)
            save(options.out / "chain_encoders.json", {"config": config, "rows": summary(runs), "runs": runs})


if __name__ == "__main__":
    main()
