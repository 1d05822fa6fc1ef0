"""Better weights for a trained run: whether they are needed, chains tuned for its data, and their constants beside it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.annealing import Annealed
from dohyo.annealing.annealed import ITERATIONS as ITERATIONS  # for the bar of the commands
from dohyo.annealing.chain import check_density
from dohyo.contract import bound
from dohyo.diagnostics import khat
from dohyo.errors import DohyoError
from dohyo.evaluation import checksum, isolated, most_rows
from dohyo.files import plain
from dohyo.lab.folder import ANNEALING, LOG_LIKELIHOOD, Values, read_json, write_json
from dohyo.packing import rows
from dohyo.verdict import heavy_share

MOST_STEPS = 10_000
Anneal = int | Literal["auto"]
EXAMINED, WEIGHTS = 64, 500  # data, and weights of each, by which auto decides
ENCODER_WEIGHTS, CHAINS = 4096, 200  # of each of as many data in the picture; as many chains are enough for their k-hat
# It keeps the encoder's up to this share of heavy ones and this k-hat of any: less than a verdict allows, as k-hat is noisy.
GOOD, WORST = 0.3, 1.2
SEED = 4_000_037  # added to the user's, so that the evaluation draws other noise than what decides about it


@dataclass(frozen=True)
class Weights:
    """What log-weights an evaluation is made from.

    Attributes:
        model: The trained model, or chains that start from its encoder.
        steps: Leapfrogs of a chain; 0 for the encoder's weights.
        warnings: Why they are the encoder's, where they should not be.
    """

    model: Any
    steps: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def each(self) -> int:
        """Evaluations of p(x, z) for one log-weight."""
        return 3 * self.steps + 1

    @property
    def name(self) -> str:
        return f"{self.steps} leapfrogs" if self.steps else "encoder"


def choose_weights(
    fabric: Fabric,
    folder: Path,
    model: Any,
    x: Tensor,
    anneal: Anneal,
    what: str,
    seed: int,
    max_rows: int | None,
    progress: Callable[[int], None] | None = None,
) -> Weights:
    """The weights to use for x. `auto` keeps the encoder's where k-hat finds them good, and else lets a pilot choose.

    Constants are read from the run's folder if they were tuned for these parameters and data, and else written to it.

    Args:
        what: A name for the data in that file.
        progress: Called with the number of iterations done, while chains are tuned.
    """
    check_anneal(anneal)
    if anneal == 0:
        return Weights(model)
    if anneal != "auto":
        check_density(model)
    stamp = {"anneal": anneal, "iterations": ITERATIONS, "seed": seed, "parameters": _parameters(model), "data": checksum(x)}
    x, model = x.to(fabric.device), model.to(fabric.device)
    found: tuple[Values | None, str] = (None, "")
    if fabric.is_global_zero:
        found = _constants(folder, model, x, anneal, what, stamp, seed, max_rows, progress)
    constants, reason = fabric.broadcast(found)
    if constants is None:
        return Weights(model, 0, (f"the weights cannot be annealed: {reason}",) if reason else ())
    annealed = Annealed.from_dict(model, constants)
    return Weights(annealed, annealed.steps or 0) if annealed.steps else Weights(model)


def check_anneal(anneal: Anneal) -> None:
    if anneal != "auto" and not 0 <= anneal <= MOST_STEPS:
        raise DohyoError(
            f"--anneal is {anneal}; it must be a whole number of steps, at most {MOST_STEPS}, 0 for the encoder's own, or auto"
        )


def _constants(
    folder: Path,
    model: Any,
    x: Tensor,
    anneal: Anneal,
    what: str,
    stamp: Values,
    seed: int,
    max_rows: int | None,
    progress: Callable[[int], None] | None,
) -> tuple[Values | None, str]:
    """The constants of the chains to use; None for the encoder's weights, and why, where that is not by choice."""
    path, remedy = folder / ANNEALING, "remove it: the constants are then tuned again"
    known = read_json(path, remedy) if path.exists() else {}
    entry = known.get(what)
    if isinstance(entry, dict) and {key: entry.get(key) for key in stamp} == stamp:
        try:
            Annealed.from_dict(model, entry["tuned"]["constants"])
        except (DohyoError, KeyError, TypeError) as error:
            raise DohyoError(f"{path}: is damaged ({error}); {remedy}") from error
        return entry["tuned"]["constants"], ""
    try:
        if anneal == "auto":
            shapes = khat(log_weights(model, x[:EXAMINED], WEIGHTS, seed, max_rows))
            if heavy_share(shapes) <= GOOD and not bool((shapes > WORST).any()):
                return None, ""
        annealed = Annealed(model, None if anneal == "auto" else anneal)
        tuned = annealed.tune(x, iterations=ITERATIONS, seed=seed, max_rows=max_rows, progress=progress)
    except DohyoError as error:
        if anneal != "auto":
            raise
        return None, str(error)  # a model without a density, or with a discrete z
    with contextlib.suppress(OSError):  # they are kept only to save time
        write_json(path, known | {what: stamp | {"tuned": tuned.to_dict()}})
    return plain(tuned.constants.to_dict()), ""


def plot_weights(folder: Path, model: Any, weights: Weights, x: Tensor, seed: int, max_rows: int | None) -> Path:
    """A picture of log p(x) against evaluations, by the encoder's weights and by these, in the run's folder."""
    from dohyo.lab.plots.bank import plot_approach

    encoder = log_weights(model, x[:EXAMINED], ENCODER_WEIGHTS, seed, max_rows)
    chains = log_weights(weights.model, x[:EXAMINED], CHAINS, seed, max_rows)
    plot_approach(encoder, chains, weights.each, weights.steps, folder / LOG_LIKELIHOOD)
    return folder / LOG_LIKELIHOOD


def log_weights(model: Any, x: Tensor, n: int, seed: int, max_rows: int | None) -> Tensor:
    """(data, n) float64 on the CPU, with a seed of their own."""
    with isolated(model, seed + SEED):
        source = bound(model, x)
        parts = [source(part) for part in rows(torch.full((len(x),), n), x.device).split(most_rows(x, max_rows))]
        return torch.cat(parts).view(len(x), n).double().cpu()


def _parameters(model: nn.Module) -> int:
    """A checksum of the trained parameters."""
    found = 0
    for tensor in model.state_dict().values():
        found = checksum(tensor.flatten(), found)
    return found
