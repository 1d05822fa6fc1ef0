"""`dohyo reverse-kl`: variational inference with a latent-variable family."""

from typing import Any

from jsonargparse import Namespace

from dohyo.lab.cli.runs import run_command, run_parser
from dohyo.lab.cli.screen import number
from dohyo.lab.experiments.reverse_kl import ReverseKLRun
from dohyo.lab.parsing import Parser

_EXAMPLES = """examples:
  dohyo reverse-kl --target funnel --estimator sumo --cost 15 --steps 20000 --seed 0 --out runs/f
  dohyo reverse-kl --target eight-schools --estimator multilevel-rr --cost 15 --out runs/e
  dohyo reverse-kl --target package.module:log_density --dimension 3 --estimator multilevel-rr --cost 15 --out runs/g
  dohyo reverse-kl --target funnel --estimator iwae --cost 15 --on-divergence continue --out runs/i      # watch it fail
  dohyo reverse-kl --target funnel --estimator sumo --encoder variance --optimiser rmsprop --learning-rate 5e-5
                   --epsilon 1e-3 --beta2 0.99 --decay none --out runs/p                                 # the paper's
  dohyo reverse-kl --resume runs/f --steps 40000
  dohyo reverse-kl --resume runs/f --anneal 8      # the last check again, with annealed weights
"""


def parser() -> Parser:
    return run_parser(ReverseKLRun, "Fit a latent-variable model to an unnormalised density by reverse KL.", _EXAMPLES)


def run(options: Namespace) -> int:
    return run_command(ReverseKLRun, options, _note, _summary)


def _note(record: dict[str, Any]) -> str:
    name, truth = ("objective", record["objective"]) if record["reverse_kl"] is None else ("reverse KL", record["reverse_kl"])
    return f"estimate {record['estimate']:.3f} {name} {truth:.3f}" + (" DIVERGED" if record["diverged"] else "")


def _summary(result: dict[str, Any]) -> list[str]:
    known = result["reverse_kl"] is not None
    truth = number(result["reverse_kl"] if known else result["objective"])
    name = "reverse KL" if known else "objective E[log p(x) - log p*(x)]"
    lines = [f"{name} {truth} ± {number(result['reverse_kl_stderr'])}, training estimate "
             f"{number(result['training_estimate'])} ± {number(result['training_estimate_stderr'])}, {result['estimator']} at an "
             f"expected cost of {result['expected_cost']:.4g}, {result['steps']} steps, {result['seconds']:.0f} s"]  # fmt: skip
    if result["khat"] is not None and result["khat"] > 0.7:
        lines.append(f"warning: k-hat is {result['khat']:.2f}: the importance-weighted moments are not to be trusted")
    return lines + [f"warning: {'diverged: ' if result['diverged'] else ''}{line}" for line in result["warnings"]]
