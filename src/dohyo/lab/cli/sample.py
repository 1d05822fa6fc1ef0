"""`dohyo sample`: pictures of a trained model's samples and reconstructions."""

from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from dohyo.errors import DohyoError, check_seed
from dohyo.lab.cli.screen import say
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.parsing import Parser
from dohyo.lab.plots.picture import check_picture
from dohyo.lab.plots.runs import plot_images, plot_reconstructions

_EXAMPLES = """examples:
  dohyo sample runs/a --count 64 --out samples.png
  dohyo sample runs/a --count 16 --reconstruct --out reconstructions.png
"""


_MOST = 10_000  # a picture of more would show nothing


def parser() -> Parser:
    made = Parser(description="A picture of samples from a trained model.", epilog=_EXAMPLES)
    made.add_argument("run", type=Path, help="a run's folder")
    made.add_argument("--count", type=int, default=64, help="how many to draw")
    made.add_argument("--out", type=Path, default=Path("samples.png"), help="the picture; its numbers go beside it as JSON")
    made.add_argument("--reconstruct", action="store_true", help="test data above their reconstructions instead")
    made.add_argument("--seed", type=int, default=0, help="the seed of the samples")
    return made


def run(options: Namespace) -> int:
    if not 1 <= options.count <= _MOST:
        raise DohyoError(f"--count is {options.count}; it must be from 1 to {_MOST}")
    check_seed("--seed", options.seed)
    check_picture(options.out)
    trained = DensityRun.open(options.run)
    model: Any = trained.trained()
    needed, data = "reconstruct" if options.reconstruct else "sample_mean", trained.data
    if not hasattr(model, needed):
        raise DohyoError(f"{type(model).__name__} has no method {needed}; write one (see dohyo.models.LatentVariableModel)")
    torch.manual_seed(options.seed)
    with torch.no_grad():
        if options.reconstruct:
            x = data.test[: options.count]
            plot_reconstructions(x, model.reconstruct(x), data.shape, options.out)
        else:
            plot_images(model.sample_mean(options.count), data.shape, options.out)
    say(f"written: {options.out}")
    return 0
