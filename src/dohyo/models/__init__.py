"""Latent-variable models: anything with `log_weights(x, rows)`; these have it."""

from dohyo.models.latent import LatentVariableModel
from dohyo.models.registry import MODELS, build
from dohyo.models.two_layer import TwoLayerVAE
from dohyo.models.vae import VAE

__all__ = ["MODELS", "VAE", "LatentVariableModel", "TwoLayerVAE", "build"]
