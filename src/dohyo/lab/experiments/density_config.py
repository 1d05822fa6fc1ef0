"""The options of a run of density modelling, and what they make: data, model, first parameters, objective."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError, check_seed
from dohyo.files import resolved
from dohyo.lab.data import NAMES, AnyKind, Dataset, load
from dohyo.lab.experiments.annealing import MOST_STEPS
from dohyo.lab.experiments.run import EstimatorConfig, config_of
from dohyo.lab.folder import replica_folder
from dohyo.lab.training import LoopConfig
from dohyo.lab.training.chains import by_samples, passes, sized
from dohyo.lab.training.config import option
from dohyo.lab.training.state import load_checkpoint
from dohyo.models import build
from dohyo.models.registry import takes
from dohyo.objectives import Encoder, KDraw, MaximumLikelihood

Baseline = Literal["zero", "running"]
_MOST_TERMS, _LARGEST_DATUM = 100_000, 2**20
_ANNEAL_FROM = 0.5  # the best of results/chain_start_*_300s.json
Clip = float | Literal["auto"] | None


@dataclass
class DensityConfig(EstimatorConfig, LoopConfig):
    """A run of density modelling."""

    data: str = option("digits", "What to train on: a name; a .npy, .npz, .csv or .parquet file; or a folder of images.")
    data_dir: Path | None = option(
        None, "The folder of the named data; else DOHYO_DATA, else a cache that is filled by download.", resume=True
    )
    data_kind: AnyKind = option("auto", "What the numbers of a file are.")
    data_white: float | None = option(None, "The grey value that is white, such as 16; needed if whole numbers do not reach 255.")
    data_shape: str | None = option(None, "The shape of a datum if not the data's own, such as 1x28x28, or 784 for a vector.")
    data_seed: int | None = option(
        None,
        "The seed of the binarisation of validation and test data, and of a file's splits; null for `seed`. Replicas share it.",
    )
    model: str = option("vae", "The model by name, or package.module:name, your own nn.Module or a function that returns one.")
    latent: int = 50
    init_from: Path | None = option(None, "A run's folder, to begin with its best parameters; of replicas, each with its own.")
    anneal: int = option(
        0,
        "The leapfrogs of annealed chains, whose ends theta then follows, while phi follows fresh samples of its own; `cost` "
        "counts chains. 0 for samples of the encoder.",
    )
    # Names and numbers once it is made.
    anneal_from: float = option(
        None,
        "The share of the training before chains, in which theta follows IWAE on a few samples of the encoder, whose epochs are "
        f"short; by default {_ANNEAL_FROM}, or 0 with `init_from`.",
    )
    estimator: str | None = option(None, "What theta follows; by default sumo, and iwae over chains.")  # type: ignore[assignment]
    cost: float | None = option(  # type: ignore[assignment]
        None,
        "The expected number of log-weights for each estimate, as near as the estimator can come; by default 15, or 4 chains "
        "(5 for sumo).",
    )
    max_terms: int | None = option(
        None, "The most log-weights of a datum; the estimator is then unbiased for IWAE with this many. null for no limit."
    )
    encoder: Encoder | None = option(None, "What phi follows; by default same for bounds, dreg for unbiased ones and for chains.")
    k_draw: KDraw = option("batch", "How often K is drawn.")
    baseline: Baseline = option("zero", "What is subtracted from the estimate before it is squared, with encoder variance.")
    clip_datum: float | None = option(None, "The largest sum of one datum's coefficients; null for no such clipping.")
    clip_decoder: Clip = option(
        "auto", "The largest norm of theta's gradient; auto is 10 for bounds and 20 for unbiased estimators."
    )  # type: ignore[assignment]  # a number or None once it is made
    clip_encoder: Clip = option("auto", "The same for phi; auto is 10 for bounds, 5000 for encoder variance, else 125.")  # type: ignore[assignment]
    test_terms: int = option(5000, "The test NLL is by IWAE with this many terms.", resume=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("test_terms", "hidden", "latent", "max_terms")
        if not 0 <= self.anneal <= MOST_STEPS:
            wanted = f"it must be a number of leapfrogs, at most {MOST_STEPS}, or 0 for samples of the encoder"
            raise DohyoError(f"anneal is {self.anneal}; {wanted}")
        if self.anneal_from and not self.anneal:
            raise DohyoError(
                f"anneal_from is {self.anneal_from} without chains; leave it out, or give their leapfrogs, --anneal 8"
            )
        self.estimator = self.estimator or ("iwae" if self.anneal else "sumo")
        if self.cost is None:
            self.cost = (
                15.0 if not self.anneal else 5.0 if (self.estimator, self.max_terms) == ("sumo", None) else 4.0
            )  # its least
        if self.max_terms is not None and self.max_terms > _MOST_TERMS:
            raise DohyoError(f"max_terms is {self.max_terms}; it must be at most {_MOST_TERMS}, or null for no limit")
        check_seed("data_seed", self.data_seed)
        if self.data_dir is not None:
            self.data_dir = resolved(self.data_dir)
        if self.init_from is not None:
            self.init_from = resolved(self.init_from)
        if self.data not in NAMES and resolved(Path(self.data).expanduser()).exists():  # found again from another folder
            self.data = str(resolved(Path(self.data).expanduser()))
        _sizes(self.data_shape)
        objective = self.objective()
        bound = objective.estimator.depth_law.cap == 0  # a fixed number of terms
        self.encoder = objective.encoder  # the objective checks it, and knows the default
        if self.clip_decoder == "auto":
            self.clip_decoder = 10.0 if bound else 20.0
        if self.clip_encoder == "auto":
            self.clip_encoder = 10.0 if bound and self.encoder == "same" else 5000.0 if self.encoder == "variance" else 125.0

    @staticmethod
    def implied(values: Mapping[str, Any]) -> dict[str, Any]:
        samples_first = values.get("anneal") and values.get("init_from") is None
        own = {"anneal_from": _ANNEAL_FROM if samples_first else 0.0} if "anneal" in values else {}
        return {**LoopConfig.implied(values), **own}

    def objective(self) -> MaximumLikelihood:
        estimator, encoder = self.make_estimator(self.max_terms), self.encoder or ("dreg" if self.anneal else None)
        return MaximumLikelihood(estimator, encoder, self.k_draw, self.baseline, self.clip_datum)

    def dataset(self) -> Dataset:
        """The data as the model gets them: flat if the model is built with their size, `data`, and else in their own shape."""
        seed, shape = self.seed if self.data_seed is None else self.data_seed, _sizes(self.data_shape)
        data = load(self.data, self.data_dir, self.data_kind, seed, white=self.data_white, shape=shape)
        return data.flat() if takes(self.model, "data") and not takes(self.model, "shape", by_name=True) else data

    def build_model(self, data: Dataset) -> nn.Module:
        """The model with its initial parameters, which depend on the seed."""
        torch.manual_seed(self.seed)
        likelihood = "gaussian" if data.kind == "real" else "bernoulli"
        size = math.prod(data.shape)
        if size > _LARGEST_DATUM and ":" not in self.model:
            raise DohyoError(f"one datum has {size} numbers, and {self.model} takes at most {_LARGEST_DATUM}; use fewer columns")
        known = {"data": size, "hidden": self.hidden, "latent": self.latent, "likelihood": likelihood}
        model = build(self.model, **known, **({"shape": data.shape} if takes(self.model, "shape", by_name=True) else {}))
        start_from = getattr(model, "start_from", None)
        if start_from is not None:
            start_from(data.train)
        if self.anneal:
            annealed = Annealed(model, self.anneal)  # type: ignore[arg-type]
            annealed.constants = sized(annealed, data.valid)
            return annealed
        return model


def begin_with(model: nn.Module, folder: Path) -> None:
    """Give a model the best parameters of another run."""
    config_of(folder, "train")
    if replica_folder(folder, 0).exists():
        raise DohyoError(f"{folder}: holds replicas; name one of them, such as {replica_folder(folder, 0)}")
    best = load_checkpoint(folder)["best"]
    if "bridge" in best:  # of a run through chains: its model is inside
        best = {name.removeprefix("model."): value for name, value in best.items() if name.startswith("model.")}
    try:
        model.load_state_dict(best)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise DohyoError(f"{folder}: its parameters do not fit this model ({reason}); train the same model as there") from error


def decoder_passes(objective: MaximumLikelihood, steps: int) -> dict[str, float]:
    """The expected passes through the decoder that a training step takes for each datum, with chains of so many leapfrogs, or 0;
    backward, those by its inputs and those by its weights count one each."""
    weights = objective.estimator.expected_cost
    return {way: weights * count for way, count in zip(("forward", "backward"), passes(steps), strict=True)}


def before_chains(config: DensityConfig, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """How a run was trained before its theta followed chains: nothing for one that had none before, or has none."""
    chains = checkpoint["chains"]
    epochs = checkpoint["numbers"]["epoch"] if chains["waiting"] else chains["since"]
    if not epochs:
        return {}
    first = by_samples(config.objective(), config.anneal)
    about = {"estimator": "iwae", "expected_cost": first.estimator.expected_cost, "decoder_passes": decoder_passes(first, 0)}
    return {"epochs": epochs, **about}


def _sizes(text: str | None) -> tuple[int, ...] | None:
    """(1, 28, 28) from 1x28x28."""
    if text is None:
        return None
    sizes = text.lower().split("x")
    if not all(size.isascii() and size.isdigit() and 0 < int(size) < 10**9 for size in sizes):
        raise DohyoError(f"data_shape is {text!r}; write the sizes of a datum with an x between them, such as 1x28x28 or 784")
    return tuple(map(int, sizes))
