"""Unbiased estimates of log p(x) and its gradient for latent-variable models.

Log-weights in, an estimate of log p(x) out: `estimate` and `log_marginal` join a source of log-weights to an estimator,
`evaluate` puts an error bar on a data set, `tune` finds the estimator with the least variance for its cost.
"""

from dohyo import diagnostics
from dohyo.annealing import Annealed, Sandwich, Tuned, sandwich
from dohyo.errors import DohyoError
from dohyo.estimators import (
    ELBO,
    IWAE,
    JVI,
    SUMO,
    Estimator,
    MultilevelRR,
    MultilevelSS,
    SymmetricSUMO,
    from_dict,
    to_dict,
)
from dohyo.evaluation import Comparison, Evaluation, compare, evaluate
from dohyo.laws import Finite, Geometric, HarmonicTail, Law, PowerLaw
from dohyo.marginal import estimate, log_marginal, reduce
from dohyo.packing import pad, rows
from dohyo.score import FisherInformation, fisher_information, score
from dohyo.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "ELBO",
    "IWAE",
    "JVI",
    "SUMO",
    "Annealed",
    "Comparison",
    "DohyoError",
    "Estimator",
    "Evaluation",
    "Finite",
    "FisherInformation",
    "Geometric",
    "HarmonicTail",
    "Law",
    "MultilevelRR",
    "MultilevelSS",
    "PowerLaw",
    "Sandwich",
    "SymmetricSUMO",
    "Tuned",
    "compare",
    "diagnostics",
    "estimate",
    "evaluate",
    "fisher_information",
    "from_dict",
    "log_marginal",
    "pad",
    "reduce",
    "rows",
    "sandwich",
    "score",
    "to_dict",
    "tune",
]


def __getattr__(name: str) -> object:
    """Training and its rooms wait until they are asked for: they need more than torch."""
    import importlib

    if name in ("fit", "train", "LoopConfig", "DrawsConfig"):
        return getattr(importlib.import_module("dohyo.lab.training"), name)
    if name in ("models", "objectives", "divergence", "lab"):
        return importlib.import_module(f"dohyo.{name}")
    raise AttributeError(f"module 'dohyo' has no attribute {name!r}")
