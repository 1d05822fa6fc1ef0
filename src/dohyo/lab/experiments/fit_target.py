"""A posterior in one call: a latent-variable model fitted to an unnormalised density, and what it says about that density."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.experiments.reverse_kl import ReverseKLConfig, ReverseKLRun
from dohyo.lab.folder import DRAWS
from dohyo.lab.targets import target
from dohyo.lab.training.processes import launch


@dataclass(frozen=True)
class Fitted:
    """What `fit_target` found.

    Attributes:
        model: The trained model; `model.sample(n)` draws from it.
        x, log_weights: Samples of the model and log p*(x) - log p(x) for each, from which the numbers were made.
        result: All numbers, as `dohyo reverse-kl` writes them to result.json.
    """

    model: Any
    x: Tensor
    log_weights: Tensor
    result: dict[str, Any]

    @property
    def log_z(self) -> tuple[float, float]:
        """The log normaliser of the density (log evidence of a posterior) and its standard error."""
        return self.result["log_z"], self.result["log_z_stderr"]

    @property
    def reverse_kl(self) -> tuple[float, float]:
        """How far the model is from the density, and the standard error."""
        return self.result["reverse_kl"], self.result["reverse_kl_stderr"]

    @property
    def quantities(self) -> dict[str, dict[str, float]]:
        """Moments and quantiles of each quantity by importance weights, as `dohyo.kl.weighted_moments` describes them."""
        return self.result["moments"]  # type: ignore[no-any-return]

    @property
    def warnings(self) -> list[str]:
        return self.result["warnings"]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        (log_z, error), (kl, kl_error) = self.log_z, self.reverse_kl
        ess, khat = self.result["ess"], self.result["khat"]
        warned = "".join(f"\nwarning: {line}" for line in self.warnings)
        return (f"log Z {log_z:.4g} ± {error:.2g}, reverse KL {kl:.3g} ± {kl_error:.2g}, {ess:.0f} effective samples of "
                f"{len(self.x)}, k-hat {khat:.2f}{warned}")  # fmt: skip


def fit_target(
    log_density: str | Callable[..., Any],
    dimension: int | None = None,
    *,
    folder: Path | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Fitted:
    """Fit a latent-variable model to a density that is known up to a constant, and measure how well it fits.

    Args:
        log_density: A function from x (n, dimension) to log-densities (n,), up to a constant; or the name of a target.
        folder: Where to keep checkpoint, records and pictures, as `dohyo reverse-kl --out` does; None keeps nothing.
        progress: Called after each step with the number of steps done.
        options: As those of `dohyo reverse-kl`: steps, estimator, cost, hidden, latent, seed and so on.

    Example:
        >>> from dohyo.lab import fit_target
        >>> fitted = fit_target(lambda x: -x.square().sum(-1) / 2, 2, steps=120, hidden=20, latent=2, estimator="multilevel-rr",
        ...                     learning_rate=1e-2, test_draws=400, test_terms=200)
        >>> log_z, stderr = fitted.log_z  # log 2 pi = 1.838
        >>> abs(log_z - 1.838) < 4 * stderr + 0.01
        True
        >>> sorted(fitted.quantities)
        ['x1', 'x2']
    """
    own = target(log_density, dimension)
    config = ReverseKLConfig(target=own.name, dimension=own.dimension, **options)
    if config.replicas > 1:
        raise DohyoError(f"replicas is {config.replicas}; one model is fitted here: dohyo reverse-kl --replicas fits several")
    with nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory() as place:
        run = ReverseKLRun(Path(place), config)
        run.target = own
        fabric = launch(config.device)
        run.check(fabric)
        run.parts[1].on_step = progress
        result = run.train(fabric)
        with np.load(run.folder / DRAWS) as arrays:
            x, log_target, log_px = (torch.from_numpy(arrays[key]) for key in ("x", "log_target", "log_px"))
    return Fitted(run.parts[0].eval(), x, log_target - log_px, result)
