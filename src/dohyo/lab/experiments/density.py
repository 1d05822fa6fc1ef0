"""Density modelling: the paper's first experiment, and what a practitioner does with their own data."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError, reporting
from dohyo.estimators import IWAE, Estimator
from dohyo.evaluation import Evaluation, checksum, evaluate, summarise
from dohyo.lab.data import Dataset
from dohyo.lab.evaluations import save_evaluation
from dohyo.lab.experiments.density_config import DensityConfig, before_chains, begin_with, decoder_passes
from dohyo.lab.experiments.replicated import ReplicatedRun, not_captured
from dohyo.lab.experiments.run import OnTest, about_estimator
from dohyo.lab.folder import (
    CHECKPOINT,
    LEARNING_CURVES,
    MARGINALS,
    PAIRS,
    RECONSTRUCTIONS,
    SAMPLES,
    TEST_AVERAGE,
    TEST_VALUES,
    Values,
    read_records,
    replica_folder,
)
from dohyo.lab.training.chains import by_samples, in_words
from dohyo.lab.training.config import Progress
from dohyo.lab.training.loop import check
from dohyo.lab.training.processes import gather
from dohyo.lab.training.state import load_checkpoint
from dohyo.lab.training.tasks import OnData, validation_nll
from dohyo.objectives import MaximumLikelihood

SAMPLED = 1000  # samples of the model in the pictures of a table


class DensityRun(ReplicatedRun[DensityConfig]):
    """A run of `dohyo train`."""

    command, config_type, tested_by = "train", DensityConfig, ("test_terms",)
    outcomes = ("test_nll", "test_nll_annealed")
    at_first: ClassVar[Values] = {"anneal_from": 0.0}

    @cached_property
    def data(self) -> Dataset:
        return self.config.dataset() if self.of is None else self.of.data

    @cached_property
    def task(self) -> OnData:
        return OnData(self.data) if self.of is None else self.of.task  # replicas share it: the data are in memory once

    @property
    def notes(self) -> list[str]:
        data = self.data
        splits = f"{len(data.train):,} to train on, {len(data.valid):,} to validate, {len(data.test):,} to test"
        return [f"{data.name}: {'x'.join(map(str, data.shape))} {data.about}; {splits}", *self._plan()]

    def _plan(self) -> list[str]:
        """What theta follows, where that is chains."""
        config = self.config
        if not config.anneal:
            return []
        objective = config.objective()
        count, first = (each.estimator.expected_cost for each in (objective, by_samples(objective, config.anneal)))
        chains = f"{config.estimator} over {in_words(count, config.anneal)}"
        if config.by_chains(Progress()):
            return [f"trained by {chains}"]
        return [f"trained by iwae at {first:.4g}, and after {config.anneal_from:.4g} of the training by {chains}"]

    def make_parts(self) -> tuple[nn.Module, OnData, MaximumLikelihood]:
        config, x = self.config, self.data.train_batch(torch.arange(min(2, len(self.data.train))))
        objective = config.objective()
        sizes = "x".join(map(str, x.shape[1:]))
        failed = f"{config.model} raised {{}} with x {tuple(x.shape)}; if x has the wrong shape, change --data-shape from {sizes}"
        with reporting(failed) if ":" in config.model else contextlib.nullcontext():
            model = config.build_model(self.data)
            for run in self.replicas or [self]:  # each of several begins with its own, and all are tried here
                if run.config.init_from is not None and not (run.folder / CHECKPOINT).exists():
                    begin_with(unannealed(model), run.config.init_from)
            check(model, objective, x, config.anneal_from)
        return model, self.task, objective

    def replica_configs(self) -> list[DensityConfig]:
        own = {"data_seed": self.config.seed if self.config.data_seed is None else self.config.data_seed}
        configs = enumerate(super().replica_configs())
        return [dataclasses.replace(config, init_from=self._source(i), **own) for i, config in configs]

    def _source(self, i: int) -> Path | None:
        """The run that replica i begins with, or began with: its folder may be gone since."""
        given, own = self.config.init_from, replica_folder(self.folder, i)
        if given is None:
            return None
        if (own / CHECKPOINT).exists():
            return DensityRun.open(own).config.init_from
        return replica_folder(given, i) if replica_folder(given, 0).exists() else given

    def trained(self, average: bool = False) -> nn.Module:
        return unannealed(super().trained(average))

    def finish(self, fabric: Fabric, on_test: OnTest) -> dict[str, Any]:
        trained, config, data = self.parts[0], self.config, self.data
        checkpoint = load_checkpoint(self.folder)
        numbers, before, model, chains = checkpoint["numbers"], before_chains(config, checkpoint), unannealed(trained), {}
        if before.get("epochs") == numbers["epoch"]:  # it never came to chains
            trained = model

        def test_by(model: nn.Module, terms: int) -> Evaluation:
            return evaluate_over_processes(fabric, model, data.test, IWAE(terms), on_test, config.seed, max_rows=config.max_rows)

        test = test_by(model, config.test_terms)
        if isinstance(trained, Annealed):
            count = _as_many(trained, config.test_terms)
            found = test_by(trained, count)
            chains = {
                "test_nll_annealed": -found.mean, "test_nll_annealed_stderr": found.stderr, "test_chains": count,
                "anneal": config.anneal, "verdict_annealed": found.verdict.to_dict(),
            }  # fmt: skip
        average = self._test_average(fabric, trained, test_by) if config.average else {}
        records = read_records(self.folder)
        if fabric.is_global_zero:
            about = {"run": str(self.folder), "split": "test", "through_chains": isinstance(trained, Annealed)}
            save_evaluation(self.folder / TEST_VALUES, test, IWAE(config.test_terms), **about)
            self._plot(model.cpu(), records)
        return {
            "test_nll": -test.mean,
            "test_nll_stderr": test.stderr,
            "test_terms": config.test_terms,
            **chains,
            **average,
            "decoder_passes": decoder_passes(config.objective(), config.anneal),
            **({"before_chains": before} if before else {}),
            "valid_nll": numbers["best_score"],
            **about_estimator(config, config.objective().estimator),
            "data": config.data,
            "data_read": data.about,
            "model": config.model,
            "best_epoch": numbers["best_epoch"],
            "verdict": test.verdict.to_dict(),
            "warnings": [*(self._unsound(records[-1], numbers, before) if records else []), *test.warnings],
        }

    @staticmethod
    def _unsound(last: Values, numbers: Values, before: Values) -> list[str]:
        """What to know of the training besides its numbers, from its last record."""
        each = last.get("lost_chains", 0.0)
        lost = f"in the last epoch {each:.2g} chains for each datum were lost: lower the learning rate, or take fewer leapfrogs"
        early = before.get("epochs") == last["epoch"]
        chains = " through chains" if before and not early else ""
        begun = (
            f"no epoch{chains} had a finite validation NLL, so that the parameters are those before training{chains}: lower the "
            "learning rate"
        )
        never = "training ended before theta followed chains: give it more time, or a lower --anneal-from"
        found = [(lost, each > 0), (begun, not math.isfinite(numbers["best_score"])), (never, early)]
        return [*not_captured(last), *(line for line, true in found if true)]

    def _test_average(
        self, fabric: Fabric, followed: nn.Module, test_by: Callable[[nn.Module, int], Evaluation]
    ) -> dict[str, Any]:
        """What the result says of the averaged parameters; the model keeps its best ones."""
        config, terms = self.config, self.config.test_terms
        found = test_by(self.trained(average=True), terms)
        valid = validation_nll(followed, self.data.valid.to(fabric.device), config, fabric)()
        chains = {}
        if isinstance(followed, Annealed):
            by_chains = test_by(followed, _as_many(followed, terms))
            chains = {"test_nll_average_annealed": -by_chains.mean, "test_nll_average_annealed_stderr": by_chains.stderr}
        self.trained()
        if fabric.is_global_zero:
            about = {"run": str(self.folder), "split": "test", "through_chains": isinstance(followed, Annealed)}
            save_evaluation(self.folder / TEST_AVERAGE, found, IWAE(terms), **about)
        return {"test_nll_average": -found.mean, "test_nll_average_stderr": found.stderr, "valid_nll_average": valid, **chains}

    def _plot(self, model: Any, records: list[dict[str, Any]]) -> None:
        from dohyo.lab.plots.runs import is_image, plot_images, plot_learning_curves, plot_reconstructions
        from dohyo.lab.plots.tables import plot_columns, plot_pairs

        data, folder = self.data, self.folder
        if records:
            plot_learning_curves(records, folder / LEARNING_CURVES)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            if not is_image(data.shape):
                if hasattr(model, "sample"):
                    samples = model.sample(SAMPLED)
                    plot_columns(data.test, samples, data.columns, folder / MARGINALS)
                    plot_pairs(data.test, samples, data.columns, folder / PAIRS)
                return
            if hasattr(model, "sample_mean"):
                plot_images(model.sample_mean(64), data.shape, folder / SAMPLES, title="means of samples")
            if hasattr(model, "reconstruct"):
                plot_reconstructions(data.test[:16], model.reconstruct(data.test[:16]), data.shape, folder / RECONSTRUCTIONS)


def unannealed(model: nn.Module) -> nn.Module:
    """The model itself, where it is trained through chains."""
    inner: nn.Module = model.model if isinstance(model, Annealed) else model
    return inner


def _as_many(annealed: Annealed, terms: int) -> int:
    """The chains that take as many evaluations of p(x, z) as so many samples."""
    return max(1, terms // annealed.evaluations_per_weight)


def evaluate_over_processes(
    fabric: Fabric, model: Any, data: Tensor, estimator: Estimator, on_test: OnTest, seed: int, **options: Any
) -> Evaluation:
    """`evaluate`, each process on its own part of the data."""
    if len(data) < fabric.world_size:
        raise DohyoError(f"{len(data)} data for {fabric.world_size} processes; use fewer processes")
    model = model.to(fabric.device)
    own = data[fabric.global_rank :: fabric.world_size].to(fabric.device)
    most, rank = -(-len(data) // fabric.world_size), fabric.global_rank
    result = evaluate(model, own, estimator, seed=seed + rank, progress=lambda done: on_test(done, most), **options)
    parts = gather(fabric, result)
    if len(parts) == 1:
        return result
    values, noise = torch.empty(2, len(data), dtype=torch.float64)
    for rank, part in enumerate(parts):
        values[rank :: fabric.world_size] = part.per_datum
        noise[rank :: fabric.world_size] = math.nan if part.per_datum_stderr is None else part.per_datum_stderr
    known = None if result.noise_stderr is None else (noise, result.replicates - 1)
    khat, annealed = torch.cat([part.khat for part in parts]), getattr(model, "evaluations_per_weight", 1) > 1
    cost = sum(part.cost for part in parts)
    return summarise(values[:, None], estimator, cost, khat, 0.95, checksum(data), known, annealed, result.replicates)
