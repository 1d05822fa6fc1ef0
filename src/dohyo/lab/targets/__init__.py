"""Targets for reverse-KL variational inference: log-densities up to a constant, and what is known about them."""

from dohyo.lab.targets.autoregressive import Autoregressive
from dohyo.lab.targets.checks import check
from dohyo.lab.targets.custom import Custom
from dohyo.lab.targets.eight_schools import EightSchools
from dohyo.lab.targets.o_rings import ORings
from dohyo.lab.targets.planar import Banana, Funnel, Mixture, Ring
from dohyo.lab.targets.registry import TARGETS, target
from dohyo.lab.targets.target import Target

__all__ = [
    "TARGETS", "Autoregressive", "Banana", "Custom", "EightSchools", "Funnel", "Mixture", "ORings", "Ring", "Target", "check",
    "target",
]  # fmt: skip
