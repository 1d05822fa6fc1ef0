"""What to train on: losses for theta (the model) and for phi (the proposal)."""

from dohyo.objectives.losses import DRAWN_ENCODERS, ENCODERS, Losses
from dohyo.objectives.maximum_likelihood import MaximumLikelihood, maximum_likelihood
from dohyo.objectives.reinforce import Reinforce, reinforce
from dohyo.objectives.reverse_kl import ReverseKL, reverse_kl

__all__ = [
    "DRAWN_ENCODERS",
    "ENCODERS",
    "Losses",
    "MaximumLikelihood",
    "Reinforce",
    "ReverseKL",
    "maximum_likelihood",
    "reinforce",
    "reverse_kl",
]
