"""Train the paper's VAE on the bundled 8x8 digits with IWAE and with SUMO at the same cost, and compare the two honestly.

Both runs go to demo/; every command is printed, so that it can be tried with other options.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import dohyo
from dohyo.lab.experiments.density import DensityRun

OUT = Path("demo")
COMMON = "--data digits --cost 15 --epochs 150 --test-terms 1000 --seed 0"


def command(line: str) -> None:
    print(f"\n$ dohyo {line}", flush=True)
    subprocess.run([sys.executable, "-m", "dohyo", *shlex.split(line)], check=True)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    table = Table(title="300 test digits under each model")
    for heading in ("trained with", "test NLL (IWAE-1000, a bound)", "NLL (unbiased)", "of which noise", "seconds"):
        table.add_column(heading, justify="right" if heading != "trained with" else "left")
    evaluations = {}
    for name in ("iwae", "sumo"):
        command(f"train {COMMON} --estimator {name} --out {OUT / name}")
        result = json.loads((OUT / name / "result.json").read_text(encoding="utf-8"))
        run = DensityRun.open(OUT / name)
        model, data = run.trained(), run.data
        evaluations[name] = dohyo.evaluate(model, data.test, dohyo.MultilevelRR.at_cost(50), replicates=10)
        unbiased = evaluations[name]
        table.add_row(
            f"{name}, cost 15",
            f"{result['test_nll']:.3f} ± {result['test_nll_stderr']:.3f}",
            f"{-unbiased.mean:.3f} ± {unbiased.stderr:.3f}",
            f"{unbiased.noise_stderr:.3f}",
            f"{result['seconds']:.0f}",
        )
    command(f"evaluate {OUT / 'sumo'} --estimator multilevel-rr --cost 50 --replicates 4")
    command(f"sample {OUT / 'sumo'} --count 64 --out {OUT / 'samples.png'}")
    found = dohyo.compare(evaluations["sumo"], evaluations["iwae"])
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        f"log p(x) under the model trained with SUMO minus that with IWAE, paired: {found.difference:+.3f} ± {found.stderr:.3f}"
    )
    console.print(
        f"pictures: {OUT / 'samples.png'}, and learning_curves.png and reconstructions.png in {OUT}/iwae and {OUT}/sumo"
    )


if __name__ == "__main__":
    main()
