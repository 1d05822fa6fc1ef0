"""Policies on quadratic problems of 0 and 1: each for the same time, with and without entropy."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dohyo.errors import DohyoError
from dohyo.lab.experiments.qpbo import QPBOConfig, QPBORun
from dohyo.lab.folder import Conclusion, Picture, Table, read_records
from dohyo.lab.plots.rewards import plot_reward_curves
from dohyo.lab.studies.qpbo_findings import NAMES, Findings
from dohyo.lab.studies.runs import complete
from dohyo.lab.studies.study import Advance, Cell, Study, StudyConfig, save_picture
from dohyo.lab.training.config import ProgramName, option

PolicyName = Literal["sumo", "iwae", "independent", "nade", "gru"]
# How each is trained, and the steps from one record to the next: few where a step is slow, so that all end on time.
_POLICIES: dict[str, dict[str, Any]] = {
    "sumo": {"policy": "latent", "estimator": "sumo", "check_every": 10},
    "iwae": {"policy": "latent", "estimator": "iwae", "check_every": 10},
    "independent": {"policy": "independent", "check_every": 100},
    "nade": {"policy": "nade", "check_every": 5},
    "gru": {"policy": "gru", "check_every": 1},
}
_RECORDED = ("step", "seconds", "reward", "best_reward", "entropy")
_KEPT = ("best_reward", "mean_reward", "mean_reward_stderr", "seconds", "seconds_per_step", "steps", "reward_scale")
_POINTS = 60  # of a curve, at most
_FOREVER = 10**9  # steps: the time limit ends a run


@dataclass(frozen=True)
class PoliciesConfig(StudyConfig):
    """The numbers of the study."""

    policies: tuple[PolicyName, ...] = option(("sumo", "iwae", "independent", "nade", "gru"), "sumo and iwae are both latent.")
    replicas: int = option(3, "Runs of each policy, with seeds of their own, on one and the same problem.")
    sizes: tuple[int, ...] = option((100, 500), "The variables of each random problem, from few to many.")
    seconds: tuple[float, ...] = option(
        (600.0, 3600.0), "How long every policy is trained on each of these, at most; with more than before, runs go on."
    )
    patience: float | None = option(
        0.5,
        "A policy's training ends earlier once its best reward has not risen for this share of its steps; null for never.",
    )
    entropy_weight: float = option(0.02, "The weight of the policy's entropy in the runs with entropy; it does not fall.")
    hidden: int = option(200, "Units in each hidden layer.")
    cost: float = option(15.0, "Log-weights in an estimate for the latent policy.")
    learning_rate: float = option(1e-3, "Adam's learning rate.")
    independent_rate: float = option(
        0.03, "Adam's learning rate for the independent policy, whose parameters are the log-odds themselves."
    )
    epsilon: float = option(1e-8, "Adam's epsilon.")
    program: ProgramName = option("plain", "How the latent policies' steps are run; captured is for a CUDA GPU.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(replicas=1)
        if not self.sizes or len(self.sizes) != len(self.seconds) or min(self.sizes) < 1 or min(self.seconds) <= 0:
            raise DohyoError(f"sizes is {self.sizes} and seconds {self.seconds}; give as many positive times as problems")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise DohyoError(f"sizes is {self.sizes}; each must be larger than the one before")
        if not self.entropy_weight > 0:
            raise DohyoError(f"entropy_weight is {self.entropy_weight}; it must be positive: it is that of the runs with entropy")


class Policies(Study[PoliciesConfig]):
    """The study `qpbo`."""

    name = "qpbo"
    title = "Policies for quadratic problems"
    question = (
        "A policy over binary variables is trained by what its samples earn, on random quadratic problems. Does a latent policy "
        "trained with SUMO find better solutions than independent and autoregressive ones in the same time, what does a reward "
        "for entropy change, and what becomes of IWAE, which can raise its estimate of the entropy by a loose bound?"
    )
    SCALES = {  # noqa: RUF012
        "smoke": PoliciesConfig(policies=("sumo", "iwae"), replicas=1, sizes=(12,), seconds=(0.2,), patience=None, hidden=16),
        "small": PoliciesConfig(seconds=(18.0, 19.0), patience=None),
        "paper": PoliciesConfig(),
    }
    picks = ("policy", "variables", "entropy")
    lengths = ("seconds",)

    def cells(self) -> dict[str, Cell]:
        """The policies take turns: a busy machine slows all of them."""
        c = self.config
        common = {key: getattr(c, key) for key in ("hidden", "cost", "epsilon", "patience") if getattr(c, key) is not None}
        return {
            f"{policy}_{size:03d}_{kind}_{replica}": {
                "policy": policy,
                "variables": size,
                "entropy": weight,
                "seconds": seconds,
                "seed": c.seed + replica,
                "instance_seed": c.seed,
                "learning_rate": c.independent_rate if policy == "independent" else c.learning_rate,
                **common,
            }
            for size, seconds in zip(c.sizes, c.seconds, strict=True)
            for replica in range(c.replicas)
            for kind, weight in (("plain", 0.0), ("entropy", c.entropy_weight))
            for policy in c.policies
        }

    def run_of(self, name: str, options: Cell, folder: Path) -> QPBORun:
        policy = _POLICIES[options["policy"]]
        config = QPBOConfig(
            **policy,
            **{key: value for key, value in options.items() if key not in ("policy", "seconds")},
            steps=_FOREVER,
            entropy_decay="none",
            restarts=1,
            max_seconds=options["seconds"],
            device=self.config.device,
            program=self.config.program if policy["policy"] == "latent" else "plain",
        )
        return QPBORun(folder, config)

    def run_cell(self, name: str, options: Cell, folder: Path, advance: Advance) -> Cell:
        run, begun = self.run_of(name, options, folder), time.monotonic()
        _ = run.parts  # which replace scale auto by a number, as in the config that a killed run has left
        result = complete(run, lambda _: advance(min(1.0, (time.monotonic() - begun) / options["seconds"])))
        records = read_records(folder)
        highest = max((r["entropy"] for r in records if r["entropy"] is not None), default=None)
        every = -(-len(records) // _POINTS) or 1
        curve = [{key: record[key] for key in _RECORDED} for record in records[::-every][::-1]]  # with the last one
        return {**{key: result[key] for key in _KEPT}, "highest_entropy": highest, "curve": curve}

    def summarise(self, cells: dict[str, Cell]) -> tuple[list[Conclusion], list[Table]]:
        found = self._found(cells)
        return found.conclusions(), found.tables()

    def _found(self, cells: dict[str, Cell]) -> Findings:
        return Findings(cells, dict(zip(self.config.sizes, self.config.seconds, strict=True)), self.config.patience)

    def plot(self, cells: dict[str, Cell], folder: Path) -> list[Picture]:
        found, pictures = self._found(cells), []
        for size in self.config.sizes:
            for kind, words in (("plain", ""), ("entropy", f", entropy {self.config.entropy_weight:g}")):
                groups = {name: found.runs(policy, size, kind) for policy, name in NAMES.items()}
                runs = {name: [run["curve"] for run in group] for name, group in groups.items() if group}
                if not runs:
                    continue
                file = f"rewards_{size}{'_entropy' if kind == 'entropy' else ''}.png"
                alt = (
                    "Mean reward of a batch and best reward so far against steps and against seconds, and the estimate of the "
                    f"policy's entropy against steps. Best rewards at the end: {found.ranking(size, kind)}."
                )
                title = f"Policies on a random problem with {size} variables{words}"
                pictures.append(save_picture(*plot_reward_curves(runs), folder, file, title, alt))
        return pictures
