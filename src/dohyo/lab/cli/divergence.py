"""`dohyo divergence`: the last check of a run of `dohyo reverse-kl` again."""

from pathlib import Path

from jsonargparse import Namespace

from dohyo.errors import DohyoError
from dohyo.lab.cli.reverse_kl import note, summary
from dohyo.lab.cli.runs import run_command
from dohyo.lab.experiments.annealing import Anneal
from dohyo.lab.experiments.reverse_kl import ReverseKLRun
from dohyo.lab.parsing import Parser
from dohyo.lab.training.state import load_progress

_EXAMPLES = """examples:
  dohyo divergence runs/f
  dohyo divergence runs/f --anneal 16 --test-terms 10000 --json

It takes the place of what the run's last check found, as dohyo reverse-kl --resume runs/f --anneal 16 would, and trains nothing.
"""


def parser() -> Parser:
    made = Parser(description="The reverse KL of a fitted model, log p(x) by annealed weights.", epilog=_EXAMPLES)
    made.add_argument("run", type=Path, help="the folder of a run of dohyo reverse-kl")
    made.add_argument("--anneal", type=Anneal, default="auto", help="leapfrogs of a chain, 0 for the encoder's weights, or auto")
    made.add_argument("--test_draws", type=int, help="draws of the model; the run's own number by default")
    made.add_argument("--test_terms", type=int, help="evaluations of p(x, z) for each draw; the run's own number by default")
    made.add_json()
    return made


def run(options: Namespace) -> int:
    opened = ReverseKLRun.open(options.run)
    for one in opened.replicas or [opened]:
        if not one.config.over(load_progress(one.folder)):
            raise DohyoError(f"{one.folder}: is not trained to its end; dohyo reverse-kl --resume {options.run} goes on")
    options.explicit = {name: options[name] for name in ("anneal", "test_draws", "test_terms") if options[name] is not None}
    options.out, options.resume = None, options.run
    return run_command(ReverseKLRun, options, note, summary)
