"""Better weights for a trained run: whether they are needed, chains tuned for its data, and their constants beside it."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.annealing import Annealed
from dohyo.annealing.annealed import ITERATIONS
from dohyo.annealing.chain import check_density
from dohyo.contract import bound
from dohyo.diagnostics import khat
from dohyo.errors import DohyoError
from dohyo.evaluation import checksum, isolated, most_rows
from dohyo.files import plain
from dohyo.lab.experiments.run import OnTest
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
class Asked:
    """What weights are asked for."""

    anneal: Anneal
    what: str  # a name for the data, in annealing.json
    seed: int
    max_rows: int | None


@dataclass(frozen=True)
class Weights:
    """What log-weights an evaluation is made from."""

    model: Any  # the trained model, or chains that start from its encoder
    steps: int = 0  # leapfrogs of a chain; 0 for the encoder's weights
    warnings: tuple[str, ...] = ()  # why they are the encoder's, where they should not be

    @property
    def each(self) -> int:
        """Evaluations of p(x, z) for one log-weight."""
        return 3 * self.steps + 1

    @property
    def name(self) -> str:
        return f"{self.steps} leapfrogs" if self.steps else "encoder"


def choose_weights(fabric: Fabric, folder: Path, model: Any, x: Tensor, asked: Asked, on_tuning: OnTest) -> Weights:
    """The weights to use for x. `auto` keeps the encoder's where k-hat finds them good, and else lets a pilot choose.
    Constants are read from the run's folder if they were tuned for these parameters and data, and else written to it."""
    if asked.anneal == 0:
        return Weights(model)
    if asked.anneal != "auto":
        check_density(model)
    stamp = {"anneal": asked.anneal, "iterations": ITERATIONS, "by": "mean log-weight", "seed": asked.seed,
             "parameters": _parameters(model), "data": checksum(x)}  # fmt: skip
    x, model = x.to(fabric.device), model.to(fabric.device)
    found = _constants(folder, model, x, asked, stamp, on_tuning) if fabric.is_global_zero else (None, "")
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


def _constants(folder: Path, model: Any, x: Tensor, asked: Asked, stamp: Values, on_tuning: OnTest) -> tuple[Values | None, str]:
    """The constants of the chains to use; None for the encoder's weights, and why, where that is not by choice."""
    path, remedy = folder / ANNEALING, "remove it: the constants are then tuned again"
    known = read_json(path, remedy) if path.exists() else {}
    entry, auto = known.get(asked.what), asked.anneal == "auto"
    if isinstance(entry, dict) and {key: entry.get(key) for key in stamp} == stamp:
        try:
            Annealed.from_dict(model, entry["tuned"]["constants"])
        except (DohyoError, KeyError, TypeError) as error:
            raise DohyoError(f"{path}: is damaged ({error}); {remedy}") from error
        return entry["tuned"]["constants"], ""
    try:
        if auto:
            shapes = khat(log_weights(model, x[:EXAMINED], WEIGHTS, asked.seed, asked.max_rows))
            if heavy_share(shapes) <= GOOD and not bool((shapes > WORST).any()):
                return None, ""
        annealed = Annealed(model, None if asked.anneal == "auto" else asked.anneal)
        tuned = annealed.tune(x, seed=asked.seed, max_rows=asked.max_rows, progress=lambda done: on_tuning(done, ITERATIONS))
    except DohyoError as error:
        if not auto:
            raise
        return None, str(error)  # a model without a density, or with a discrete z
    with contextlib.suppress(OSError):  # they are kept only to save time
        write_json(path, known | {asked.what: stamp | {"tuned": tuned.to_dict()}})
    return plain(tuned.constants.to_dict()), ""


def plot_weights(folder: Path, model: Any, weights: Weights, x: Tensor, asked: Asked) -> Path:
    """A picture of log p(x) against evaluations, by the encoder's weights and by these, in the run's folder."""
    from dohyo.lab.plots.bank import plot_approach

    encoder = log_weights(model, x[:EXAMINED], ENCODER_WEIGHTS, asked.seed, asked.max_rows)
    chains = log_weights(weights.model, x[:EXAMINED], CHAINS, asked.seed, asked.max_rows)
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
