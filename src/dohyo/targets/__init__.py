"""Targets for reverse-KL variational inference: log-densities up to a constant, and what is known of them."""

from dohyo.targets.autoregressive import Autoregressive
from dohyo.targets.checks import check
from dohyo.targets.custom import Custom
from dohyo.targets.eight_schools import CentredEightSchools, EightSchools
from dohyo.targets.o_rings import ORings
from dohyo.targets.planar import Banana, Funnel, Mixture, Ring
from dohyo.targets.registry import TARGETS, target
from dohyo.targets.target import Target

__all__ = [
    "TARGETS",
    "Autoregressive",
    "Banana",
    "CentredEightSchools",
    "Custom",
    "EightSchools",
    "Funnel",
    "Mixture",
    "ORings",
    "Ring",
    "Target",
    "check",
    "target",
]
