"""Reverse KL: the paper's experiment on entropy maximisation, and variational inference for a density that a user writes."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.annealing import Annealed
from dohyo.errors import DohyoError
from dohyo.evaluation import isolated
from dohyo.files import replacing
from dohyo.kl import TOLERANCE, Divergence, Draws, divergence, draw, weighted_moments
from dohyo.lab.experiments.annealing import Anneal, check_anneal
from dohyo.lab.experiments.replicated import ReplicatedRun
from dohyo.lab.experiments.run import EstimatorConfig, OnTest, about_estimator, silent
from dohyo.lab.folder import DRAWS, METRICS, read_records
from dohyo.lab.targets import Target, check, target
from dohyo.lab.targets.target import where
from dohyo.lab.training import DrawsConfig
from dohyo.lab.training.config import Optimiser, Progress, option
from dohyo.lab.training.loop import check as check_objective
from dohyo.lab.training.processes import gather
from dohyo.lab.training.tasks import OnDraws, Record
from dohyo.models import GaussianLVM
from dohyo.objectives import KDraw, Paths, ReverseKL, SamplingEncoder
from dohyo.verdict import HEAVY

RAW_DRAWS = 100_000
TUNED_ON, FEWEST = 256, 16  # draws of the model that chains are tuned on; chains for each draw, at least
_KEPT = "a checkpoint of an earlier check, if there is one, is kept"

Baseline = Literal["zero", "target"]


@dataclass
class ReverseKLConfig(EstimatorConfig, DrawsConfig):
    """A run of reverse KL."""

    batch_size: int = 100
    optimiser: Optimiser = "adam"
    learning_rate: float = 5e-4
    beta2: float = 0.99
    epsilon: float = 1e-8
    target: str = option("funnel", "The density to fit, by name, or your own log-density as package.module:function.")
    dimension: int | None = option(None, "The number of dimensions of your own target.")
    encoder: SamplingEncoder | None = option(None, "What phi follows; by default same for bounds, sleep for unbiased estimators.")
    k_draw: KDraw = option("datum", "How often K is drawn.")
    paths: Paths | None = option(
        None, "The parts of theta's gradient that are kept; by default all for bounds, decoder with encoder dreg, else x."
    )
    baseline: Baseline = option("zero", "What is subtracted from the estimate before it is squared, with encoder variance.")
    on_divergence: Literal["stop", "continue"] = option(
        "stop", "What to do when the encoder is lost or the estimate has left the truth at two checks in a row.", resume=True
    )
    max_rows: int = option(10_000, resume=True)
    check_draws: int = option(500, "Draws in a check of the true divergence.")
    check_terms: int = option(1000, "Samples of the encoder for each draw in a check.")
    test_draws: int = option(4000, "Draws in the last check.", resume=True)
    test_terms: int = option(2000, "Samples of the encoder for each draw in the last check.", resume=True)
    anneal: Anneal = option(
        0,
        "Use annealed chains of so many leapfrogs in the last check instead, at the same cost; 0 for none, auto for a pilot "
        "that chooses.",
        resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("hidden", "latent", "check_draws", "check_terms", "test_draws", "test_terms")
        check_anneal(self.anneal)
        for name in ("check_draws", "test_draws"):
            if getattr(self, name) < 25:
                raise DohyoError(f"{name} is {getattr(self, name)}; it must be at least 25 for an error bar")
        objective = self.objective(lambda x: x)  # it checks its options, and knows their defaults
        self.encoder, self.paths = objective.encoder, objective.paths

    def over(self, progress: Progress) -> bool:
        return super().over(dataclasses.replace(progress, stopped=progress.stopped and self.on_divergence == "stop"))

    def objective(self, log_target: Any) -> ReverseKL:
        return ReverseKL(self.make_estimator(), log_target, self.encoder, self.k_draw, self.paths, self.baseline)


class TowardsTarget(OnDraws):
    """Steps on samples of the model, and the true divergence at each check."""

    def __init__(self, log_target: Target, objective: ReverseKL) -> None:
        self.target, self.shared = log_target, objective.shared
        self.bound = objective.estimator.target_terms != math.inf
        self.diverged = self.steps = 0

    def batches(self, config: DrawsConfig, progress: Progress, order: torch.Generator) -> Iterator[Tensor]:
        self.steps = 0  # fewer than check_every in a short last epoch
        for batch in super().batches(config, progress, order):
            self.steps += 1
            yield batch

    def check(self, model: nn.Module, record: Record, config: Any, fabric: Fabric) -> Record:
        draws = draw_over_processes(fabric, model, self.target, config.check_draws, config.check_terms, config)
        found = divergence(draws, self.target.log_normaliser)
        estimate, square = record["estimate"], record.pop("estimate_square")
        if estimate == -math.inf:
            raise DohyoError(f"the training estimate is -inf: {self.target.name} was +inf at a draw; {_KEPT}")
        finite = math.isfinite(square)  # it is not where the target's density is zero at a draw
        count = self.steps * (1 if self.shared else config.batch_size)  # with a stratified K the error is smaller than this says
        stderr = math.sqrt(max(0.0, square - estimate**2) / count) if finite else math.inf
        warnings = [*found.warnings, *astray(found, estimate, stderr, self.bound)]
        self.diverged = self.diverged + 1 if warnings else 0
        numbers = {key: value for key, value in dataclasses.asdict(found).items() if key != "warnings"}
        shift = self.target.log_normaliser or 0.0
        return {
            **numbers,
            "estimate": estimate + shift,
            "estimate_stderr": stderr,
            "diverged": bool(warnings),
            "warnings": warnings,
            "stop": config.on_divergence == "stop" and self.diverged >= 2,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"diverged": self.diverged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.diverged = state["diverged"]


class ReverseKLRun(ReplicatedRun[ReverseKLConfig]):
    """A run of `dohyo reverse-kl`."""

    command, config_type, tested_by = "reverse-kl", ReverseKLConfig, ("test_draws", "test_terms", "anneal")
    outcomes = ("reverse_kl",)

    @cached_property
    def target(self) -> Target:
        return target(self.config.target, self.config.dimension) if self.of is None else self.of.target

    def make_parts(self) -> tuple[nn.Module, TowardsTarget, ReverseKL]:
        config = self.config
        torch.manual_seed(config.seed)
        model = GaussianLVM(self.target.dimension, config.hidden, config.latent)
        with isolated(model, config.seed):
            first = model.sample(64)
        check(self.target, first)
        objective = config.objective(self.target)
        check_objective(model, objective, torch.arange(2))
        return model, TowardsTarget(self.target, objective), objective

    def finish(self, fabric: Fabric, on_test: OnTest) -> dict[str, Any]:
        config, log_target, (model, task, objective) = self.config, self.target, self.parts
        model = model.to(fabric.device)
        weighed, terms = _annealed(model, config)
        draws = draw_over_processes(fabric, weighed, log_target, config.test_draws, terms, config, on_test)
        found = divergence(draws, log_target.log_normaliser)
        records = read_records(self.folder)
        if not records:
            raise DohyoError(f"{self.folder}: has no {METRICS} any more; restore it, or start a new run")
        last = records[-1]
        shift = log_target.log_normaliser or 0.0
        estimate, stderr = (math.inf if last[key] is None else last[key] for key in ("estimate", "estimate_stderr"))
        warnings = [*found.warnings, *astray(found, estimate - shift, stderr, task.bound)]
        if not warnings and task.diverged >= 2:  # it ended the run, though these draws do not show it
            warnings = list(last["warnings"])
        diverged = bool(warnings)
        warnings = [f"diverged: {line}" for line in warnings]
        if outside := int((draws.log_target == -math.inf).sum()):
            warnings.append(f"the target's density is zero at {outside} of {len(draws.x)} draws: the reverse KL is infinite")
        unsure = found.above - found.by_encoder
        if not diverged and unsure > 0.1:
            warnings.append(f"log p(x) is known only to within {unsure:.2g} nats: the reverse KL may be that much higher")
        moments = self._moments(model, draws)
        if moments["khat"] > HEAVY:
            warnings.append(f"k-hat of the importance weights is {moments['khat']:.2f}, above {HEAVY}: do not trust log Z, the "
                            "moments and the quantiles; train longer, or take a larger model")  # fmt: skip
        reason = (f"do not trust the numbers: {'; '.join(warnings)}" if warnings else
                  f"the numbers can be trusted: k-hat of the importance weights is {moments['khat']:.2f}")  # fmt: skip
        known = found.reverse_kl is not None
        if fabric.is_global_zero:
            from dohyo.lab.plots.densities import plot_density_run

            plot_density_run(log_target, draws, records, model.cpu(), self.folder)
            with replacing(self.folder / DRAWS) as temporary, temporary.open("wb") as file:  # weights: exp(log_target - log_px)
                np.savez(file, x=draws.x.numpy(), log_target=draws.log_target.numpy(), log_px=draws.log_px.numpy())
        return {
            "reverse_kl": found.reverse_kl if known else found.estimated_kl,
            "reverse_kl_stderr": found.stderr if known else found.estimated_kl_stderr,
            "log_z": found.log_z,
            "log_z_stderr": found.log_z_stderr,
            "ess": found.ess,
            "objective": found.objective,
            "training_estimate": last["estimate"],
            "training_estimate_stderr": last["estimate_stderr"],
            "diverged": diverged,
            "reverse_kl_above": None if found.reverse_kl is None else found.above + shift,
            "by_encoder": found.by_encoder,
            "by_prior": found.by_prior,
            "above": found.above,
            **moments,
            "target": config.target,
            "log_normaliser": log_target.log_normaliser,
            **about_estimator(config, objective.estimator),
            "paths": config.paths,
            "test_draws": config.test_draws,
            "test_terms": config.test_terms,
            "anneal": config.anneal,
            "leapfrogs": getattr(weighed, "steps", 0),
            "verdict": {"trusted": not warnings, "reason": reason},
            "warnings": warnings,
        }

    def _moments(self, model: Any, draws: Draws) -> dict[str, Any]:
        """The moments of each quantity: by importance weights, of unweighted draws, and the exact ones where they are known."""
        weighted, shape = weighted_moments(draws, self.target.quantities(draws.x))
        with isolated(model, self.config.seed + 1):
            raw = self.target.quantities(model.sample(RAW_DRAWS).double())
        exact = self.target.reference() or {}
        for name, entry in weighted.items():
            entry |= {"raw_mean": float(raw[name].mean()), "raw_sd": float(raw[name].std())}
            if name in exact:
                entry |= {"exact_mean": exact[name][0], "exact_sd": exact[name][1]}
        return {"moments": weighted, "khat": shape}


def _annealed(model: Any, config: ReverseKLConfig) -> tuple[Any, int]:
    """The model with the weights of the last check, and how many for each draw; every process tunes the same chains."""
    if config.anneal == 0:
        return model, config.test_terms
    annealed, seed = Annealed(model, None if config.anneal == "auto" else config.anneal), config.seed + 6_000_011
    with isolated(model, seed):
        x = model.sample(TUNED_ON)
    if annealed.tune(x, iterations=100, mixing=False, seed=seed, max_rows=config.max_rows).steps == 0:
        return model, config.test_terms
    return annealed, max(FEWEST, config.test_terms // annealed.evaluations_per_weight)


def draw_over_processes(
    fabric: Fabric, model: Any, log_target: Target, n: int, terms: int, config: ReverseKLConfig, on_test: OnTest = silent
) -> Draws:
    """n draws of the model, each process making its own part; the result is on the CPU."""
    own = len(range(fabric.global_rank, n, fabric.world_size))
    seed = config.seed + 3_000_017 + fabric.global_rank
    parts = []
    for start in range(0, own, 500):
        part = draw(model, log_target, min(500, own - start), terms, seed + 1000 * start, config.max_rows)
        parts.append(tuple(column.cpu() for column in dataclasses.astuple(part)))
        on_test(start + len(parts[-1][0]), own)
    everyone = [part for one in gather(fabric, parts) for part in one]
    draws = Draws(*(torch.cat(columns) for columns in zip(*everyone, strict=True)))
    for bad, word in ((draws.log_target.isnan(), "NaN"), (draws.log_target == math.inf, "+inf")):
        if bool(bad.any()):
            places = where(bad, draws.x, "draws of the model")
            raise DohyoError(f"{log_target.name} is {word} at {places}; correct it; {_KEPT} for --resume")
    return draws


def astray(found: Divergence, estimate: float, stderr: float, bound: bool) -> list[str]:
    """Warnings about an estimate of the objective. An unbiased one may swing far from the truth; a bound must not."""
    warnings = []
    if bound and estimate < found.objective - TOLERANCE - 4 * math.hypot(found.stderr, stderr):
        warnings.append(f"the training estimate, {estimate:.3g}, is far below the truth, {found.objective:.3g}: theta loosens "
                        "the bound instead of lowering the objective; use an unbiased estimator, or a higher --cost")  # fmt: skip
    if found.reverse_kl is not None and found.reverse_kl < -0.1 - 4 * found.stderr:
        warnings.append(f"the reverse KL is {found.reverse_kl:.3g}, below zero: log p(x) is not known well enough here")
    return warnings
