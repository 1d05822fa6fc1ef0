"""`dohyo sandwich`: log p(x) of a trained model from both sides."""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

import dohyo
from dohyo.errors import DohyoError
from dohyo.evaluation import check_sizes, isolated
from dohyo.lab.cli.screen import answer, number, passing_bar, say, show_table
from dohyo.lab.experiments.annealing import Anneal, Asked, check_anneal, choose_weights
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.folder import SANDWICH, write_json
from dohyo.lab.parsing import Parser
from dohyo.lab.training.config import Device
from dohyo.lab.training.processes import launch, leave

_EXAMPLES = """examples:
  dohyo sandwich runs/a
  dohyo sandwich runs/a --count 1000 --anneal 32 --json

The z that simulated data came from is an exact draw of the posterior, so chains run backwards from it bound log p(x) from
above. If the bounds cross, weights or samples of the model are wrong. What is found goes to sandwich.json in the run's folder.
"""
SEED, TUNED_ON = 5_000_011, 256  # added to the user's, for the data that chains are tuned on, and how many
_MOST = 1_000_000  # data, or chains of each


def parser() -> Parser:
    made = Parser(description="Bounds on log p(x) from both sides, on data that a trained model makes.", epilog=_EXAMPLES)
    made.add_argument("run", type=Path, help="a run's folder")
    made.add_argument("--count", type=int, default=200, help="data to simulate")
    made.add_argument("--chains", type=int, default=16, help="chains in each direction for each of them")
    made.add_argument("--anneal", type=Anneal, default=16, help="leapfrogs of a chain, 0 for the encoder's weights, or auto")
    made.add_argument("--max_rows", type=int | None, default=None, help="the most rows given to the network at a time")
    made.add_argument("--seed", type=int, default=0, help="of data and chains")
    made.add_argument("--device", type=Device, default="auto", help="where to compute; auto prefers a GPU")
    made.add_json()
    return made


def run(options: Namespace) -> int:
    trained = DensityRun.open(options.run)
    check_anneal(options.anneal)
    for name, least in (("count", 2), ("chains", 1)):
        if not least <= options[name] <= _MOST:
            raise DohyoError(f"--{name} is {options[name]}; it must be at least {least} and at most {_MOST}")
    check_sizes(options.count, options.chains, options.max_rows)
    fabric = launch(options.device)
    model: Any = trained.trained().to(fabric.device)
    if not hasattr(model, "sample_joint"):
        raise DohyoError(f"{type(model).__name__} has no sample_joint(n), n rows of z and of x given z; write it")
    with isolated(model, options.seed + SEED):
        x = model.sample_joint(TUNED_ON)[1]
    asked = Asked(options.anneal, "simulated", options.seed, options.max_rows)
    with passing_bar("tuning chains", options.json or not fabric.is_global_zero) as on_tuning:
        weights = choose_weights(fabric, options.run, model, x, asked, on_tuning)
    found = dohyo.sandwich(weights.model, options.count, chains=options.chains, seed=options.seed, max_rows=options.max_rows)
    report = {"run": str(options.run), "seed": options.seed, **found.to_dict(), "warnings": list(weights.warnings)}
    leave(fabric)
    if fabric.is_global_zero:
        write_json(options.run / SANDWICH, report)
        answer(report, options.json, lambda: _show(report, weights.name))
    return 0


def _show(report: dict[str, Any], weights: str) -> None:
    columns = ["bound on log p(x)", "mean", "standard error"]
    rows = [[name, number(report[name]), number(report[f"{name}_stderr"])] for name in ("upper", "lower", "gap")]
    title = f"{report['run']}: {report['count']} simulated data, {report['chains']} chains each way ({weights})"
    show_table(title, columns, rows, words=("bound on log p(x)",))
    say(f"{'they cross: ' if report['crosses'] else ''}{report['verdict']}")
    if report["lost"]:
        say(f"warning: {report['lost']} chains were lost; the bounds are wider for it, but bounds")
    for line in report["warnings"]:
        say(f"warning: {line}")
