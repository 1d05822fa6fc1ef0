"""What annealing does for a trained VAE: weights of the encoder and of chains, at equal evaluations of p(x, z).

Each VAE is a file of parameters (`--parameters`, one or more); the data are MNIST's test images, other test images turned by 90
degrees, and OMNIGLOT characters. Chains are tuned on the images that are evaluated. The truth is by very long chains in two ways:
the log-mean of many weights, and MultilevelRR on chains of another length; their difference is in the result too. Chains of 64
and 128 leapfrogs are not long enough: for images unlike those of training, the posterior has modes that both miss. `--digits`
instead trains small VAEs on the bundled digits, where the encoder is good, and asks what a pilot that chooses by itself (auto)
costs.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dohyo
from dohyo import Annealed, MultilevelRR
from dohyo.files import plain
from dohyo.lab.data import load
from dohyo.models import VAE

from benchmarks.weights import environment, load_images, save, train_vae

STEPS = ("0", "4", "16", "auto")  # auto: chosen by the pilot
EVALUATIONS, BOUNDS = 1_000, 16  # of p(x, z) for one estimate of a datum; log-means of each
KHAT_WEIGHTS = 200
KINDS = ("mnist", "rotated", "omniglot")
TRUE_REPEATS = 4  # of MultilevelRR on the way to the truth
DIGITS_SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parameters", type=Path, nargs="*", default=[], help="state dicts of VAEs, or checkpoints that hold one"
    )
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of images")
    parser.add_argument("--images", type=int, default=200, help="of each kind")
    parser.add_argument("--truth", type=int, default=1_000_000, help="evaluations for each datum by each way to the truth")
    parser.add_argument("--long", type=int, nargs=2, default=(1024, 512), help="leapfrogs of the chains on these two ways")
    parser.add_argument("--known", type=Path, help="a result to take the truth of the same parameters and images from")
    parser.add_argument("--steps", nargs="+", default=STEPS, help="numbers of leapfrogs, 0 the first, or auto")
    parser.add_argument("--iterations", type=int, nargs="+", default=[400], help="of tuning; 0 leaves the constants plain")
    parser.add_argument("--repeats", type=int, default=64, help="unbiased estimates of each datum")
    parser.add_argument("--noise", type=int, default=2, help="seeds of tuning and weights, each with rows of its own")
    parser.add_argument("--digits", action="store_true", help="VAEs on the bundled digits instead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    parser.add_argument("--seed", type=int, default=0, help="of the images that are taken, and the first of the noise")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    if not options.parameters and not options.digits:
        parser.error("give --parameters FILE, or --digits")
    begin = time.perf_counter()
    file = "annealing_digits.json" if options.digits else "annealing_known.json" if options.known else "annealing.json"
    for found in all_digits(options) if options.digits else all_images(options):
        config = environment() | {
            "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
            "images": options.images,
            "seed": options.seed,
            "iterations": options.iterations,
            "evaluations": EVALUATIONS,
            "repeats": options.repeats,
            "bounds": BOUNDS,
            "khat_weights": KHAT_WEIGHTS,
            "seconds": time.perf_counter() - begin,
        }
        save(options.out / file, plain({"config": config, "models": found}))  # after each table, so that none is lost


def all_images(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each model a table for each kind of images; all that is known so far, again and again."""
    found: dict[str, Any] = {path.stem: {} for path in options.parameters}
    for path in options.parameters:
        torch.manual_seed(options.seed)
        model, of_each = load_vae(path).to(options.device), images(options.images, options.seed)
        for kind in options.kinds:
            known = json.loads(options.known.read_text())["models"][path.stem][kind]["truth"] if options.known else None
            found[path.stem][kind] = table(model, of_each[kind].to(options.device), known, options)
            show(f"{path.stem}, {kind}", found[path.stem][kind])
            yield found


def load_vae(path: Path) -> VAE:
    """The VAE whose parameters these are."""
    found = torch.load(path, weights_only=True, map_location="cpu")
    state = found.get("best", found)
    (hidden, data), latent = state["encoder.0.weight"].shape, state["decoder.0.weight"].shape[1]
    model = VAE(data, hidden, latent)
    model.load_state_dict(state)
    return model.requires_grad_(False).eval()


def images(count: int, seed: int) -> dict[str, Tensor]:
    """Binary images of each kind, `count` of them, chosen at random."""
    generator = torch.Generator().manual_seed(seed)
    mnist, omniglot = load("mnist").flat().test, load("omniglot").flat().test
    order = torch.randperm(len(mnist), generator=generator)
    turned = mnist[order[count : 2 * count]].view(-1, 28, 28).rot90(1, (1, 2)).reshape(count, -1)
    characters = omniglot[torch.randperm(len(omniglot), generator=generator)[:count]]
    return {"mnist": mnist[order[:count]], "rotated": turned, "omniglot": characters}


def table(model: VAE, x: Tensor, known: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """A row for each kind of weights and seed, with the truth that they are held against."""
    truth = known or the_truth(model, x, options)
    rows = []
    for seed in range(options.seed, options.seed + options.noise):
        of_seed: list[dict[str, Any]] = []
        for steps in options.steps:
            for iterations in options.iterations if steps != "0" else [0]:
                annealed, begin = Annealed(model, None if steps == "auto" else int(steps)), time.perf_counter()
                tuned = annealed.tune(x, iterations=iterations, seed=seed)
                tuning = {"iterations": iterations, "tuning_seconds": time.perf_counter() - begin, "bound": tuned.bound}
                of_seed.append({"seed": seed, "auto": steps == "auto"} | tuning | row(annealed, x, truth, seed, options.repeats))
        for one in of_seed:
            for name in ("iwae", "jackknife", "unbiased"):
                one[f"{name}_gain"] = of_seed[0][f"{name}_mse"] / one[f"{name}_mse"]
                one[f"{name}_median_gain"] = (of_seed[0][f"{name}_median_error"] / one[f"{name}_median_error"]) ** 2
        rows += of_seed
    return {"truth": truth, "rows": rows}


def the_truth(model: VAE, x: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """The mean log p(x), and how well it is known: the noise of the log-mean, and how far MultilevelRR is from it."""
    first, second = (Annealed(model, steps) for steps in options.long)
    for annealed in (first, second):
        annealed.tune(x, iterations=0, seed=options.seed)  # only the length of the steps: the chains are long enough for the rest
    log_w = weights(first, x, max(2, options.truth // first.evaluations_per_weight))
    n = log_w.shape[1]
    truth = log_w.logsumexp(-1) - math.log(n)
    variance = (log_w - truth[:, None]).exp().var(-1) / n  # of the log-mean, to first order; it is low by half of that
    each = options.truth / second.evaluations_per_weight / TRUE_REPEATS
    other = dohyo.evaluate(
        second, x, MultilevelRR.at_cost(max(3.0, each)), replicates=TRUE_REPEATS, khat_samples=0, seed=options.seed + 1
    )
    noise = float(variance.sum().sqrt() / len(x))
    return {
        "log_px": float(truth.mean()),
        "stderr": noise,
        "first_order_bias": -float(variance.mean() / 2),
        "khat_above_0.7": share(dohyo.diagnostics.khat(log_w)),
        "other": other.mean,
        "other_stderr": other.noise_stderr,
        "difference": other.mean - float(truth.mean()),
        "difference_in_stderr": (other.mean - float(truth.mean())) / math.hypot(noise, other.noise_stderr or math.nan),
        "leapfrogs": list(options.long),
        "evaluations": options.truth,
        "lost": first.lost + second.lost,
    }


def row(annealed: Annealed, x: Tensor, truth: dict[str, Any], seed: int, unbiased: int) -> dict[str, Any]:
    """One kind of weights: its tails, and the log-means, as they are and jackknifed (JVI), and unbiased estimates that
    `EVALUATIONS` buy, each against the truth.

    Squared errors are those of one estimate of the mean over the data. That of the log-means is finite. That of the unbiased
    estimate is as good as infinite where k-hat is above 0.5: rare weights decide what is seen of it, and the median error shows
    what is usual.
    """
    each, mean = annealed.evaluations_per_weight, truth["log_px"]
    estimators = {
        "iwae": (dohyo.IWAE(EVALUATIONS // each), BOUNDS),
        "jackknife": (dohyo.JVI(EVALUATIONS // each), BOUNDS),
        "unbiased": (MultilevelRR.at_cost(EVALUATIONS / each), unbiased),
    }
    found: dict[str, Any] = {"steps": annealed.steps, "evaluations_per_weight": each}
    for name, (estimator, repeats) in estimators.items():
        several = x.repeat(repeats, 1)  # a batch is one estimate of each datum
        values = dohyo.evaluate(annealed, several, estimator, khat_samples=0, seed=seed, batch_size=len(x)).per_datum
        errors = values.view(repeats, len(x)).mean(-1) - mean
        found |= {
            f"{name}_less_truth": float(errors.mean()),
            f"{name}_stated": float(errors.std()),
            f"{name}_mse": float(errors.square().mean()),
            f"{name}_median_error": float(errors.abs().median()),
            f"{name}_repeats": errors.tolist(),
        }
    found["bias_in_stated"] = found["unbiased_less_truth"] / found["unbiased_stated"]
    judged = dohyo.evaluate(
        annealed, x, estimator, replicates=2, khat_data=len(x), khat_samples=KHAT_WEIGHTS, seed=seed, batch_size=len(x)
    )
    khat = {"khat_above_0.7": share(judged.khat), "median_khat": float(judged.khat.nanmedian())}
    return found | khat | {"trusted": judged.verdict.trusted, "lost": annealed.lost}


def all_digits(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For several small VAEs, the variance times cost of what auto chooses in units of the encoder's."""
    found = {}
    for seed in range(options.seed, options.seed + DIGITS_SEEDS):
        torch.manual_seed(seed)
        train, held_out, _ = load_images("digits")
        model, steps = train_vae(train, minutes=0.2)
        model, x = model.to(options.device), held_out[:300].bernoulli().to(options.device)
        auto, encoder = Annealed(model), Annealed(model, 0)
        tuned = auto.tune(x, iterations=options.iterations[0], seed=seed)
        products = {name: variance_times_cost(one, x) for name, one in (("encoder", encoder), ("auto", auto))}
        found[f"seed {seed}"] = {
            "training_steps": steps,
            "chosen": tuned.steps,
            "khat_above_0.7": share(dohyo.diagnostics.khat(weights(encoder, x, 500))),
            **products,
            "ratio": 1.0 if tuned.steps == 0 else products["auto"] / products["encoder"],  # else it is the encoder itself
        }
        print(f"digits, seed {seed}: {found[f'seed {seed}']}", flush=True)
        yield {"digits": found}


def variance_times_cost(annealed: Annealed, x: Tensor) -> float:
    """Of MultilevelRR at `EVALUATIONS`, in a datum, stratified over its depth."""
    each = annealed.evaluations_per_weight
    estimator, log_w = MultilevelRR.at_cost(EVALUATIONS / each), weights(annealed, x, 16 * EVALUATIONS // each)
    found = dohyo.diagnostics.moments(estimator, log_w)
    return found.variance * found.cost * each


@torch.no_grad()
def weights(annealed: Annealed, x: Tensor, n: int) -> Tensor:
    """(data, n) float64 on the CPU."""
    source, most = annealed.bind(x), 2_000 if x.device.type == "cpu" else 200_000
    parts = [source(part).double().cpu() for part in dohyo.rows(torch.full((len(x),), n), x.device).split(most)]
    return torch.cat(parts).view(len(x), n)


def share(khat: Tensor) -> float:
    return float((khat > 0.7).double().mean())


def show(name: str, found: dict[str, Any]) -> None:
    truth = found["truth"]
    print(f"{name}: log p(x) {truth['log_px']:.3f} ± {truth['stderr']:.3f} by the log-mean of long chains; MultilevelRR differs "
          f"by {truth['difference']:+.3f}, {truth['difference_in_stderr']:+.1f} standard errors")  # fmt: skip
    print(
        " seed     steps  iterations  k-hat > 0.7  trusted  log-mean, gain  jackknife, gain  unbiased ± stated, gain, by medians"
    )
    for one in found["rows"]:
        name = f"{'auto ' if one['auto'] else ''}{one['steps']}"
        print(f"{one['seed']:5}  {name:>8}  {one['iterations']:10}  {one['khat_above_0.7']:11.0%}  {one['trusted']!s:>7}  "
              f"{one['iwae_less_truth']:+8.3f}, {one['iwae_gain']:4.1f}  "
              f"{one['jackknife_less_truth']:+9.3f}, {one['jackknife_gain']:4.1f}  {one['unbiased_less_truth']:+8.3f} ± "
              f"{one['unbiased_stated']:<6.3f}, {one['unbiased_gain']:4.1f}, {one['unbiased_median_gain']:4.1f}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
