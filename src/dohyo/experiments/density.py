"""Density modelling: the paper's first experiment, and what a practitioner does with their own data."""

import dataclasses
import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning_fabric import Fabric
from torch import Tensor, nn

import dohyo
from dohyo.data import Dataset, load
from dohyo.estimators import ESTIMATORS, IWAE, Estimator, to_dict
from dohyo.evaluation import Evaluation, checksum, evaluate, summarise
from dohyo.files import plain, replacing
from dohyo.models import build
from dohyo.names import named
from dohyo.objectives import MaximumLikelihood, maximum_likelihood
from dohyo.objectives.maximum_likelihood import check_model
from dohyo.training import LoopConfig, fit
from dohyo.training.log import read_records
from dohyo.training.processes import gather
from dohyo.training.state import load_checkpoint

CONFIG, RESULT = "config.yaml", "result.json"
SCHEMA_VERSION = 1


@dataclass
class DensityConfig(LoopConfig):
    """A run of density modelling.

    Attributes:
        data: digits, mnist, mnist-static, omniglot, or a .npy or .npz file.
        data_dir: Where the data lie; else DOHYO_DATA, else a cache that is filled by download.
        data_kind: auto, binary, grey or real; how to read a file's numbers.
        model: vae, vae2 (two stochastic layers), or your own nn.Module as package.module:Class.
        hidden: Units in each hidden layer.
        latent: Latent dimensions.
        estimator: What theta follows: elbo, iwae, jvi, sumo, symmetric-sumo, multilevel-rr or multilevel-ss.
        cost: The expected number of log-weights for each datum in a step.
        encoder: What phi follows: same, variance, iwae or dreg; by default same for bounds and dreg for unbiased estimators.
        k_draw: batch or datum: one K for a batch, or one for each datum.
        baseline: zero or running, for encoder variance.
        clip_datum: The most that one datum's coefficients may sum to; null for no such clipping.
        clip_decoder: The most that the norm of theta's gradient may be; auto is 10 for bounds and 20 for unbiased estimators.
        clip_encoder: The same for phi; auto is 10 for bounds, 5000 for encoder variance, else 125.
        test_terms: The test NLL is by IWAE with this many terms.
    """

    data: str = "digits"
    data_dir: Path | None = None
    data_kind: str = "auto"
    model: str = "vae"
    hidden: int = 200
    latent: int = 50
    estimator: str = "sumo"
    cost: float = 15.0
    encoder: str | None = None
    k_draw: str = "batch"
    baseline: str = "zero"
    clip_datum: float | None = None
    clip_decoder: float | str | None = "auto"  # type: ignore[assignment]
    clip_encoder: float | str | None = "auto"  # type: ignore[assignment]
    test_terms: int = 5000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_terms < 1 or self.hidden < 1 or self.latent < 1:
            raise ValueError("test_terms, hidden and latent must be at least 1")
        if self.data_dir is not None:
            self.data_dir = self.data_dir.resolve()
        if Path(self.data).suffix:  # a file: found again from another folder
            self.data = str(Path(self.data).resolve())
        objective = self.objective()
        self.encoder = objective.encoder
        bound = objective.estimator.target_terms != math.inf
        others = 5000.0 if self.encoder == "variance" else 125.0
        self.clip_decoder = _auto(self.clip_decoder, 10.0 if bound else 20.0, "clip_decoder")
        self.clip_encoder = _auto(self.clip_encoder, 10.0 if bound and self.encoder == "same" else others, "clip_encoder")

    def objective(self) -> MaximumLikelihood:
        estimator = named(ESTIMATORS, self.estimator, "estimator").at_cost(self.cost)
        return maximum_likelihood(estimator, self.encoder, k_draw=self.k_draw, baseline=self.baseline, clip_datum=self.clip_datum)

    def dataset(self) -> Dataset:
        return load(self.data, self.data_dir, self.data_kind, self.seed)

    def build_model(self, data: Dataset) -> nn.Module:
        """The model with its first parameters, decided by the seed."""
        torch.manual_seed(self.seed)
        likelihood = "gaussian" if data.kind == "real" else "bernoulli"
        size = data.train.shape[1]
        model = build(self.model, data=size, hidden=self.hidden, latent=self.latent, likelihood=likelihood)
        start_from = getattr(model, "start_from", None)
        if start_from is not None:
            start_from(data.train)
        return model


class Run:
    """A run's folder: config.yaml first, then checkpoint, metrics, result and pictures."""

    def __init__(self, folder: Path, config: DensityConfig) -> None:
        self.folder, self.config = folder, config

    @classmethod
    def open(cls, folder: Path) -> "Run":
        from jsonargparse import ArgumentError, ArgumentParser

        path = folder / CONFIG
        if not path.is_file():
            raise ValueError(f"{folder}: holds no run (there is no {CONFIG} in it)")
        try:
            parser = ArgumentParser(exit_on_error=False)
            parser.add_class_arguments(DensityConfig)
            values = parser.parse_object(yaml.safe_load(path.read_text(encoding="utf-8")))
            return cls(folder, DensityConfig(**values.as_dict()))
        except (yaml.YAMLError, ArgumentError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def write_config(self) -> None:
        values = dataclasses.asdict(self.config)
        values["data_dir"] = None if self.config.data_dir is None else str(self.config.data_dir)
        with replacing(self.folder / CONFIG) as temporary:
            temporary.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        result = self.result
        if result is None:
            return False
        numbers = load_checkpoint(self.folder)["numbers"]
        over = numbers["epoch"] >= self.config.epochs or numbers["stale"] >= self.config.stop_patience
        return bool(over and result["epochs"] == numbers["epoch"])  # an older result is that of a shorter run

    @property
    def result(self) -> dict[str, Any] | None:
        """What result.json holds, if it is there."""
        path = self.folder / RESULT
        if not path.exists():
            return None
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: is damaged ({error}); remove it, and --resume makes it anew") from error

    @cached_property
    def parts(self) -> tuple[nn.Module, Dataset, MaximumLikelihood]:
        """The untrained model, the data and the objective: asked for before a folder is made, so that errors come first."""
        data, objective = self.config.dataset(), self.config.objective()
        model = self.config.build_model(data)
        check_model(model, objective)
        return model, data, objective

    def trained(self) -> tuple[nn.Module, Dataset]:
        """The best model so far and its data."""
        model, data, _ = self.parts
        try:
            model.load_state_dict(load_checkpoint(self.folder)["best"])
        except RuntimeError as error:
            raise ValueError(f"{self.folder}: the checkpoint does not fit the model of {CONFIG} ({error})") from error
        return model, data

    def train(
        self,
        fabric: Fabric,
        on_epoch: Callable[[dict[str, Any]], None] = lambda record: None,
        on_test: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Any]:
        """Train from where the folder stands, evaluate the best parameters, write result.json and the pictures."""
        model, data, objective = self.parts
        loop: Any = self.config
        for record in fit(model, data, objective, loop, self.folder, fabric):
            on_epoch(record)
        estimator = IWAE(self.config.test_terms)
        test = evaluate_shared_out(
            fabric, model, data.test, estimator, seed=self.config.seed, max_rows=self.config.max_rows,
            progress=lambda done: on_test(done, -(-len(data.test) // fabric.world_size)),
        )  # fmt: skip
        result = self._result(test)
        if fabric.is_global_zero:
            self._draw(model.cpu(), data)
            for leftover in self.folder.glob(".checkpoint-*"):  # of a kill while writing
                leftover.unlink()
            write_json(self.folder / RESULT, result)  # last: it says that the run is finished
        return result

    def _result(self, test: Evaluation) -> dict[str, Any]:
        numbers = load_checkpoint(self.folder)["numbers"]
        estimator = self.config.objective().estimator
        result = {
            "schema_version": SCHEMA_VERSION,
            "test_nll": -test.mean,
            "test_nll_stderr": test.stderr,
            "test_terms": self.config.test_terms,
            "valid_nll": numbers["best_nll"],
            "estimator": self.config.estimator,
            "expected_cost": estimator.expected_cost,
            "estimator_arguments": to_dict(estimator),
            "encoder": self.config.encoder,
            "data": self.config.data,
            "model": self.config.model,
            "seed": self.config.seed,
            "epochs": numbers["epoch"],
            "best_epoch": numbers["best_epoch"],
            "seconds": numbers["seconds"],
            "warnings": list(test.warnings),
            "versions": versions(),
        }
        return {key: plain(value) for key, value in result.items()}

    def _draw(self, model: Any, data: Dataset) -> None:
        from dohyo.plots.runs import plot_images, plot_learning_curves, plot_reconstructions

        if records := read_records(self.folder):
            plot_learning_curves(records, self.folder / "learning_curves.png")
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            if hasattr(model, "sample_mean"):
                plot_images(model.sample_mean(64), data.shape, self.folder / "samples.png", title="means of samples")
            if hasattr(model, "reconstruct"):
                x = data.test[:16]
                plot_reconstructions(x, model.reconstruct(x), data.shape, self.folder / "reconstructions.png")


def evaluate_shared_out(fabric: Fabric, model: Any, data: Tensor, estimator: Estimator, seed: int, **options: Any) -> Evaluation:
    """`evaluate`, each process on its own part of the data."""
    if len(data) < fabric.world_size:
        raise ValueError(f"{len(data)} data for {fabric.world_size} processes; use fewer processes")
    model = model.to(fabric.device)
    own = data[fabric.global_rank :: fabric.world_size].to(fabric.device)
    result = evaluate(model, own, estimator, seed=seed + fabric.global_rank, **options)
    parts = gather(fabric, result)
    if len(parts) == 1:
        return result
    values = torch.empty(len(data), 1, dtype=torch.float64)
    for rank, part in enumerate(parts):
        values[rank :: fabric.world_size, 0] = part.per_datum
    noise = [None if part.noise_stderr is None else part.noise_stderr * len(part.per_datum) for part in parts]
    whole = summarise(values, estimator, sum(part.cost for part in parts), torch.cat([part.khat for part in parts]))
    known = [n for n in noise if n is not None]
    together = math.hypot(*known) / len(data) if len(known) == len(parts) else None
    return dataclasses.replace(whole, noise_stderr=together, replicates=result.replicates, fingerprint=checksum(data))


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(plain(value), indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    return {"dohyo": dohyo.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _auto(value: float | str | None, otherwise: float, name: str) -> float | None:
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"{name} is {value!r}; it must be a number, auto or null")
    return otherwise if isinstance(value, str) else value
