"""Density modelling: the paper's first experiment, and what a practitioner does with their own data."""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.errors import DohyoError
from dohyo.estimators import ESTIMATORS, IWAE, Estimator, to_dict
from dohyo.evaluation import Evaluation, checksum, evaluate, summarise
from dohyo.files import plain
from dohyo.lab.data import Dataset, load
from dohyo.lab.experiments.run import RESULT, OnEpoch, OnTest, Run, write_json
from dohyo.lab.fast.stacked import Unbatchable
from dohyo.lab.fast.together import Replica, choose_for, train_together
from dohyo.lab.training import LoopConfig
from dohyo.lab.training.log import read_records
from dohyo.lab.training.loop import Diverged, check
from dohyo.lab.training.processes import gather
from dohyo.lab.training.state import load_checkpoint
from dohyo.lab.training.tasks import OnData, Task
from dohyo.models import build
from dohyo.names import named
from dohyo.objectives import MaximumLikelihood


@dataclass
class DensityConfig(LoopConfig):
    """A run of density modelling.

    Attributes:
        data: digits, mnist, mnist-static, omniglot, or a .npy or .npz file.
        data_dir: Where the data lie; else DOHYO_DATA, else a cache that is filled by download.
        data_kind: auto, binary, grey or real; how to read a file's numbers.
        data_seed: Of the binarisation of validation and test data, and of a file's splits; null for `seed`. Replicas share it.
        model: vae, vae2 (two stochastic layers), or your own nn.Module as package.module:Class.
        hidden: Units in each hidden layer.
        latent: Latent dimensions.
        estimator: What theta follows: elbo, iwae, jvi, sumo, symmetric-sumo, multilevel-rr or multilevel-ss.
        cost: The expected number of log-weights for each datum in a step.
        max_terms: The most log-weights of a datum, of which the estimator is then unbiased for IWAE; null for no limit.
        encoder: What phi follows: same, variance, iwae or dreg; by default same for bounds and dreg for unbiased estimators.
        k_draw: batch or datum: one K for a batch, or one for each datum.
        baseline: zero or running, for encoder variance.
        clip_datum: The most that one datum's coefficients may sum to; null for no such clipping.
        clip_decoder: The most that the norm of theta's gradient may be; auto is 10 for bounds and 20 for unbiased estimators.
        clip_encoder: The same for phi; auto is 10 for bounds, 5000 for encoder variance, else 125.
        test_terms: The test NLL is by IWAE with this many terms.
        replicas: How many runs, with seeds from `seed` on, in one program where the model allows it; the result is their mean
            and spread. Each has its own data order and noise; K is common to all.
    """

    data: str = "digits"
    data_dir: Path | None = None
    data_kind: str = "auto"
    data_seed: int | None = None
    model: str = "vae"
    hidden: int = 200
    latent: int = 50
    estimator: str = "sumo"
    cost: float = 15.0
    max_terms: int | None = None
    encoder: str | None = None
    k_draw: str = "batch"
    baseline: str = "zero"
    clip_datum: float | None = None
    clip_decoder: float | str | None = "auto"  # type: ignore[assignment]
    clip_encoder: float | str | None = "auto"  # type: ignore[assignment]
    test_terms: int = 5000
    replicas: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("test_terms", "hidden", "latent", "replicas", "max_terms")
        if self.data_dir is not None:
            self.data_dir = self.data_dir.resolve()
        if Path(self.data).suffix:  # a file: found again from another folder
            self.data = str(Path(self.data).resolve())
        objective = self.objective()
        if self.program == "captured" and self.k_draw == "datum" and objective.estimator.depth_law.cap > 0:
            raise DohyoError(
                "a step with a K for each datum has no fixed shape to capture; use --k-draw batch, or --program plain"
            )
        self.encoder = objective.encoder
        bound = objective.estimator.depth_law.cap == 0  # a fixed number of terms
        others = 5000.0 if self.encoder == "variance" else 125.0
        self.clip_decoder = _auto(self.clip_decoder, 10.0 if bound else 20.0, "clip_decoder")
        self.clip_encoder = _auto(self.clip_encoder, 10.0 if bound and self.encoder == "same" else others, "clip_encoder")

    def objective(self) -> MaximumLikelihood:
        estimator = named(ESTIMATORS, self.estimator, "estimator").at_cost(self.cost, self.max_terms)
        return MaximumLikelihood(estimator, self.encoder, self.k_draw, self.baseline, self.clip_datum)  # type: ignore[arg-type]

    def dataset(self) -> Dataset:
        return load(self.data, self.data_dir, self.data_kind, self.seed if self.data_seed is None else self.data_seed)

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


class DensityRun(Run[DensityConfig]):
    """A run of `dohyo train`."""

    command, config_type, length, free = "train", DensityConfig, "epochs", ("epochs", "program")

    def __init__(self, folder: Path, config: DensityConfig, of: "DensityRun | None" = None) -> None:
        super().__init__(folder, config)
        self.of = of  # the replicated run that this one is a part of

    @cached_property
    def data(self) -> Dataset:
        return self.config.dataset() if self.of is None else self.of.data

    @cached_property
    def task(self) -> OnData:
        return OnData(self.data) if self.of is None else self.of.task  # of all replicas: the data are in memory once

    def make_parts(self) -> tuple[nn.Module, Task[Any], MaximumLikelihood]:
        model, objective = self.config.build_model(self.data), self.config.objective()
        check(model, objective, self.data.train_batch(torch.arange(min(2, len(self.data.train)))))
        return model, self.task, objective

    @cached_property
    def replicas(self) -> list["DensityRun"]:
        """The runs of a replicated one, each in a folder of its own; empty if there is one run only."""
        config, seed = self.config, self.config.seed
        if config.replicas == 1:
            return []
        k_seed, data_seed = (seed if own is None else own for own in (config.k_seed, config.data_seed))
        common = dataclasses.replace(config, k_seed=k_seed, data_seed=data_seed, replicas=1)
        configs = [dataclasses.replace(common, seed=seed + i) for i in range(config.replicas)]
        return [DensityRun(self.folder / f"replica_{i}", config, self) for i, config in enumerate(configs)]

    @property
    def finished(self) -> bool:
        if not self.replicas:
            return super().finished
        result = self.result
        return (
            result is not None
            and all(replica.finished for replica in self.replicas)
            and result["replicas"] == [replica.result for replica in self.replicas]  # none was trained on since
        )

    def trained(self) -> nn.Module:
        if self.replicas:
            raise DohyoError(f"{self.folder} holds {len(self.replicas)} replicas; name one of them: {self.replicas[0].folder}")
        return super().trained()

    def train(self, fabric: Fabric, on_epoch: OnEpoch = lambda record: None, on_test: OnTest = lambda *_: None) -> dict[str, Any]:
        if not self.replicas:
            return super().train(fabric, lambda record: on_epoch({**record, "notices": _uncaptured(record)}), on_test)
        warnings, lost = [], {}
        try:
            self._train_together(fabric, on_epoch)
        except Unbatchable as error:
            warnings = [f"the replicas run one after the other: {error}"]
        except Diverged as error:
            lost = dict.fromkeys(error.places, str(error))
        results = []
        for number, replica in enumerate(self.replicas):
            if number in lost:
                continue

            def tell(record: dict[str, Any], number: int = number) -> None:
                on_epoch({**record, "replica": number, "notices": [*warnings, *record["notices"]]})

            try:
                results.append(replica.complete(fabric, tell, on_test))
            except Diverged as error:
                lost[number] = str(error)
        if lost:
            done = [str(replica.folder) for number, replica in enumerate(self.replicas) if number not in lost]
            others = f"; the others are finished, in {', '.join(done)}" if done else ""
            raise DohyoError("; ".join(dict.fromkeys(lost.values())) + others)
        result = plain(self._together(results))
        result["warnings"] = [*warnings, *result["warnings"]]
        result["seconds"] = (sum if warnings else max)(one["seconds"] for one in results)
        if fabric.is_global_zero:
            write_json(self.folder / RESULT, result)
        return dict(result)

    def _train_together(self, fabric: Fabric, on_epoch: OnEpoch) -> None:
        """Train the replicas in one program, as far as they are not yet."""
        members, pending = [], []
        for number, replica in enumerate(self.replicas):
            model, task, objective = replica.parts
            members.append(Replica(model, task, replica.config, replica.folder))
            if not replica.finished:
                pending.append(number)
        if len(pending) < 2:
            choose_for(members, objective, fabric)  # only to know whether they can go together
            return
        if fabric.is_global_zero:
            for number in pending:
                self.replicas[number].write_config()
        try:
            for place, record in train_together([members[number] for number in pending], objective, fabric):
                on_epoch({**record, "replica": pending[place], "notices": _uncaptured(record)})
        except Diverged as error:
            raise Diverged(str(error), [pending[place] for place in error.places]) from error

    def _together(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """The mean of every number that differs between replicas, with the spread of the test NLL, and the replicas."""
        first, mean = results[0], {}
        for key, value in first.items():
            numbers = [result[key] for result in results]
            is_number = isinstance(value, float | int) and not isinstance(value, bool) and None not in numbers
            mean[key] = statistics.fmean(numbers) if is_number and len(set(numbers)) > 1 else value
        nlls = [result["test_nll"] for result in results]
        spread = statistics.stdev(nlls) if None not in nlls else None
        stderr = None if spread is None else spread / math.sqrt(len(nlls))
        own = {"seed": self.config.seed, "warnings": sorted({line for result in results for line in result["warnings"]})}
        return mean | own | {"test_nll_spread": spread, "test_nll_mean_stderr": stderr, "replicas": results}

    def finish(self, fabric: Fabric, on_test: OnTest) -> dict[str, Any]:
        model, config, data = self.parts[0], self.config, self.data
        test = evaluate_shared_out(
            fabric, model, data.test, IWAE(config.test_terms), seed=config.seed, max_rows=config.max_rows,
            progress=lambda done: on_test(done, -(-len(data.test) // fabric.world_size)),
        )  # fmt: skip
        if fabric.is_global_zero:
            self._draw(model.cpu())
        numbers = load_checkpoint(self.folder)["numbers"]
        uncaptured = _uncaptured(records[-1]) if (records := read_records(self.folder)) else []
        estimator = config.objective().estimator
        return {
            "test_nll": -test.mean,
            "test_nll_stderr": test.stderr,
            "test_terms": config.test_terms,
            "valid_nll": numbers["best_score"],
            "estimator": config.estimator,
            "expected_cost": estimator.expected_cost,
            "estimator_arguments": to_dict(estimator),
            "encoder": config.encoder,
            "data": config.data,
            "model": config.model,
            "best_epoch": numbers["best_epoch"],
            "warnings": [*uncaptured, *test.warnings],
        }

    def _draw(self, model: Any) -> None:
        from dohyo.lab.plots.runs import plot_images, plot_learning_curves, plot_reconstructions

        if records := read_records(self.folder):
            plot_learning_curves(records, self.folder / "learning_curves.png")
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            if hasattr(model, "sample_mean"):
                plot_images(model.sample_mean(64), self.data.shape, self.folder / "samples.png", title="means of samples")
            if hasattr(model, "reconstruct"):
                x = self.data.test[:16]
                plot_reconstructions(x, model.reconstruct(x), self.data.shape, self.folder / "reconstructions.png")


def evaluate_shared_out(fabric: Fabric, model: Any, data: Tensor, estimator: Estimator, seed: int, **options: Any) -> Evaluation:
    """`evaluate`, each process on its own part of the data."""
    if len(data) < fabric.world_size:
        raise DohyoError(f"{len(data)} data for {fabric.world_size} processes; use fewer processes")
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


def _uncaptured(record: dict[str, Any]) -> list[str]:
    """What to tell of a record's program, if a faster one was to be tried."""
    _, _, reason = record.get("program", "").partition("plain: ")
    return [f"the step is not captured: {reason}"] if reason else []


def _auto(value: float | str | None, otherwise: float, name: str) -> float | None:
    if isinstance(value, str) and value != "auto":
        raise DohyoError(f"{name} is {value!r}; it must be a number, auto or null")
    return otherwise if isinstance(value, str) else value
