"""What annealing does for a trained VAE: weights of the encoder and of chains, at equal evaluations of p(x, z).

The VAE is a file of parameters or a run folder (`--parameters`); the data are MNIST's test images, other test images turned by 90
degrees, and OMNIGLOT characters. The truth is by long chains of two kinds, whose difference is in the result too.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dohyo
from dohyo import Annealed, MultilevelRR
from dohyo.annealing import Constants
from dohyo.diagnostics import khat
from dohyo.evaluation import summarise
from dohyo.lab.data import load
from dohyo.lab.training.state import load_checkpoint
from dohyo.models import VAE

from benchmarks.weights import environment, save

STEPS = (0, 4, 16)
EVALUATIONS, REPEATS = 1_000, 8  # of p(x, z) for one estimate of a datum; estimates of each
KHAT_WEIGHTS, TRUTH_EVALUATIONS, LONG = 200, 12_000, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=Path, required=True, help="a state dict of a VAE, or the folder of a run")
    parser.add_argument("--images", type=int, default=64, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the images that are taken and of all noise")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    model, begin = load_vae(options.parameters), time.process_time()
    torch.manual_seed(options.seed)
    tables = {}
    for name, x in images(options.images, options.seed).items():
        tables[name] = table(model, x)
        show(name, tables[name])
    config = environment() | {
        "parameters": options.parameters.name,
        "images": options.images,
        "seed": options.seed,
        "evaluations": EVALUATIONS,
        "repeats": REPEATS,
        "khat_weights": KHAT_WEIGHTS,
        "cpu_seconds": time.process_time() - begin,
    }
    save(options.out / "annealing.json", {"config": config, "tables": tables})


def load_vae(path: Path) -> VAE:
    """The VAE whose parameters these are."""
    found: Any = load_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=True, map_location="cpu")
    state = found.get("best", found)
    (hidden, data), latent = state["encoder.0.weight"].shape, state["decoder.0.weight"].shape[1]
    model = VAE(data, hidden, latent)
    model.load_state_dict(state)
    return model.requires_grad_(False).eval()


def images(count: int, seed: int) -> dict[str, Tensor]:
    """Binary images of each kind, `count` of them, chosen at random."""
    generator = torch.Generator().manual_seed(seed)
    mnist, omniglot = load("mnist").test, load("omniglot").test
    order = torch.randperm(len(mnist), generator=generator)
    turned = mnist[order[count : 2 * count]].view(-1, 28, 28).rot90(1, (1, 2)).reshape(count, -1)
    characters = omniglot[torch.randperm(len(omniglot), generator=generator)[:count]]
    return {"mnist": mnist[order[:count]], "rotated": turned, "omniglot": characters}


def table(model: VAE, x: Tensor) -> dict[str, Any]:
    """A row for each kind of weights, with the truth that they are held against."""
    kinds = {steps: Annealed(model, steps) for steps in STEPS}
    seconds = {}
    for steps, annealed in kinds.items():
        begin = time.process_time()
        annealed.tune(x)
        seconds[steps] = time.process_time() - begin
    longs = [Annealed(model, constants=Constants.plain(LONG)), kinds[STEPS[-1]]]
    means = [log_mean(weights(one, x, TRUTH_EVALUATIONS // one.evaluations_per_weight)) for one in longs]
    truth, delta = torch.stack(means).logsumexp(0) - math.log(2), means[0] - means[1]
    rows = [row(annealed, x, truth) | {"tuning_cpu_seconds": seconds[steps]} for steps, annealed in kinds.items()]
    for one in rows:
        one["gain"] = rows[0]["mse"] / one["mse"]
    agreement = {"difference": float(delta.mean()), "stderr": float(delta.std() / math.sqrt(len(delta)))}
    return {"truth": float(truth.mean()), "truth_by": [f"{LONG} leapfrogs", f"{STEPS[-1]} leapfrogs"], **agreement, "rows": rows}


def row(annealed: Annealed, x: Tensor, truth: Tensor) -> dict[str, Any]:
    """One kind of weights: its tails, the bound and the unbiased estimate that `EVALUATIONS` buy."""
    terms = EVALUATIONS // annealed.evaluations_per_weight
    log_w = weights(annealed, x, max(KHAT_WEIGHTS, terms))
    blocks = log_w[:, : log_w.shape[1] // terms * terms].unflatten(1, (-1, terms))
    estimator = MultilevelRR.at_cost(EVALUATIONS / annealed.evaluations_per_weight)
    found = [dohyo.log_marginal(annealed, x, estimator, torch.Generator().manual_seed(i), max_rows=2000) for i in range(REPEATS)]
    values, shape = torch.stack(found, -1), khat(log_w[:, :KHAT_WEIGHTS])
    unbiased = summarise(values, estimator, 0, shape)
    return {
        "steps": annealed.steps,
        "evaluations_per_weight": annealed.evaluations_per_weight,
        "log_w_variance": float(log_w.var(-1).mean()),
        "khat_above_0.7": float((shape > 0.7).double().mean()),
        "iwae_less_truth": float(log_mean(blocks).mean() - truth.mean()),
        "unbiased_less_truth": unbiased.mean - float(truth.mean()),
        "noise_stderr": unbiased.noise_stderr,
        "mse": float((values - truth[:, None]).square().mean()),
        "lost": annealed.lost,
    }


@torch.no_grad()
def weights(annealed: Annealed, x: Tensor, n: int) -> Tensor:
    """(data, n) float64."""
    source = annealed.bind(x)
    parts = [source(part) for part in dohyo.rows(torch.full((len(x),), n)).split(2000)]
    return torch.cat(parts).view(len(x), n).double()


def log_mean(log_w: Tensor) -> Tensor:
    return log_w.logsumexp(-1) - math.log(log_w.shape[-1])


def show(name: str, found: dict[str, Any]) -> None:
    agreement = f"long chains of two kinds differ by {found['difference']:+.2f} ± {found['stderr']:.2f}"
    print(f"{name}: log p(x) {found['truth']:.2f}, {agreement}")
    print("steps  var log w  k-hat > 0.7  IWAE less truth  unbiased less truth  mean squared error  gain")
    for one in found["rows"]:
        noise = f"{one['unbiased_less_truth']:+.2f} ± {one['noise_stderr']:.2f}"
        print(
            f"{one['steps']:5}  {one['log_w_variance']:9.1f}  {one['khat_above_0.7']:11.0%}  {one['iwae_less_truth']:+15.2f}  "
            f"{noise:>19}  {one['mse']:18.3g}  {one['gain']:4.1f}"
        )


if __name__ == "__main__":
    main()
