"""Optimisation of binary functions by a policy: the paper's experiment on QPBO, and a black-box optimiser for users."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.errors import DohyoError, check_seed
from dohyo.estimators import ESTIMATORS
from dohyo.evaluation import isolated
from dohyo.files import resolved
from dohyo.lab.experiments.replicated import ReplicatedRun
from dohyo.lab.experiments.run import EstimatorConfig, OnTest, about_estimator
from dohyo.lab.folder import LEARNING_CURVES, read_records
from dohyo.lab.rewards import Quadratic, Reward, load, random_qpbo, reward
from dohyo.lab.training import DrawsConfig
from dohyo.lab.training.config import Decay, Optimiser, Progress, option
from dohyo.lab.training.processes import gather
from dohyo.lab.training.state import State, load_checkpoint
from dohyo.lab.training.tasks import OnDraws, Record
from dohyo.models import POLICIES, LatentPolicy
from dohyo.names import named
from dohyo.objectives import KDraw, Reinforce, SamplingEncoder

SCALE_SAMPLES = 1000  # uniform x, for the scale of the rewards
LAST_SAMPLES = 1000  # of the trained policy, for its mean reward
PATIENT_STEPS = 500  # before them no run ends for lack of patience
# What is left out depends on the policy. The independent one is trained many times, fast, while its entropy is let go; the others
# as in the paper.
_PAPER = {"learning_rate": 1e-3, "epsilon": 1e-3, "entropy": 0.0, "entropy_decay": "none", "steps": 5_000}
_FAST = {"learning_rate": 0.3, "epsilon": 1e-8, "entropy": 0.05, "entropy_decay": "linear", "steps": 20_000}

PolicyName = Literal["latent", "independent", "gru", "nade"]
Baseline = Literal["leave-one-out", "none"]


@dataclass
class QPBOConfig(EstimatorConfig, DrawsConfig):
    """A run of policy optimisation."""

    batch_size: int = 100
    optimiser: Optimiser = "adam"
    learning_rate: float = option(None, "The optimiser's learning rate; by default 0.3 for the independent policy, else 1e-3.")
    epsilon: float = option(None, "The optimiser's epsilon; by default 1e-8 for the independent policy, else 1e-3.")
    estimator: str = option("sumo", "What estimates the latent policy's log p(x).")
    cost: float = option(
        15.0,
        "The expected number of log-weights of one estimate, as near as the estimator can come; with entropy each step makes "
        "two for each sample.",
    )
    steps: int = option(None, "The number of steps; by default 20,000 for the independent policy, else 5,000.", resume=True)
    check_every: int = 100
    decay: Decay = "none"
    variables: int | None = option(None, "The number of bits of a random problem, or of your own reward.")
    instance: Path | None = option(None, "A problem from a file: OR-Library's bqp, .qubo or Gset.", resume=True)
    index: int | None = option(None, "Which problem of a file that holds several, from 1.")
    reward: str | None = option(None, "Your own function as package.module:function, of x (n, d) of 0 and 1.")
    instance_seed: int = option(0, "The seed of a random problem's weights, uniform in [-1, 1].")
    policy: PolicyName = option("independent", "The distribution of x that is trained.")
    encoder: SamplingEncoder | None = option(
        None, "What phi follows, in the latent policy; by default same for bounds and sleep for unbiased estimators."
    )
    k_draw: KDraw = option("datum", "How often K is drawn.")
    entropy: float = option(
        None, "The weight of the policy's entropy against the scaled reward; by default 0.05 for the independent policy, else 0."
    )
    entropy_decay: Decay = option(
        None, "Whether the weight of the entropy falls in each training; by default linear for the independent policy, else none."
    )
    scale: float | Literal["auto"] = option("auto", "What divides rewards; auto is their standard deviation under uniform x.")
    baseline: Baseline = option("leave-one-out", "What is subtracted from a sample's reward.")
    restarts: int | Literal["auto"] = option(
        "auto",
        "How many times a new policy is trained, each on its share of the steps; the best of all samples counts. Steps that are "
        "added later continue the last training. auto is 1, and for the independent policy as many as have two steps for each "
        "variable, or 200.",
    )
    patience: float | None = option(
        None,
        f"The run ends at a check, after {PATIENT_STEPS} steps at least, where its best reward has not risen for this share of "
        "the steps so far: 0.5 is their later half; null for never, and to go on with a run that ended so.",
        resume=True,
    )

    def __post_init__(self) -> None:
        for name, value in (_FAST if self.policy == "independent" else _PAPER).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.restarts == "auto" and (self.policy != "independent" or self.variables is not None):
            self.restarts = self.trainings(self.variables or 1)
        super().__post_init__()
        self._at_least_one("hidden", "latent", *([] if self.restarts == "auto" else ["restarts"]))
        check_seed("instance_seed", self.instance_seed)
        named(ESTIMATORS, self.estimator, "estimator")  # checked even where the policy needs none
        if self.restarts != "auto" and self.restarts > self.steps:
            raise DohyoError(f"restarts is {self.restarts}, more than the {self.steps} steps; each training needs at least one")
        if self.patience is not None and not 0 < self.patience < 1:
            raise DohyoError(f"patience is {self.patience}; it is a share of the steps, more than 0 and less than 1, such as 0.5")
        if self.scale != "auto" and not 0 < self.scale < math.inf:
            raise DohyoError(f"scale is {self.scale}; it must be positive and finite")
        if self.instance is not None:
            self.instance = resolved(self.instance)
        if (self.instance is not None) + (self.reward is not None) + (self.instance_seed != 0) > 1:
            raise DohyoError("give one problem: --instance FILE, --reward package.module:function, or --variables N alone")
        if self.instance is None and self.variables is None:
            raise DohyoError("give --variables N, or --instance FILE")
        if self.index is not None and self.instance is None:
            raise DohyoError("--index says which problem of --instance; give that file too")
        self.encoder = self.objective(lambda x: x, self.entropy).encoder  # the objective knows the default

    def problem(self) -> Reward:
        if self.instance is not None:
            found = load(self.instance, self.index)
            if self.variables is not None and self.variables != found.variables:
                raise DohyoError(f"--variables {self.variables}, but {self.instance} has {found.variables}; leave it out")
            return found
        assert self.variables is not None
        return reward(self.reward, self.variables) if self.reward else random_qpbo(self.variables, self.instance_seed)

    def build_policy(self, variables: int, restart: int = 0) -> nn.Module:
        torch.manual_seed(self.seed + 5_000_011 * restart)
        sizes = {"latent": {"hidden": self.hidden, "latent": self.latent}, "independent": {}}
        arguments: dict[str, Any] = sizes.get(self.policy, {"hidden": self.hidden})
        policy = POLICIES[self.policy](variables=variables, **arguments)
        if self.policy == "independent" and restart > 0:  # it has one beginning, the uniform one: most trainings would end alike
            nn.init.normal_(policy.get_parameter("bias"))
        return policy

    def trainings(self, variables: int) -> int:
        """What restarts auto stands for."""
        return max(1, self.steps // max(200, 2 * variables)) if self.policy == "independent" else 1

    def restart(self, step: int) -> tuple[int, float]:
        """Which training a step belongs to, counted from 0, and what share of it is done."""
        done = step * int(self.restarts) / self.steps
        return math.floor(done), done % 1

    def entropy_at(self, step: int) -> float:
        return self.entropy * (1 - self.restart(step)[1] if self.entropy_decay == "linear" else 1.0)

    def stale(self, step: int, best_step: int) -> bool:
        """Whether a run ends after this step, because its best reward is that of so early a step."""
        return self.patience is not None and step >= PATIENT_STEPS and best_step <= (1 - self.patience) * step

    def over(self, progress: Progress) -> bool:
        return super().over(dataclasses.replace(progress, stopped=progress.stopped and self.patience is not None))

    def rate(self, progress: Progress) -> float:
        return self.learning_rate * (1 - self.restart(progress.step)[1] if self.decay == "linear" else 1.0)

    def objective(self, function: Any, entropy: Any = 0.0, scale: Any = 1.0) -> Reinforce:
        latent = self.policy == LatentPolicy.name
        estimator = self.make_estimator() if latent else None
        encoder = self.encoder if latent else None
        return Reinforce(estimator, function, encoder, entropy, scale, self.baseline, self.k_draw)


@dataclass
class Best:
    """A reward that keeps the best sample it was called with, and when that was.

    Attributes:
        value, x: The best reward and its x. A difference within rounding does not count.
        seconds, step: When that was; the step counts from 1.
        clock: The seconds of the run at `started`, on the monotonic clock.
        now: The current step.
    """

    problem: Reward
    value: float | int = -math.inf
    x: list[int] = field(default_factory=list)
    seconds: float = 0.0
    step: int = 0
    clock: float = 0.0
    started: float = field(default_factory=time.monotonic)
    now: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        rewards = self.problem(x)
        top = int(rewards.argmax())
        value = rewards[top].item()
        if value - self.value > self.problem.tolerance:
            # In a batch of another size a sum of floats may round differently: what is kept is R of this x alone.
            self.value = self.problem(x[top : top + 1]).item() if isinstance(self.problem, Quadratic) else value
            self.x = x[top].int().tolist()
            self.seconds, self.step = self.clock + time.monotonic() - self.started, self.now
        return rewards


class Optimise(OnDraws):
    """Steps on samples of the policy, with the scheduled weight of the entropy; the best sample is kept."""

    def __init__(self, best: Best, scale: float) -> None:
        self.best, self.scale, self.entropy, self.restart = best, scale, 0.0, 0
        self.progress = Progress()  # of the run, once it has begun

    def begin(self, fabric: Fabric, config: Any) -> None:
        super().begin(fabric, config)
        self.scale = fabric.broadcast(self.scale)  # each process may have measured another one, if the reward is noisy

    def prepare(self, state: State, config: Any) -> None:
        """Start the next training with new initial parameters, if it is due, and set the clock."""
        self.progress = state.progress
        self.best.clock, self.best.started = state.progress.seconds, time.monotonic()
        restart, _ = config.restart(state.progress.step)
        if restart > self.restart:  # it may be less where --steps was raised: the last training continues
            self.restart = restart
            device = next(state.model.parameters()).device  # the seed of the parameters must not become that of its noise
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                state.model.load_state_dict(config.build_policy(self.best.problem.variables, restart).state_dict())
            for kept in state.optimiser.state.values():  # in place: a captured step holds these tensors
                for value in kept.values():
                    value.zero_()

    def batches(self, config: Any, progress: Progress, order: torch.Generator) -> Iterator[Tensor]:
        """Up to the next check, or to the start of the next training."""
        restart, _ = config.restart(progress.step)
        for index in super().batches(config, progress, order):
            if config.restart(progress.step)[0] != restart:
                return
            self.entropy = config.entropy_at(progress.step)
            self.best.now = progress.step + 1
            yield index

    @property
    def values(self) -> Callable[[Tensor], Tensor] | None:
        """The rewards without checks of x, where they can be computed on any device; None for a reward of the user's own."""
        return self.best.problem.values if isinstance(self.best.problem, Quadratic) else None

    def found(self, x: Tensor, step: int) -> None:
        """Keep a sample that a captured step found to be the best."""
        self.best.now = step
        self.best(x[None])

    def check(self, model: nn.Module, record: Record, config: Any, fabric: Fabric) -> Record:
        value, step = max(gather(fabric, (self.best.value, -self.best.step)))
        return {"best_reward": float(value), "stop": config.stale(self.progress.step, -step)}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.best, name) for name in ("value", "x", "seconds", "step")} | {"restart": self.restart}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.restart = state.pop("restart")
        for name, value in state.items():
            setattr(self.best, name, value)
        problem, x = self.best.problem, torch.tensor([self.best.x])
        if isinstance(problem, Quadratic) and abs(problem(x).item() - self.best.value) > problem.tolerance:
            raise DohyoError(f"{problem.name}: the best x of the run earns another reward now; has the file been changed?")


class QPBORun(ReplicatedRun[QPBOConfig]):
    """A run of `dohyo qpbo`."""

    command, config_type, outcomes = "qpbo", QPBOConfig, ("best_reward",)

    @cached_property
    def problem(self) -> Reward:
        return self.config.problem() if self.of is None else self.of.problem

    def replica_configs(self) -> list[QPBOConfig]:
        _ = self.parts  # which replace scale auto by a number, for all
        return super().replica_configs()

    def joined(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """As for other runs, but the best of all replicas counts, with its x, and when it was found."""
        best = max(results, key=lambda one: (one["best_reward"], -one["evaluations_to_best"]))
        own = ("best_reward", "best_x", "gap", "seconds_to_best", "evaluations_to_best")
        return super().joined(results) | {key: best[key] for key in own}

    def write_config(self) -> None:
        _ = self.parts  # which replace auto by numbers
        super().write_config()

    def make_parts(self) -> tuple[nn.Module, Optimise, Reinforce]:
        if self.config.restarts == "auto":
            self.config = dataclasses.replace(self.config, restarts=self.config.trainings(self.problem.variables))
        if isinstance(self.config.scale, str):  # the number goes into the config: a resumed run keeps it
            generator = torch.Generator().manual_seed(0)  # the same x for every run of a problem
            x = torch.randint(2, (SCALE_SAMPLES, self.problem.variables), generator=generator).float()
            self.config = dataclasses.replace(self.config, scale=float(self.problem(x).double().std()) or 1.0)
        task = Optimise(Best(self.problem), float(self.config.scale))
        objective = self.config.objective(task.best, lambda: task.entropy, lambda: task.scale)
        return self.config.build_policy(self.problem.variables), task, objective

    def finish(self, fabric: Fabric, on_test: OnTest) -> dict[str, Any]:
        config, problem = self.config, self.problem
        policy: Any
        policy, task, objective = self.parts
        best = max(gather(fabric, task.state_dict()), key=lambda one: (one["value"], -one["step"]))
        with isolated(policy, config.seed):
            rewards = problem(policy.to(fabric.device).sample(LAST_SAMPLES)).double()
        numbers = load_checkpoint(self.folder)["numbers"]
        known = problem.maximum
        if fabric.is_global_zero:
            from dohyo.lab.plots.picture import write_picture
            from dohyo.lab.plots.rewards import plot_reward_curves

            write_picture(*plot_reward_curves({config.policy: [read_records(self.folder)]}, known), self.folder / LEARNING_CURVES)
        result = {
            "best_reward": best["value"],
            "best_x": best["x"],
            "mean_reward": float(rewards.mean()),
            "mean_reward_stderr": float(rewards.std()) / math.sqrt(len(rewards)),
            "best_known": known,
            "gap": None if known is None else (known - best["value"]) / abs(known),
            "seconds_per_step": numbers["step_seconds"] / numbers["step"],
            "seconds_to_best": best["seconds"],
            "evaluations": numbers["step"] * config.batch_size,
            "evaluations_to_best": best["step"] * config.batch_size,
            "problem": problem.name,
            "variables": problem.variables,
            "reward_scale": task.scale,
            "entropy": config.entropy,
            "restarts": config.restarts,
            "policy": config.policy,
        }
        if objective.estimator is not None:
            result |= about_estimator(config, objective.estimator)
        return result
