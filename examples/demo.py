"""Train a small VAE on the bundled 8x8 digits, then ask how probable it makes digits it has not seen.

Writes demo/weights.npy (log-weights, one row for each test digit) and lets `dohyo estimate` judge them.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

import dohyo
from dohyo.models import VAE

STEPS = 1500  # well under a minute on two cores
OUT = Path("demo")


def main() -> None:
    torch.manual_seed(0)
    pixels = np.load(Path(dohyo.__file__).parent / "data" / "digits.npz")["x"]
    x = torch.from_numpy(pixels / 16.0).float()[torch.randperm(len(pixels))]
    train, test = x[:1500], x[1500:].bernoulli()
    model = VAE(data=64, hidden=64, latent=8)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in track(range(STEPS), "training a VAE on 1,500 digits with IWAE-5"):
        batch = train[torch.randint(len(train), (100,))].bernoulli()
        loss = -dohyo.log_marginal(model, batch, dohyo.IWAE(5)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        weights = model.bind(test)
        log_w = torch.stack([weights(torch.full((2000,), datum)) for datum in range(len(test))])
    OUT.mkdir(exist_ok=True)
    np.save(OUT / "weights.npy", log_w.numpy())
    command = ["estimate", "demo/weights.npy", "--estimator", "symmetric-sumo", "--cost", "15", "--plot", "demo/estimate.png"]
    print("\n$ dohyo", *command)
    subprocess.run([sys.executable, "-m", "dohyo", *command], check=True)


if __name__ == "__main__":
    main()
