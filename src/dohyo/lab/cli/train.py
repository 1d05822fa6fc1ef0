"""`dohyo train`: density modelling by maximum likelihood."""

from typing import Any

from jsonargparse import Namespace

from dohyo.lab.cli.runs import run_command, run_parser
from dohyo.lab.cli.screen import count, each_replica, number, of_replicas, verdict_lines
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.parsing import Parser
from dohyo.lab.training.chains import in_words

_EXAMPLES = """examples:
  dohyo train --data digits --estimator sumo --cost 15 --epochs 20 --seed 0 --out runs/a
  dohyo train --resume runs/a --epochs 40
  dohyo train --data mnist --estimator iwae --cost 5 --encoder dreg --out runs/b
  dohyo train --data mine.csv --estimator iwae --cost 10 --out runs/c
  dohyo train --data digits --anneal 8 --cost 2 --init-from runs/a --epochs 10 --out runs/g   # through chains
  dohyo train --data photos/ --model package.module:name --out runs/f
  dohyo train --data digits --estimator sumo --cost 15 --epochs 20 --replicas 3 --out runs/e
  torchrun --nproc-per-node 2 -m dohyo train --data digits --estimator sumo --cost 15 --epochs 2 --out runs/d

TensorBoard's files are written where it is installed: pip install 'dohyo[tensorboard]'.
"""


def parser() -> Parser:
    return run_parser(DensityRun, "Train a latent-variable model by maximum likelihood.", _EXAMPLES)


def run(options: Namespace) -> int:
    return run_command(DensityRun, options, _note, _summary)


def _note(record: dict[str, Any]) -> str:
    chains = "through chains: " if "lost_chains" in record else ""
    return (f"{chains}train {record['train_nll']:.2f} valid {record['valid_nll']:.2f} "
            f"clipped {record['clipped_decoder']:.0%} and {record['clipped_encoder']:.0%}")  # fmt: skip


def _summary(result: dict[str, Any]) -> list[str]:
    nll, stderr = number(result["test_nll"]), number(result["test_nll_stderr"])
    length = f"{count(result['epochs'])} epoch{'s' * (result['epochs'] != 1)}, {result['seconds']:.0f} s"
    lines = [f"{of_replicas(result)}test NLL {nll} ± {stderr} (IWAE-{result['test_terms']}), {_how(result)}, {length}"]
    lines += each_replica(result, "test_nll")
    if "test_nll_annealed" in result:
        chains = in_words(result["test_chains"], result["anneal"])
        lines.append(f"by {chains}: {number(result['test_nll_annealed'])} ± {number(result['test_nll_annealed_stderr'])}")
        lines += each_replica(result, "test_nll_annealed")
        lines += [f"{chains}: verdict: {verdict['reason']}" for verdict in [result.get("verdict_annealed")] if verdict]
    for name, by in (("test_nll_average", ""), ("test_nll_average_annealed", ", by chains")):
        if name in result:
            lines.append(f"averaged parameters{by}: {number(result[name])} ± {number(result[f'{name}_stderr'])}")
    return lines + verdict_lines(result)


def _how(result: dict[str, Any]) -> str:
    """What theta followed."""
    cost, before = result["expected_cost"], result.get("before_chains")
    first = f"iwae at {before['expected_cost']:.4g}" if before else ""
    if "test_nll_annealed" not in result:
        return first or f"{result['estimator']} at an expected cost of {cost:.4g}"
    how = f"{result['estimator']} over {in_words(cost, result['anneal'])}"
    return f"{first} for {count(before['epochs'])} epoch{'s' * (before['epochs'] != 1)}, then {how}" if before else how
