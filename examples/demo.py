"""What the library is for, in two minutes: log p(x) of a trained model, and a place where a bound fails outright.

1. A VAE is trained on the bundled 8x8 digits. Its log p(x) on the test digits is then estimated by the ELBO, by IWAE with more
   and more samples, and by an unbiased estimator at the same costs, beside the best value known: a bound from many samples.
2. A model is fitted to the funnel by reverse KL, which *minimises* log p(x). A lower bound in its place is driven towards minus
   infinity; an unbiased estimate is not.

Everything goes to demo/; every command is printed, so that it can be tried with other options.
"""

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import dohyo
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.folder import read_records
from dohyo.lab.plots.picture import BLACK, BLUE, RED, tidy, write_picture

OUT = Path("demo")
BEST = 5_000  # samples of the best bound
COSTS = (5, 15, 50)
FUNNEL = ("--target funnel --cost 15 --steps 600 --hidden 50 --latent 2 --learning-rate 5e-3 --check-every 50 --check-draws 200 "
          "--check-terms 200 --test-draws 500 --test-terms 500 --on-divergence continue")  # fmt: skip


def command(line: str) -> None:
    print(f"\n$ dohyo {line}", flush=True)
    subprocess.run([sys.executable, "-m", "dohyo", *shlex.split(line)], check=True)


def main() -> None:
    started = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    console = Console(width=None if sys.stdout.isatty() else 120)
    command(f"train --data digits --estimator multilevel-rr --cost 15 --epochs 60 --test-terms 1000 --out {OUT / 'digits'}")
    run = DensityRun.open(OUT / "digits")
    found = measured(run.trained(), run.data.test)
    show(found, console)
    plot_bounds(found, OUT / "bounds.png")
    for name in ("iwae", "multilevel-rr"):
        command(f"reverse-kl --estimator {name} {FUNNEL} --out {OUT / f'funnel-{name}'}")
    plot_funnel(OUT / "funnel.png")
    command(f"report {OUT / 'digits'} {OUT / 'funnel-iwae'} {OUT / 'funnel-multilevel-rr'} --out {OUT / 'report.html'}")
    console.print(f"\npictures: {OUT / 'bounds.png'} and {OUT / 'funnel.png'}; {time.monotonic() - started:.0f} s in all")


def measured(model: Any, x: Any) -> list[dict[str, Any]]:
    """log p(x) of the same data by every estimator. The errors are the estimator's own: the data are the same for all."""
    estimators: list[tuple[str, dohyo.Estimator, int]] = [("ELBO", dohyo.ELBO(15), 10)]
    estimators += [(f"IWAE-{k}", dohyo.IWAE(k), 10) for k in (2, 5, 15, 50, 150)]
    estimators += [(f"unbiased, cost {cost}", dohyo.MultilevelRR.at_cost(cost), 40) for cost in COSTS]
    estimators += [(f"IWAE-{BEST:,}", dohyo.IWAE(BEST), 2)]
    found = []
    for name, estimator, replicates in estimators:
        one = dohyo.evaluate(model, x, estimator, replicates=replicates, khat_data=0)
        found.append({"name": name, "cost": 1 if name == "ELBO" else estimator.expected_cost, "mean": one.mean,
                      "noise": one.noise_stderr, "kind": one.kind})  # fmt: skip
    return found


def show(found: list[dict[str, Any]], console: Console) -> None:
    best = found[-1]
    table = Table(title="mean log p(x) of 300 test digits, nats; the error is the estimator's own")
    for heading in ("estimator", "log p(x)", "below the best known", "kind"):
        table.add_column(heading, justify="left" if heading in ("estimator", "kind") else "right")
    for one in found:
        gap = f"{best['mean'] - one['mean']:+.3f}" if one is not best else "the best known"
        table.add_row(one["name"], f"{one['mean']:.3f} ± {one['noise']:.3f}", gap, one["kind"])
    console.print(table)


def plot_bounds(found: list[dict[str, Any]], path: Path) -> None:
    best = found[-1]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.axhline(best["mean"], color=BLACK, linestyle="--", label=f"the best value known, {best['name']}")
    for kind, colour, label in (("lower bound", RED, "bounds: ELBO and IWAE"), ("unbiased", BLUE, "unbiased: MultilevelRR")):
        own = [one for one in found[:-1] if one["kind"] == kind]
        errors = [2 * one["noise"] for one in own]
        line = "-" if kind == "lower bound" else ""
        axis.errorbar([one["cost"] for one in own], [one["mean"] for one in own], errors, color=colour, marker="o", capsize=4,
                      linestyle=line, label=label)  # fmt: skip
    axis.set(xscale="log", xlabel="samples of z for each estimate", ylabel="mean log p(x), nats",
             title="Bounds climb towards log p(x); the unbiased estimate is there at once")  # fmt: skip
    axis.legend(loc="lower right")
    tidy(axis)
    write_picture(figure, {"found": found}, path)


def plot_funnel(path: Path) -> None:
    runs = {name: read_records(OUT / f"funnel-{name}") for name in ("iwae", "multilevel-rr")}
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    numbers = {}
    titles = {"iwae": "IWAE-15, a lower bound: it fails", "multilevel-rr": "MultilevelRR at cost 15, unbiased"}
    for axis, (name, records) in zip(figure.subplots(1, 2), runs.items(), strict=True):
        numbers[name] = {key: [record[key] for record in records] for key in ("step", "estimate", "reverse_kl")}
        steps = numbers[name]["step"]
        axis.axhspan(-1e12, 0, color="0.93", zorder=0)
        axis.plot(steps, numbers[name]["estimate"], color=RED, marker=".", label="what training believes")
        axis.plot(steps, numbers[name]["reverse_kl"], color=BLACK, marker=".", label="the truth")
        low = min(value for value in numbers[name]["estimate"] + numbers[name]["reverse_kl"] if value is not None)
        high = max(value for value in numbers[name]["estimate"] + numbers[name]["reverse_kl"] if value is not None)
        if low < -10:
            axis.set_yscale("symlog", linthresh=1)
        axis.set_ylim(min(low * 1.5, -0.1), max(high * 1.5, 1))
        axis.set(xlabel="step", title=titles[name])
        axis.set_ylabel("reverse KL to the funnel, nats" if name == "iwae" else "")
        axis.legend(loc="center right")
        tidy(axis)
    figure.suptitle("No KL divergence can be below zero (grey)", fontsize=10)
    write_picture(figure, numbers, path)


if __name__ == "__main__":
    main()
