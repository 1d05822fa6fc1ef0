"""Density modelling: the paper's first experiment, and what a practitioner does with their own data."""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError, reporting
from dohyo.estimators import IWAE, Estimator
from dohyo.evaluation import Evaluation, checksum, evaluate, summarise
from dohyo.files import plain
from dohyo.lab.data import Dataset
from dohyo.lab.evaluations import save_evaluation
from dohyo.lab.experiments.density_config import DensityConfig, begin_with, decoder_passes
from dohyo.lab.experiments.run import OnEpoch, OnTest, Run, about_estimator
from dohyo.lab.fast.stacked import Unbatchable
from dohyo.lab.fast.together import Replica, choose_for, train_together
from dohyo.lab.folder import (
    CHECKPOINT,
    LEARNING_CURVES,
    MARGINALS,
    PAIRS,
    RECONSTRUCTIONS,
    SAMPLES,
    TEST_AVERAGE,
    TEST_VALUES,
    read_records,
    replica_folder,
    write_result,
)
from dohyo.lab.training.loop import Diverged, check
from dohyo.lab.training.processes import gather
from dohyo.lab.training.state import load_checkpoint
from dohyo.lab.training.tasks import OnData, validation_nll
from dohyo.objectives import MaximumLikelihood

SAMPLED = 1000  # samples of the model in the pictures of a table


class DensityRun(Run[DensityConfig]):
    """A run of `dohyo train`."""

    command, config_type, tested_by = "train", DensityConfig, ("test_terms",)

    def __init__(self, folder: Path, config: DensityConfig, of: "DensityRun | None" = None) -> None:
        super().__init__(folder, config)
        self.of = of  # the replicated run that this one is a part of

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
        return [f"{data.name}: {'x'.join(map(str, data.shape))} {data.about}; {splits}"]

    def make_parts(self) -> tuple[nn.Module, OnData, MaximumLikelihood]:
        config, x = self.config, self.data.train_batch(torch.arange(min(2, len(self.data.train))))
        objective = config.objective()
        with contextlib.nullcontext() if ":" not in config.model else reporting(_failed(config.model, x)):
            model = config.build_model(self.data)
            if config.init_from is not None and not (self.folder / CHECKPOINT).exists():
                begin_with(unannealed(model), config.init_from)
            check(model, objective, x)
        return model, self.task, objective

    @cached_property
    def replicas(self) -> list["DensityRun"]:
        """The runs of a replicated run, each in its own folder; empty if there is only one run."""
        config, seed = self.config, self.config.seed
        if config.replicas == 1:
            return []
        k_seed, data_seed = (seed if own is None else own for own in (config.k_seed, config.data_seed))
        common = dataclasses.replace(config, k_seed=k_seed, data_seed=data_seed, replicas=1)
        folders = [config.init_from] * config.replicas
        if config.init_from is not None and replica_folder(config.init_from, 0).exists():
            folders = [replica_folder(config.init_from, i) for i in range(config.replicas)]
        configs = [dataclasses.replace(common, seed=seed + i, init_from=folder) for i, folder in enumerate(folders)]
        return [DensityRun(replica_folder(self.folder, i), config, self) for i, config in enumerate(configs)]

    @property
    def finished(self) -> bool:
        if not self.replicas:
            return super().finished
        result = self.result
        if result is None or not all(replica.finished for replica in self.replicas):
            return False
        return result.get("replicas") == [replica.result for replica in self.replicas]  # else one was trained further

    def trained(self, average: bool = False) -> nn.Module:
        if self.replicas:
            raise DohyoError(f"{self.folder} holds {len(self.replicas)} replicas; name one of them: {self.replicas[0].folder}")
        return unannealed(super().trained(average))

    @property
    def folders(self) -> list[Path]:
        return [self.folder, *(replica.folder for replica in self.replicas)]

    def _train(self, fabric: Fabric, on_epoch: OnEpoch, on_test: OnTest) -> dict[str, Any]:
        if not self.replicas:
            return super()._train(fabric, lambda record: on_epoch({**record, "notices": _not_captured(record)}), on_test)
        if fabric.is_global_zero:
            self.write_config()
        serial, lost = [], {}
        try:
            self._train_together(fabric, on_epoch)
        except Unbatchable as error:
            serial = [f"the replicas run one after the other: {error}"]
        except Diverged as error:
            lost = dict.fromkeys(error.places, str(error))
        results = []
        for number, replica in enumerate(self.replicas):
            if number in lost:
                continue

            def note(record: dict[str, Any], number: int = number) -> None:
                on_epoch({**record, "replica": number, "notices": [*serial, *record["notices"]]})

            try:
                results.append(replica.complete(fabric, note, on_test))
            except Diverged as error:
                lost[number] = str(error)
        if lost:
            done = [str(replica.folder) for number, replica in enumerate(self.replicas) if number not in lost]
            others = f"; the others are finished, in {', '.join(done)}" if done else ""
            raise Diverged("; ".join(dict.fromkeys(lost.values())) + others, list(lost))
        result: dict[str, Any] = plain(self._summary(results))
        result["warnings"] = [*serial, *result["warnings"]]
        result["seconds"] = (sum if serial else max)(one["seconds"] for one in results)
        if fabric.is_global_zero:
            write_result(self.folder, result)
        return result

    def _train_together(self, fabric: Fabric, on_epoch: OnEpoch) -> None:
        """Train the replicas that are not finished, in one program."""
        members, pending = [], []
        for number, replica in enumerate(self.replicas):
            model, task, objective = replica.parts
            members.append(Replica(model, task, replica.config, replica.folder))
            if not replica.finished:
                pending.append(number)
        if len(pending) < 2:
            choose_for(members, objective, fabric)  # only to find out whether they can be trained together
            return
        if fabric.is_global_zero:
            for number in pending:
                self.replicas[number].write_config()
        try:
            for place, record in train_together([members[number] for number in pending], objective, fabric):
                on_epoch({**record, "replica": pending[place], "notices": _not_captured(record)})
        except Diverged as error:
            raise Diverged(str(error), [pending[place] for place in error.places]) from error

    def _summary(self, results: list[dict[str, Any]]) -> dict[str, Any]:
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
        for key in ("verdict", "verdict_annealed"):
            if verdicts := [result[key] for result in results if result.get(key)]:
                own[key] = min(verdicts, key=lambda verdict: (False, None, True).index(verdict["trusted"]))  # the worst
        return mean | own | {"test_nll_spread": spread, "test_nll_mean_stderr": stderr, "replicas": results}

    def finish(self, fabric: Fabric, on_test: OnTest) -> dict[str, Any]:
        trained, config, data = self.parts[0], self.config, self.data
        model, chains = unannealed(trained), {}

        def test_by(model: nn.Module, terms: int) -> Evaluation:
            return evaluate_over_processes(
                fabric, model, data.test, IWAE(terms), seed=config.seed, max_rows=config.max_rows,
                progress=lambda done: on_test(done, -(-len(data.test) // fabric.world_size)),
            )  # fmt: skip

        test = test_by(model, config.test_terms)
        if isinstance(trained, Annealed):
            terms = max(1, config.test_terms // trained.evaluations_per_weight)  # as many evaluations of p(x, z)
            found = test_by(trained, terms)
            chains = {
                "test_nll_annealed": -found.mean, "test_nll_annealed_stderr": found.stderr, "test_chains": terms,
                "anneal": config.anneal, "verdict_annealed": found.verdict.to_dict(),
            }  # fmt: skip
        average = self._test_average(fabric, test_by) if config.average else {}
        records = read_records(self.folder)
        if fabric.is_global_zero:
            save_evaluation(self.folder / TEST_VALUES, test, IWAE(config.test_terms), run=str(self.folder), split="test")
            self._plot(model.cpu(), records)
        numbers = load_checkpoint(self.folder)["numbers"]
        return {
            "test_nll": -test.mean,
            "test_nll_stderr": test.stderr,
            "test_terms": config.test_terms,
            **chains,
            **average,
            "decoder_passes": decoder_passes(config),
            "valid_nll": numbers["best_score"],
            **about_estimator(config, config.objective().estimator),
            "data": config.data,
            "data_read": data.about,
            "model": config.model,
            "best_epoch": numbers["best_epoch"],
            "verdict": test.verdict.to_dict(),
            "warnings": [*(_not_captured(records[-1]) if records else []), *test.warnings],
        }

    def _test_average(self, fabric: Fabric, test_by: Callable[[nn.Module, int], Evaluation]) -> dict[str, Any]:
        """What the result says of the averaged parameters; the model keeps its best ones."""
        config, terms = self.config, self.config.test_terms
        found = test_by(self.trained(average=True), terms)
        valid = validation_nll(self.parts[0], self.data.valid.to(fabric.device), config, fabric)
        self.trained()
        if fabric.is_global_zero:
            save_evaluation(self.folder / TEST_AVERAGE, found, IWAE(terms), run=str(self.folder), split="test")
        return {"test_nll_average": -found.mean, "test_nll_average_stderr": found.stderr, "valid_nll_average": valid}

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


def evaluate_over_processes(
    fabric: Fabric, model: Any, data: Tensor, estimator: Estimator, seed: int, **options: Any
) -> Evaluation:
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
    noise = [part.noise_stderr * len(part.per_datum) for part in parts if part.noise_stderr is not None]
    khat, annealed = torch.cat([part.khat for part in parts]), getattr(model, "evaluations_per_weight", 1) > 1
    whole = summarise(values, estimator, sum(part.cost for part in parts), khat, annealed=annealed)
    together = math.hypot(*noise) / len(data) if len(noise) == len(parts) else None
    return dataclasses.replace(whole, noise_stderr=together, replicates=result.replicates, fingerprint=checksum(data))


def _failed(model: str, x: Tensor) -> str:
    """What is said if a user's model raises an error; {} stands for the error."""
    sizes = "x".join(map(str, x.shape[1:]))
    return f"{model} raised {{}} with x {tuple(x.shape)}; if x has the wrong shape, change --data-shape from {sizes}"


def _not_captured(record: dict[str, Any]) -> list[str]:
    """A notice if the faster program was wanted for this record and could not be used."""
    _, _, reason = record.get("program", "").partition("plain: ")
    return [f"the step is not captured: {reason}"] if reason else []
