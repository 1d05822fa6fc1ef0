"""Rewards on {0, 1}^d to maximise: quadratic functions, problems from files, and a user's own function.

All map x (n, d) of 0 and 1 to (n,), where larger is better; formats of minimisation change their sign when read.
"""

from dohyo.lab.rewards.quadratic import Quadratic, max_cut, random_qpbo
from dohyo.lab.rewards.readers import load
from dohyo.lab.rewards.reward import Custom, Reward, reward

__all__ = ["Custom", "Quadratic", "Reward", "load", "max_cut", "random_qpbo", "reward"]
