r"""From how many data on is theta's gradient by an unbiased estimator nearer the truth than IWAE's at the same cost?

IWAE's gradient has a bias b, the same in every step, and less noise: a mean over N data is off by :math:`|b|^2 + V_{IWAE} / N` in
mean square, an unbiased one by :math:`V / N`. So the unbiased one is ahead from :math:`N^* = (V - V_{IWAE}) / |b|^2` data on, be
they a batch or, where the learning rate falls, all steps near the end. "Unbiased" is for IWAE with `--cap` terms here, and b is
measured from there: the models' weights are too heavy-tailed for more. Lengths are in the metric of the diagonal of the Fisher
information, in which a step of Newton's would be short or long, by random projections of all the decoder's parameters; variances
are stratified over K. The VAE is that of the paper on MNIST, or a small one on the digits, trained by IWAE-5 with DReG; it is
measured after each number of epochs in `--epochs`, on training images.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

import dohyo
from dohyo.diagnostics import components, moments
from dohyo.estimators import Estimator
from dohyo.lab import LoopConfig, fit
from dohyo.lab.data import load
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood

from benchmarks.weights import environment, save

COSTS = (5, 15, 50)
FLOOR = 1e-3  # of the mean Fisher information: what no parameter is below
CHUNK = 20  # data at a time
SIZES = {"digits": (64, 64, 16, 2e-3), "mnist": (784, 200, 50, 1e-3)}  # data, hidden, latent, learning rate


class Joint(nn.Module):
    """log p(x, z) as a module, whose parameters can be replaced."""

    def __init__(self, model: VAE) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.model.log_joint(x, z)


def estimators(cost: int, cap: int, log_w: Tensor, slopes: Tensor) -> dict[str, Estimator]:
    """The unbiased estimators at this cost, the last tuned on a pilot for the gradient's variance."""
    found: dict[str, Estimator] = {
        cls.__name__: cls.at_cost(cost, cap) for cls in (dohyo.SUMO, dohyo.SymmetricSUMO, dohyo.MultilevelRR)
    }
    return found | {"tuned": dohyo.tune(log_w, cost, cap, slopes)}


def fisher(model: VAE, x: Tensor, terms: int) -> dict[str, Tensor]:
    """The diagonal of the empirical Fisher information of the decoder's parameters, by scores of IWAE with this many terms."""
    named = {name: p for name, p in model.named_parameters() if name.startswith("decoder")}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for datum in x.split(1):
        score = torch.autograd.grad(dohyo.log_marginal(model, datum, dohyo.IWAE(terms)).sum(), list(named.values()))
        for name, part in zip(named, score, strict=True):
            total[name] += part.square() / len(x)
    mean = sum(float(part.sum()) for part in total.values()) / sum(part.numel() for part in total.values())
    return {name: part + FLOOR * mean for name, part in total.items()}


def bank(model: VAE, x: Tensor, samples: int, projections: int) -> tuple[Tensor, Tensor]:
    """Log-weights (data, samples), and their derivatives along random directions in the metric (data, samples, projections)."""
    metric = fisher(model, x, samples)
    names = {f"model.{name}": p.detach() for name, p in model.named_parameters() if name.startswith("decoder")}
    along = [
        {f"model.{name}": torch.randn_like(part) / (part * projections).sqrt() for name, part in metric.items()}
        for _ in range(projections)
    ]
    joint, weights, slopes = Joint(model), [], []
    with torch.no_grad():
        for own in x.split(CHUNK):
            rows = own.repeat_interleave(samples, 0)
            q = model.posterior(model.encode(rows))
            z = q.sample()
            log_q = q.log_prob(z)

            def log_p(given: dict[str, Tensor], rows: Tensor = rows, z: Tensor = z) -> Tensor:
                return torch.as_tensor(functional_call(joint, given, (rows, z)))

            weights.append((log_p(names) - log_q).view(len(own), samples))
            slopes.append(torch.stack([jvp(log_p, (names,), (each,))[1] for each in along], -1).view(len(own), samples, -1))
    return torch.cat(weights).double(), torch.cat(slopes).double()


def squared_bias(iwae: Estimator, cap: int, log_w: Tensor, slopes: Tensor) -> tuple[float, float]:
    """|b|^2 of the mean gradient over all data, of which these are a sample, and its standard error by the jackknife."""
    width = log_w.shape[1] // cap * cap

    def mean(terms: int) -> Tensor:  # (projections, data): over disjoint blocks of so many weights
        estimator = dohyo.IWAE(terms)
        blocks, grads = (part[:, : width // terms * terms].unflatten(1, (-1, terms)) for part in (log_w, slopes))
        return components(estimator.paths, blocks, grads)[..., 0].mean(-1)

    bias = mean(int(iwae.expected_cost)) - mean(cap)
    count = bias.shape[1]

    def norm(own: Tensor) -> Tensor:  # without what the scatter of the data adds
        return (own.mean(-1).square() - own.var(-1) / own.shape[-1]).sum(0)

    without = torch.stack([norm(torch.cat([bias[:, :i], bias[:, i + 1 :]], 1)) for i in range(count)])
    return float(norm(bias)), float(((count - 1) * without.var(correction=0)).sqrt())


def measured(model: VAE, x: Tensor, samples: int, cap: int, projections: int) -> dict[str, Any]:
    log_w, slopes = bank(model, x, samples, projections)
    half = len(x) // 2  # the pilot of the tuned estimator; all are measured on the other half, the bias on all
    found: dict[str, Any] = {}
    for cost in COSTS:
        iwae = dohyo.IWAE(cost)
        bias, error = squared_bias(iwae, cap, log_w, slopes)
        noise = moments(iwae, log_w[half:], slopes[half:]).gradient_variance or 0.0
        rows = {}
        for name, estimator in estimators(cost, cap, log_w[:half], slopes[:half]).items():
            variance = moments(estimator, log_w[half:], slopes[half:]).gradient_variance or 0.0
            ahead_from = (variance - noise) / bias if bias > 2 * error else None
            rows[name] = {"variance": variance, "ahead_from": ahead_from, "estimator": dohyo.to_dict(estimator)}
            print(f"  cost {cost}, {name}: variance {variance:.3g} (IWAE {noise:.3g}), ahead from", ahead_from, flush=True)
        found[str(cost)] = {"squared_bias": bias, "squared_bias_stderr": error, "iwae_variance": noise, "unbiased": rows}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=tuple(SIZES), default="digits")
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 50, 500])
    parser.add_argument("--images", type=int, default=400, help="training images that are measured on")
    parser.add_argument("--samples", type=int, default=1024, help="log-weights of each")
    parser.add_argument("--cap", type=int, default=256, help="terms")
    parser.add_argument("--projections", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    options = parser.parse_args()
    size, hidden, latent, rate = SIZES[options.data]
    data = load(options.data).flat()
    config = environment() | {key: value for key, value in vars(options).items() if key != "out"}
    config |= {"model": f"VAE {size}-{hidden}-{hidden}-{latent}, IWAE-5 with DReG, Adam {rate:g}, one cosine for each length"}
    found: dict[str, Any] = {}
    for epochs in options.epochs:
        torch.manual_seed(options.seed)
        model = VAE(size, hidden, latent)
        model.start_from(data.train)
        how = LoopConfig(
            epochs=epochs, optimiser="adam", learning_rate=rate, epsilon=1e-8, schedule="cosine", seed=options.seed, device="cpu"
        )
        *_, last = fit(model, data, MaximumLikelihood(dohyo.IWAE(5), "dreg"), how)
        print(f"{options.data}, {epochs} epochs: validation NLL {last['valid_nll']:.2f}", flush=True)
        torch.manual_seed(options.seed)
        x = data.train[torch.randperm(len(data.train))[: options.images]].bernoulli()
        seen = epochs * len(data.train)
        costs = measured(model, x, options.samples, options.cap, options.projections)
        found[str(epochs)] = {"images_seen": seen, "valid_nll": last["valid_nll"], "costs": costs}
        save(options.out / f"noise_and_bias_{options.data}.json", {"config": config, "epochs": found})


if __name__ == "__main__":
    main()
