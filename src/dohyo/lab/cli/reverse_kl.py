"""`dohyo reverse-kl`: variational inference with a latent-variable family."""

from typing import Any

from jsonargparse import Namespace

from dohyo.lab.cli.runs import run_command, run_parser
from dohyo.lab.cli.screen import count, each_replica, measured, number, of_replicas
from dohyo.lab.experiments.reverse_kl import ReverseKLRun
from dohyo.lab.parsing import Parser

_SHOWN = 12  # quantities on the screen
_EXAMPLES = """examples:
  dohyo reverse-kl --target funnel --estimator sumo --cost 15 --steps 20000 --seed 0 --out runs/f
  dohyo reverse-kl --target eight-schools --estimator multilevel-rr --cost 15 --out runs/e
  dohyo reverse-kl --target package.module:log_density --dimension 3 --estimator multilevel-rr --cost 15 --out runs/g
  dohyo reverse-kl --target funnel --estimator iwae --cost 15 --on-divergence continue --out runs/i      # watch it fail
  dohyo reverse-kl --target funnel --estimator sumo --encoder variance --optimiser rmsprop --learning-rate 5e-5
                   --epsilon 1e-3 --beta2 0.99 --decay none --out runs/p                                 # the paper's
  dohyo reverse-kl --target funnel --replicas 3 --out runs/h
  dohyo reverse-kl --resume runs/f --steps 40000
  dohyo divergence runs/f --anneal 8               # the last check again, with annealed weights
"""


def parser() -> Parser:
    return run_parser(ReverseKLRun, "Fit a latent-variable model to an unnormalised density by reverse KL.", _EXAMPLES)


def run(options: Namespace) -> int:
    return run_command(ReverseKLRun, options, note, summary)


def note(record: dict[str, Any]) -> str:
    if record["reverse_kl"] is None:
        found = f"log Z {record['log_z']:.3f} reverse KL {number(record['estimated_kl'])}"
    else:
        found = f"estimate {record['estimate']:.3f} reverse KL {record['reverse_kl']:.3f}"
    return found + (" DIVERGED" if record["diverged"] else "")


def summary(result: dict[str, Any]) -> list[str]:
    known, moments = result["log_normaliser"] is not None, result["moments"]
    log_z = f"log Z {_measured(result, 'log_z')}" + (f" (exactly {result['log_normaliser']:.3f})" if known else "")
    kl = f"reverse KL {_measured(result, 'reverse_kl')}"
    how = (f"{result['estimator']} at an expected cost of {result['expected_cost']:.4g}, {count(result['steps'])} steps, "
           f"{result['seconds']:.0f} s")  # fmt: skip
    if result.get("leapfrogs"):
        how += f"; log p(x) by chains of {result['leapfrogs']} leapfrogs"
    weights = f"{number(result.get('ess'), 0)} effective samples of {result['test_draws']}, k-hat {number(result['khat'], 2)}"
    lines = [of_replicas(result) + ", ".join([kl, log_z, how] if known else [log_z, f"{kl} with it", how])]
    lines += each_replica(result, "reverse_kl")
    if not known and None not in (result.get("log_z"), result["training_estimate"]):
        result = {**result, "training_estimate": result["training_estimate"] + result["log_z"]}
    lines.append(f"importance weights: {weights}; training estimate {_measured(result, 'training_estimate')}")
    for name, one in list(moments.items())[:_SHOWN]:
        quantiles = [number(one.get(q)) for q in ("q50", "q2.5", "q97.5")]
        lines.append(f"  {name}: mean {_measured({**one, 'mean_stderr': one['stderr']}, 'mean')}, sd {number(one['sd'])}, "
                     "median {}, 95% between {} and {}".format(*quantiles))  # fmt: skip
    if len(moments) > _SHOWN:
        lines.append(f"  and {len(moments) - _SHOWN} more in result.json")
    return lines + [f"warning: {line}" for line in result["warnings"]]


def _measured(result: dict[str, Any], key: str) -> str:
    return "?" if result.get(key) is None else measured(result[key], result[f"{key}_stderr"])
