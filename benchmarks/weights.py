"""Real log-weights for the benchmarks: data, a small VAE trained for a minute, banks of its weights, records of runs.

Images come from `$DOHYO_DATA/mnist` where there is such a file, else from the 8x8 digits that the package carries.
"""

import argparse
import gzip
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dohyo
from dohyo.files import replacing
from dohyo.models import VAE

PILOT, MEASURED, SAMPLES = 400, 400, 2048  # data for tuning, other data for measuring, log-weights of each
LEAST_STEPS = 1500
CAP = 128  # the most terms of any estimator here: all are unbiased for IWAE_128


def arguments(description: str | None) -> argparse.Namespace:
    """The options that the benchmarks on real log-weights share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder for what is measured")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long the VAE is trained")
    parser.add_argument("--data", choices=("digits", "mnist"), help="mnist if DOHYO_DATA has it, else digits")
    parser.add_argument("--seed", type=int, default=0, help="of the VAE, its data and its weights")
    return parser.parse_args()


def make_bank(options: argparse.Namespace) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(pilot, measured, config): log-weights of two disjoint sets of held-out data, (data, samples) float64 each."""
    torch.manual_seed(options.seed)
    train, held_out, source = load_images(options.data)
    model, steps = train_vae(train, options.minutes)
    log_w = log_weights(model, held_out[: PILOT + MEASURED].bernoulli(), SAMPLES)
    config = environment() | {
        "data": source,
        "model": f"VAE {train.shape[1]}-200-200-50 tanh, IWAE-15 with DReG, Adam 1e-3 eps 1e-4, batch 100",
        "minutes": options.minutes,
        "steps": steps,
        "seed": options.seed,
        "pilot": {"data": PILOT, "samples": SAMPLES},
        "measured": {"data": len(log_w) - PILOT, "samples": SAMPLES},
        "log_w_sd": float(log_w.std(1).mean()),
        "iwae_all": float((log_w.logsumexp(1) - math.log(SAMPLES)).mean()),
    }
    return log_w[:PILOT], log_w[PILOT:], config


def load_images(name: str | None) -> tuple[Tensor, Tensor, str]:
    """(training images, held-out images, where they are from), each (data, pixels) in [0, 1]."""
    mnist = Path(os.environ.get("DOHYO_DATA", "")) / "mnist" / "train-images-idx3-ubyte.gz"
    if name is None:
        name = "mnist" if mnist.is_file() else "digits"
    if name == "mnist":
        raw = np.frombuffer(gzip.decompress(mnist.read_bytes()), dtype=np.uint8, offset=16)
        images = torch.tensor(raw.reshape(-1, 784).astype(np.float32) / 255)
        return images[:50_000], images[50_000:], "mnist: 50,000 images to train on, held-out from the last 10,000"
    with np.load(Path(dohyo.__file__).parent / "lab" / "data" / "digits.npz") as arrays:
        images = torch.tensor(arrays["x"].astype(np.float32) / 16)
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    held_out = PILOT + MEASURED
    return images[held_out:], images[:held_out], f"digits: {len(images) - held_out} images to train on, {held_out} held out"


def train_vae(train: Tensor, minutes: float) -> tuple[VAE, int]:
    """The VAE after that many minutes, and its steps: decoder by w~, encoder by w~^2 through z alone (DReG).

    On a busy machine it goes on to `LEAST_STEPS`, below which the weights are those of no model worth the name.
    """
    model = VAE(data=train.shape[1])
    last: Any = model.decoder[-1]
    with torch.no_grad():
        last.bias.copy_(train.mean(0).clamp(1e-3, 1 - 1e-3).logit())
    theta, phi = list(model.decoder_parameters()), list(model.encoder_parameters())
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    k, rows, begin, steps = 15, dohyo.rows(torch.full((100,), 15)), time.monotonic(), 0
    while steps < LEAST_STEPS or time.monotonic() - begin < 60 * minutes:
        x = train[torch.randint(len(train), (100,))].bernoulli()
        log_w = model.bind(x, detach_posterior=True)(rows).view(100, k)
        weight = log_w.detach().softmax(-1)
        grads = torch.autograd.grad(-(weight * log_w).sum(-1).mean(), theta, retain_graph=True)
        grads += torch.autograd.grad(-(weight**2 * log_w).sum(-1).mean(), phi)
        for parameter, grad in zip(theta + phi, grads, strict=True):
            parameter.grad = grad
        adam.step()
        steps += 1
    return model, steps


@torch.no_grad()
def log_weights(model: VAE, x: Tensor, samples: int) -> Tensor:
    """(data, samples) float64, a few data at a time."""
    parts = []
    for part in x.split(4):
        rows = dohyo.rows(torch.full((len(part),), samples))
        parts.append(model.bind(part)(rows).view(len(part), samples).double())
    return torch.cat(parts)


def multilevel(cls: type[dohyo.MultilevelRR | dohyo.MultilevelSS], m: int, cost: float) -> dohyo.Estimator:
    """The uncentred multilevel estimator of IWAE_128 with this m, a power of two, and the r that gives it this cost."""
    levels = int(math.log2(CAP / m))
    low, high = 1e-6, 1 - 1e-6
    for _ in range(60):  # the cost falls as r grows
        r = (low + high) / 2
        low, high = (r, high) if cls(m, r, levels).expected_cost > cost else (low, r)
    return cls(m, r, levels)


def environment() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "dohyo": dohyo.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def save(path: Path, content: dict[str, Any]) -> None:
    """JSON that is either whole or not there."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")
