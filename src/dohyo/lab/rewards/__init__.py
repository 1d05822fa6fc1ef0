"""Rewards on {0, 1}^d to maximise: quadratic functions, problems from files, and a user's own function.

All are called the same: x (n, d) of 0 and 1 in, (n,) out, larger is better. Formats that minimise change sign on reading.
"""

from dohyo.lab.rewards.custom import Custom, reward
from dohyo.lab.rewards.loading import load
from dohyo.lab.rewards.local_search import descent, polish
from dohyo.lab.rewards.quadratic import Quadratic, max_cut, random_qpbo
from dohyo.lab.rewards.readers import read_bqp, read_gset, read_qubo
from dohyo.lab.rewards.reward import Reward

__all__ = [
    "Custom",
    "Quadratic",
    "Reward",
    "descent",
    "load",
    "max_cut",
    "polish",
    "random_qpbo",
    "read_bqp",
    "read_gset",
    "read_qubo",
    "reward",
]
