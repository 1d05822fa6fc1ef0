"""`dohyo sample`: a picture of a trained model's samples or reconstructions."""

from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from dohyo.errors import DohyoError
from dohyo.lab.cli.screen import say
from dohyo.lab.experiments.density import SAMPLED, DensityRun
from dohyo.lab.parsing import Parser
from dohyo.lab.plots.picture import check_picture
from dohyo.lab.plots.runs import is_image, plot_images, plot_reconstructions
from dohyo.lab.plots.tables import plot_columns

_EXAMPLES = """examples:
  dohyo sample runs/a --count 64 --out samples.png
  dohyo sample runs/a --count 16 --reconstruct --out reconstructions.png
"""
_MOST = 10_000  # a picture of more would show nothing


def parser() -> Parser:
    made = Parser(description="A picture of samples from a trained model.", epilog=_EXAMPLES)
    made.add_argument("run", type=Path, help="a run's folder")
    made.add_argument("--count", type=int, help="how many to draw; by default 64, or 1000 for a table")
    made.add_argument("--out", type=Path, default=Path("samples.png"), help="the picture; its numbers go beside it as JSON")
    made.add_argument("--reconstruct", action="store_true", help="test data above their reconstructions instead")
    made.add_argument("--average", action="store_true", help="of the averaged parameters (train --average) instead of the best")
    made.add_argument("--seed", type=int, default=0, help="the seed of the samples")
    return made


def run(options: Namespace) -> int:
    if options.count is not None and not 1 <= options.count <= _MOST:
        raise DohyoError(f"--count is {options.count}; it must be from 1 to {_MOST}")
    check_picture(options.out)
    trained = DensityRun.open(options.run)
    model: Any = trained.trained(options.average)
    data = trained.data
    table = not is_image(data.shape)
    if table and options.reconstruct:
        raise DohyoError(f"{data.name} is a table, and reconstructions are plotted for images; leave --reconstruct out")
    count = (SAMPLED if table else 64) if options.count is None else options.count
    needed = "sample" if table else "reconstruct" if options.reconstruct else "sample_mean"
    if not hasattr(model, needed):
        raise DohyoError(f"{type(model).__name__} has no method {needed}; write one (see dohyo.models.LatentVariableModel)")
    torch.manual_seed(options.seed)
    with torch.no_grad():
        if table:
            plot_columns(data.test, model.sample(count), data.columns, options.out)
        elif options.reconstruct:
            plot_reconstructions(data.test[:count], model.reconstruct(data.test[:count]), data.shape, options.out)
        else:
            plot_images(model.sample_mean(count), data.shape, options.out)
    say(f"written: {options.out}")
    return 0
