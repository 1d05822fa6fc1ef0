"""Unbiased estimates of log p(x) and its gradient for latent-variable models.

Log-weights in, an estimate of log p(x) out: `estimate` and `log_marginal` join a source of log-weights to an estimator,
`evaluate` puts an error bar on a data set, `tune` finds the estimator with the least variance for its cost.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dohyo import diagnostics
from dohyo.annealing import Annealed, Sandwich, Tuned, sandwich
from dohyo.contract import Model, proposed
from dohyo.errors import DohyoError
from dohyo.estimators import ELBO, IWAE, JVI, SUMO, Estimator, MultilevelRR, MultilevelSS, SymmetricSUMO, from_dict, to_dict
from dohyo.evaluation import Comparison, Evaluation, compare, evaluate
from dohyo.fisher import FisherInformation, fisher_information, score
from dohyo.laws import Finite, Geometric, HarmonicTail, Law, PowerLaw
from dohyo.marginal import estimate, log_marginal, reduce
from dohyo.packing import pad, rows
from dohyo.tuning import tune
from dohyo.verdict import Verdict

if TYPE_CHECKING:
    from dohyo import kl, lab, models, objectives

__version__ = "0.3.0"

__all__ = [
    "ELBO", "IWAE", "JVI", "SUMO", "Annealed", "Comparison", "DohyoError", "Estimator", "Evaluation", "Finite",
    "FisherInformation", "Geometric", "HarmonicTail", "Law", "Model", "MultilevelRR", "MultilevelSS", "PowerLaw", "Sandwich",
    "SymmetricSUMO", "Tuned", "Verdict", "compare", "diagnostics", "estimate", "evaluate", "fisher_information", "from_dict",
    "kl", "lab", "log_marginal", "models", "objectives", "pad", "proposed", "reduce", "rows", "sandwich", "score", "to_dict",
    "tune",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Rooms that take longer to import are loaded at their first use."""
    if name in ("kl", "lab", "models", "objectives"):
        return import_module(f"dohyo.{name}")
    raise AttributeError(f"module 'dohyo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
