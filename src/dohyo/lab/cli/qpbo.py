"""`dohyo qpbo`: optimise a function of bits by training a policy."""

from typing import Any

from jsonargparse import Namespace

from dohyo.errors import DohyoError
from dohyo.estimators import ESTIMATORS
from dohyo.lab.cli.runs import run_command, run_parser
from dohyo.lab.cli.screen import count, each_replica
from dohyo.lab.experiments.qpbo import QPBOConfig, QPBORun
from dohyo.lab.parsing import Parser
from dohyo.names import named

_EXAMPLES = """examples:
  dohyo qpbo --instance bqp100.txt --index 1 --out runs/p
  dohyo qpbo --variables 100 --policy latent --estimator sumo --cost 15 --entropy 0.1 --steps 5000 --seed 0 --out runs/q
  dohyo qpbo --reward package.module:function --variables 60 --out runs/s
  dohyo qpbo --instance G1.txt --policy nade --entropy 0.1 --entropy-decay linear --out runs/t
  dohyo qpbo --variables 100 --replicas 3 --out runs/u
  dohyo qpbo --resume runs/q --steps 10000
"""


def parser() -> Parser:
    return run_parser(QPBORun, "Optimise a function of bits by training a policy (REINFORCE).", _EXAMPLES)


def run(options: Namespace) -> int:
    _check_used(options)
    return run_command(QPBORun, options, _note, _summary)


def _check_used(options: Namespace) -> None:
    """Other policies know their own log p(x): what only estimates it would be ignored without a word."""
    fields = QPBOConfig.__dataclass_fields__
    named(ESTIMATORS, options.estimator, "estimator")
    for name in () if options.policy == "latent" or options.resume else ("estimator", "cost", "encoder", "k_draw", "latent"):
        if name in options.explicit and options.explicit[name] != fields[name].default:
            flag = f"--{name.replace('_', '-')} {options.explicit[name]}"
            raise DohyoError(f"{flag} says how the latent policy is trained, and the policy is {options.policy}: add --policy "
                             f"latent, or leave --{name.replace('_', '-')} out")  # fmt: skip


def _note(record: dict[str, Any]) -> str:
    return f"best {record['best_reward']:.6g} mean {record['reward']:.6g} entropy {record['entropy']:.1f}"


def _summary(result: dict[str, Any]) -> list[str]:
    known = result["best_known"]
    beside = "" if known is None else f" (best known {known:.10g}, gap {result['gap']:.2%})"
    how = f"{result['estimator']} at an expected cost of {result['expected_cost']:.4g}, " if "estimator" in result else ""
    several = f"best of {len(result['replicas'])} replicas: " if result.get("replicas") else ""
    length = f"{count(result['steps'])} steps, {1000 * result['seconds_per_step']:.1f} ms a step"
    first = (f"{several}best reward {result['best_reward']:.10g}{beside}, mean {result['mean_reward']:.6g}, "
             f"{result['policy']} policy, {how}{length}, best after {result['seconds_to_best']:.0f} s")  # fmt: skip
    return [first, *each_replica(result, "best_reward")]
