r"""A posterior over parameters by stochastic-gradient Langevin dynamics (Welling and Teh 2011), and what a bound makes of it.

z ~ N(theta, 1) and x | z ~ N(z, 1), so x ~ N(theta, 2); with theta ~ N(0, 1) the posterior of theta given N data is Gaussian and
known. A chain sees a minibatch of n data at each step, and estimates of their scores by a proposal q(z; x) that stays as it is:

    theta <- theta + step / 2 (N / n  sum of scores - theta) + sqrt(step) N(0, 1)

The true score is linear in theta, so with unbiased scores the chain's mean is exactly right, and step and noise widen it by a
known factor. The ELBO's score is linear too, with the wrong slope: it takes z for seen, and theta for twice as well known as it
is. Run this file; it writes langevin.png and, with every number, langevin.json.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import dohyo
from dohyo.lab.plots.picture import write_picture

DATA, MINIBATCH, STEP, BURN_IN = 20, 10, 0.01, 200
ESTIMATORS = (dohyo.MultilevelRR.at_cost(9), dohyo.IWAE(9), dohyo.ELBO(9))
COLOURS = {"multilevel-rr": "tab:green", "iwae": "tab:orange", "elbo": "tab:red"}


class Chains(nn.Module):
    """The linear-Gaussian model with one theta for each chain; x holds the chains' data one after another."""

    def __init__(self, chains: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(chains, dtype=torch.float64))

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        theta, x = self.theta[rows // (len(x) // len(self.theta))], x[rows]
        sd, noise = math.sqrt(2 / 3), torch.randn_like(x)
        z = x / 2 + sd * noise  # q has the mean of p(z | x) for theta = 0, where the chains begin, and is a little wider
        log_p = -(z - theta).square() / 2 - (x - z).square() / 2 - math.log(2 * math.pi)
        return log_p + noise.square() / 2 + math.log(sd) + math.log(2 * math.pi) / 2


def gaussians(x: Tensor) -> dict[str, tuple[float, float]]:
    """Mean and precision of the posterior, and of what the ELBO's scores, q's mean less theta, put in its place."""
    exact, elbo = 1 + len(x) / 2, 1.0 + len(x)
    return {"exact": (float(x.sum()) / 2 / exact, exact), "elbo": (float(x.sum()) / 2 / elbo, elbo)}


def sample(estimator: dohyo.Estimator, x: Tensor, chains: int, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """(steps, chains) values of theta, and the estimated gradients of the log posterior there."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    model, path = Chains(chains), []
    for _ in range(BURN_IN + steps):
        minibatch = x[torch.rand(chains, len(x)).argsort(-1)[:, :MINIBATCH]]
        theta = model.theta.detach().clone()
        gradient = len(x) / MINIBATCH * dohyo.score(model, minibatch.flatten(), estimator, generator)["theta"] - theta
        path.append((theta, gradient))
        model.theta.data = theta + STEP / 2 * gradient + math.sqrt(STEP) * torch.randn_like(theta)
    thetas, gradients = zip(*path[BURN_IN:], strict=True)
    return torch.stack(thetas), torch.stack(gradients)


def widened(mean: float, precision: float, theta: Tensor, gradient: Tensor) -> Tensor:
    """The variance of a chain whose drift is precision (mean - theta), from the noise of its scores; (chains,).

    With r = step precision / 2, stationary v satisfy v = (1 - r)^2 v + step + step^2 / 4 E[noise^2].
    """
    noise = (gradient - precision * (mean - theta)).square().mean(0)
    return (1 + STEP * noise / 4) / (precision * (1 - STEP * precision / 4))


def summary(estimator: dohyo.Estimator, x: Tensor, theta: Tensor, gradient: Tensor) -> dict[str, Any]:
    """Mean and standard deviation with errors from the chains, which are independent; and every chain's own numbers."""
    means, variances = theta.mean(0), (theta - theta.mean()).square().mean(0)
    sd, root = float(variances.mean().sqrt()), math.sqrt(theta.shape[1])
    found = {
        "estimator": dohyo.to_dict(estimator),
        "kind": estimator.kind,
        "mean": float(means.mean()),
        "mean_stderr": float(means.std()) / root,
        "sd": sd,
        "sd_stderr": float(variances.std()) / root / (2 * sd),
        "chains": {"mean": means.tolist()},
    }
    own = gaussians(x).get("exact" if estimator.target_terms == math.inf else estimator.name)
    if own is not None:  # its drift is linear and known, so that its variance is too
        about, expected = (theta - own[0]).square().mean(0), widened(*own, theta, gradient)
        found["expected_sd"] = float(expected.mean().sqrt())
        found["chains"] |= {"variance": about.tolist(), "expected_variance": expected.tolist()}
    return found


def draw(numbers: dict[str, Any], paths: dict[str, Tensor], path: Path) -> None:
    mean, precision = numbers["posteriors"]["exact"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    at = torch.linspace(mean - 5 / math.sqrt(precision), mean + 4 / math.sqrt(precision), 200)
    density = (precision / (2 * math.pi)) ** 0.5 * (-precision * (at - mean).square() / 2).exp()
    axes.plot(at, density, color="black", linewidth=2, label=f"exact posterior: {mean:.3f}")
    for name, theta in paths.items():
        row, options = numbers["found"][name], {"bins": 60, "density": True, "histtype": "step", "color": COLOURS[name]}
        axes.hist(theta.flatten().numpy(), label=f"{name}: {row['mean']:.3f} ± {row['mean_stderr']:.3f}", **options)
    axes.set(xlabel="theta", ylabel="density", title="Langevin dynamics on scores of equal cost")
    axes.set_xlim(float(at[0]), float(at[-1]))
    axes.legend()
    write_picture(figure, numbers, path)


def main(out: Path, chains: int = 100, steps: int = 400, seed: int = 0) -> dict[str, Any]:
    started = time.monotonic()
    x = 1 + math.sqrt(2) * torch.randn(DATA, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    paths, found = {}, {}
    for estimator in ESTIMATORS:
        theta, gradient = sample(estimator, x, chains, steps, seed)
        paths[estimator.name], found[estimator.name] = theta, summary(estimator, x, theta, gradient)
    mean, precision = gaussians(x)["exact"]
    print(f"{'scores from':14} {'cost':>5}   mean of theta      standard deviation")
    print(f"{'(the truth)':14} {'':>5}   {mean:.3f}              {precision**-0.5:.3f}")
    for estimator in ESTIMATORS:
        row = found[estimator.name]
        values = f"{row['mean']:.3f} ± {row['mean_stderr']:.3f}      {row['sd']:.3f} ± {row['sd_stderr']:.3f}"
        known = f"   ({row['expected_sd']:.3f} by its own drift, step and noise)" if "expected_sd" in row else ""
        print(f"{estimator.name:14} {estimator.expected_cost:5.1f}   {values}{known}")
    config = {"data": x.tolist(), "minibatch": MINIBATCH, "step": STEP, "burn_in": BURN_IN}
    config |= {"chains": chains, "steps": steps, "seed": seed, "dohyo": dohyo.__version__, "torch": torch.__version__}
    numbers = {"config": config, "posteriors": gaussians(x), "found": found, "seconds": time.monotonic() - started}
    draw(numbers, paths, out / "langevin.png")
    print(f"picture and numbers: {out / 'langevin.png'}, {out / 'langevin.json'}")
    return numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/langevin"), help="the folder to write to")
    parser.add_argument("--steps", type=int, default=400, help="steps of each chain")
    parser.add_argument("--chains", type=int, default=100, help="independent chains")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small: more threads would only wait for one another
    main(**vars(options))
