"""Annealed weights: chains from q(z; x) to p(x, z) in place of single draws of q, and bounds from both sides."""

from dohyo.annealing.annealed import Annealed, Chains
from dohyo.annealing.bidirectional import Sandwich, sandwich
from dohyo.annealing.chain import Constants
from dohyo.annealing.tuning import Candidate, Tuned

__all__ = ["Annealed", "Candidate", "Chains", "Constants", "Sandwich", "Tuned", "sandwich"]
