"""Latent-variable models. Any object with `log_weights(x, rows)` is one; these come with the library."""

from dohyo.models.autoencoder import Autoencoder
from dohyo.models.latent import LatentVariableModel
from dohyo.models.policies import POLICIES, ExactPolicy, GRUPolicy, IndependentPolicy, LatentPolicy, NADEPolicy, Policy
from dohyo.models.registry import MODELS, build
from dohyo.models.vae import VAE, GaussianLVM, TwoLayerVAE

__all__ = [
    "MODELS", "POLICIES", "VAE", "Autoencoder", "ExactPolicy", "GRUPolicy", "GaussianLVM", "IndependentPolicy", "LatentPolicy",
    "LatentVariableModel", "NADEPolicy", "Policy", "TwoLayerVAE", "build",
]  # fmt: skip
