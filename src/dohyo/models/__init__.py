"""Latent-variable models: anything with `log_weights(x, rows)`; these have it."""

from dohyo.models.latent import LatentVariableModel
from dohyo.models.vae import VAE

__all__ = ["VAE", "LatentVariableModel"]
