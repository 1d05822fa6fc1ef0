"""Training objectives: one loss, whose gradient is theta's own in theta (the model) and phi's own in phi (the proposal)."""

from dohyo.objectives.maximum_likelihood import MaximumLikelihood
from dohyo.objectives.reinforce import Reinforce
from dohyo.objectives.reverse_kl import PATHS, Paths, ReverseKL
from dohyo.objectives.weighing import ENCODERS, Encoder, KDraw, Outcome, SamplingEncoder

__all__ = [
    "ENCODERS", "PATHS", "Encoder", "KDraw", "MaximumLikelihood", "Outcome", "Paths", "Reinforce", "ReverseKL", "SamplingEncoder",
]  # fmt: skip
