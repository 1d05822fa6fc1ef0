"""What to train on: losses for theta (the model) and for phi (the proposal)."""

from dohyo.objectives.losses import ENCODERS, Losses
from dohyo.objectives.maximum_likelihood import MaximumLikelihood, maximum_likelihood
from dohyo.objectives.reverse_kl import ReverseKL, reverse_kl

__all__ = ["ENCODERS", "Losses", "MaximumLikelihood", "ReverseKL", "maximum_likelihood", "reverse_kl"]
