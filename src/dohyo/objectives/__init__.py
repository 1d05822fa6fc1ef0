"""What to train on: losses for theta (the model) and for phi (the proposal)."""

from dohyo.objectives.maximum_likelihood import ENCODERS, Losses, MaximumLikelihood, maximum_likelihood

__all__ = ["ENCODERS", "Losses", "MaximumLikelihood", "maximum_likelihood"]
