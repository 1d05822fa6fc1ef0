"""Runs of a small VAE on the digits, alone and together, and whether two are the same."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dohyo
from dohyo.estimators import ESTIMATORS
from dohyo.lab.data import load
from dohyo.lab.fast.together import Replica, train_together
from dohyo.lab.training.tasks import OnData
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood

CONFIG = dohyo.lab.LoopConfig(epochs=2, batch_size=300, k_seed=0, clip_decoder=20.0, clip_encoder=125.0, device="cpu", tf32=False)
DATA = load("digits").flat()


class PlainBind(nn.Module):
    """Its `bind` knows no options."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.vae = VAE(**sizes)

    def start_from(self, train: Tensor) -> None:
        self.vae.start_from(train)

    def encoder_parameters(self) -> Any:
        return self.vae.encoder_parameters()

    def decoder_parameters(self) -> Any:
        return self.vae.decoder_parameters()

    def bind(self, x: Tensor) -> Any:
        return self.vae.bind(x)

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.vae.log_weights(x, rows)


class Handmade(nn.Module):
    """log_weights alone, noise by hand, and in evaluation mode when it arrives."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(4, 64)
        self.eval()

    def start_from(self, train: Tensor) -> None:
        pass

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        mean, log_scale = (self.encoder(x) * (0.2 if self.training else 0.1))[rows].chunk(2, -1)
        noise = torch.randn_like(mean)
        z = mean + log_scale.exp() * noise
        log_q = (-0.5 * noise.square() - log_scale).sum(-1)
        return torch.distributions.Bernoulli(logits=self.decoder(z), validate_args=False).log_prob(x[rows]).sum(-1) - log_q


def config(seed: int, program: str = "plain", **changes: Any) -> dohyo.lab.LoopConfig:
    return dataclasses.replace(CONFIG, seed=seed, program=program, **changes)


def model(seed: int, cls: type[nn.Module] = VAE) -> Any:
    torch.manual_seed(seed)
    made = cls(data=64, hidden=16, latent=4)  # type: ignore[call-arg]
    made.start_from(DATA.train)  # type: ignore[operator]
    return made


def objective(name: str, encoder: str | None = None, **options: Any) -> MaximumLikelihood:
    baseline = "running" if encoder == "variance" else "zero"
    return MaximumLikelihood(ESTIMATORS[name].at_cost(6), encoder, baseline=baseline, **options)


def alone(seed: int, wanted: MaximumLikelihood, cls: type[nn.Module] = VAE, **changes: Any) -> tuple[list[dict[str, Any]], Any]:
    made = model(seed, cls)
    return list(dohyo.lab.fit(made, DATA, wanted, config(seed, **changes))), made


def together(
    seeds: list[int], wanted: MaximumLikelihood, cls: type[nn.Module] = VAE, **changes: Any
) -> tuple[list[list[dict[str, Any]]], list[Any]]:
    models = [model(seed, cls) for seed in seeds]
    members = [Replica(made, OnData(DATA), config(seed, **changes)) for seed, made in zip(seeds, models, strict=True)]
    records: list[list[dict[str, Any]]] = [[] for _ in seeds]
    for place, record in train_together(members, wanted):
        records[place].append(record)
    return records, models


def assert_same(one: tuple[list[dict[str, Any]], Any], other: tuple[list[dict[str, Any]], Any], tolerance: float = 1e-5) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        assert a.keys() == b.keys()
        for key in set(a) - {"seconds", "program"}:
            assert a[key] == pytest.approx(b[key], rel=tolerance, abs=tolerance), key
    for a, b in zip(one[1].state_dict().values(), other[1].state_dict().values(), strict=True):
        assert torch.allclose(a.cpu(), b.cpu(), atol=20 * tolerance, rtol=0)
