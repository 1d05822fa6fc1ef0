"""Optimisation of binary functions by a policy: the paper's experiment on QPBO, and a black-box optimiser for users."""

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dohyo.errors import DohyoError
from dohyo.estimators import ESTIMATORS, to_dict
from dohyo.evaluation import apart
from dohyo.lab.experiments.run import OnTest, Run
from dohyo.lab.rewards import Quadratic, Reward, load, random_qpbo, reward
from dohyo.lab.training import DrawsConfig
from dohyo.lab.training.config import Progress
from dohyo.lab.training.log import read_records
from dohyo.lab.training.processes import gather
from dohyo.lab.training.state import State, load_checkpoint
from dohyo.lab.training.tasks import OnDraws, Record, Task
from dohyo.models import POLICIES, LatentPolicy
from dohyo.names import named
from dohyo.objectives import Reinforce

SCALE_SAMPLES = 1000  # uniform x, for the scale of the rewards
LAST_SAMPLES = 1000  # of the trained policy, for its mean reward


@dataclass
class QPBOConfig(DrawsConfig):
    """A run of policy optimisation.

    Attributes:
        variables: d, of a random problem or of your own reward.
        instance: A problem from a file: OR-Library's bqp, .qubo or Gset.
        index: Which problem of a file that holds several, from 1.
        reward: Your own function as package.module:function, of x (n, d) of 0 and 1.
        instance_seed: Of a random problem's weights, uniform in [-1, 1].
        policy: latent, independent, gru or nade.
        hidden: Units in each hidden layer.
        latent: Latent dimensions.
        estimator: Of the latent policy's log p(x): elbo, iwae, jvi, sumo, symmetric-sumo, multilevel-rr or multilevel-ss.
        cost: The expected number of log-weights of one estimate; with entropy each step makes two for each sample.
        encoder: What phi follows: sleep, dreg, iwae, variance or same.
        k_draw: datum or batch: one K for each sample, or one for all of a step.
        entropy: The weight of the policy's entropy against the reward after scaling.
        entropy_decay: linear: the weight falls to zero over the steps; or none.
        scale: What rewards are divided by; auto is their standard deviation under uniform x.
        baseline: leave-one-out or none.
        restarts: How often the policy is trained anew, each time on its share of the steps; the best of all samples counts.
            If steps are added later, they are the last training's.
    """

    batch_size: int = 100
    optimiser: str = "adam"
    epsilon: float = 1e-3
    steps: int = 5_000
    check_every: int = 100
    decay: str = "none"
    variables: int | None = None
    instance: Path | None = None
    index: int | None = None
    reward: str | None = None
    instance_seed: int = 0
    policy: str = "latent"
    hidden: int = 200
    latent: int = 20
    estimator: str = "sumo"
    cost: float = 15.0
    encoder: str | None = None
    k_draw: str = "datum"
    entropy: float = 0.0
    entropy_decay: str = "none"
    scale: float | str = "auto"
    baseline: str = "leave-one-out"
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("hidden", "latent", "restarts")
        named(POLICIES, self.policy, "policy")
        named({"linear": 0, "none": 0}, self.entropy_decay, "entropy_decay")
        named(ESTIMATORS, self.estimator, "estimator")  # also where the policy needs none: a wrong name is a wrong name
        if self.restarts > self.steps:
            raise DohyoError(f"restarts is {self.restarts}, more than the {self.steps} steps; each training needs one at least")
        if isinstance(self.scale, str) and self.scale != "auto":
            raise DohyoError(f"scale is {self.scale!r}; it must be a number or auto")
        if not isinstance(self.scale, str) and not 0 < self.scale < math.inf:
            raise DohyoError(f"scale is {self.scale}; it must be positive and finite")
        if self.instance is not None:
            self.instance = self.instance.resolve()
        if (self.instance is not None) + (self.reward is not None) + (self.instance_seed != 0) > 1:
            raise DohyoError("give one problem: --instance FILE, --reward package.module:function, or --variables N alone")
        if self.instance is None and self.variables is None:
            raise DohyoError("give --variables N, or --instance FILE")
        if self.index is not None and self.instance is None:
            raise DohyoError("--index says which problem of --instance; give that file too")
        self.encoder = self.objective(lambda x: x, self.entropy).encoder

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
        return POLICIES[self.policy](variables=variables, **arguments)

    def restart(self, step: int) -> tuple[int, float]:
        """Which training this is, from 0, and how much of it is done."""
        done = step * self.restarts / self.steps
        return math.floor(done), done % 1

    def entropy_at(self, step: int) -> float:
        return self.entropy * (1 - self.restart(step)[1] if self.entropy_decay == "linear" else 1.0)

    def rate(self, progress: Progress) -> float:
        return self.learning_rate * (1 - self.restart(progress.step)[1] if self.decay == "linear" else 1.0)

    def objective(self, function: Any, entropy: Any = 0.0, scale: Any = 1.0) -> Reinforce:
        latent = self.policy == LatentPolicy.name
        estimator = named(ESTIMATORS, self.estimator, "estimator").at_cost(self.cost) if latent else None
        encoder = self.encoder if latent else None
        return Reinforce(estimator, function, encoder, entropy, scale, self.baseline, self.k_draw)  # type: ignore[arg-type]


@dataclass
class Best:
    """A reward that remembers the best sample it was asked for, and when that was.

    Attributes:
        value, x: The best reward and its x. A difference that may be rounding is none.
        seconds, step: When that was; the step counts from 1.
        clock: The seconds of the run at `started`, on the monotonic clock.
        now: The step under way.
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
        if value - self.value > getattr(self.problem, "tolerance", 0.0):
            # In a batch of another size a sum of floats may round otherwise: what is kept is R of this x alone.
            self.value = self.problem(x[top : top + 1]).item() if isinstance(self.problem, Quadratic) else value
            self.x = x[top].int().tolist()
            self.seconds, self.step = self.clock + time.monotonic() - self.started, self.now
        return rewards


class Optimise(OnDraws):
    """Steps on samples of the policy, with the entropy's weight by its schedule; the best sample is kept."""

    def __init__(self, best: Best, scale: float) -> None:
        self.best, self.scale, self.entropy, self.restart = best, scale, 0.0, 0

    def begin(self, fabric: Fabric, config: Any) -> None:
        super().begin(fabric, config)
        self.scale = fabric.broadcast(self.scale)  # a noisy reward gave each process another

    def prepare(self, state: State, config: Any) -> None:
        """Begin anew with other first parameters, where a training of several has had its steps; and set the clock."""
        self.best.clock, self.best.started = state.progress.seconds, time.monotonic()
        restart, _ = config.restart(state.progress.step)
        if restart > self.restart:  # it may be less where --steps was raised: the last training goes on
            self.restart = restart
            with torch.random.fork_rng(devices=[]):  # parameters are made on the processor
                state.model.load_state_dict(config.build_policy(self.best.problem.variables, restart).state_dict())
            state.optimiser.state.clear()

    def batches(self, config: Any, progress: Progress, order: torch.Generator) -> Iterator[Tensor]:
        """As many as up to the next check, or up to where the policy begins anew."""
        restart, _ = config.restart(progress.step)
        for index in super().batches(config, progress, order):
            if config.restart(progress.step)[0] != restart:
                return
            self.entropy = config.entropy_at(progress.step)
            self.best.now = progress.step + 1
            yield index

    def check(self, model: nn.Module, record: Record, config: Any, fabric: Fabric) -> Record:
        return {"best_reward": float(max(gather(fabric, self.best.value)))}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.best, name) for name in ("value", "x", "seconds", "step")} | {"restart": self.restart}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.restart = state.pop("restart")
        for name, value in state.items():
            setattr(self.best, name, value)
        problem = self.best.problem
        if (
            isinstance(problem, Quadratic)
            and abs(problem(torch.tensor([self.best.x])).item() - self.best.value) > problem.tolerance
        ):
            raise DohyoError(f"{problem.name}: the best x of the run does not earn here what it did; has the file been changed?")


class QPBORun(Run[QPBOConfig]):
    """A run of `dohyo qpbo`."""

    command, config_type, length, free = "qpbo", QPBOConfig, "steps", ("steps", "max_seconds")

    @cached_property
    def problem(self) -> Reward:
        return self.config.problem()

    def write_config(self) -> None:
        _ = self.parts  # which put a number in the place of scale auto
        super().write_config()

    def make_parts(self) -> tuple[nn.Module, Task[Any], Reinforce]:
        if isinstance(self.config.scale, str):  # the number goes into config.yaml: a resumed run keeps it
            generator = torch.Generator().manual_seed(0)  # the same x for every run of a problem
            x = torch.randint(2, (SCALE_SAMPLES, self.problem.variables), generator=generator).float()
            self.config = dataclasses.replace(self.config, scale=float(self.problem(x).double().std()) or 1.0)
        task = Optimise(Best(self.problem), float(self.config.scale))
        objective = self.config.objective(task.best, lambda: task.entropy, lambda: task.scale)
        return self.config.build_policy(self.problem.variables), task, objective

    def finish(self, fabric: Fabric, on_test: OnTest) -> dict[str, Any]:
        config, problem = self.config, self.problem
        policy: Any = self.parts[0]
        best = max(gather(fabric, self.parts[1].state_dict()), key=lambda one: (one["value"], -one["step"]))
        with apart(policy, config.seed):
            rewards = problem(policy.to(fabric.device).sample(LAST_SAMPLES)).double()
        numbers = load_checkpoint(self.folder)["numbers"]
        known = problem.maximum
        if fabric.is_global_zero:
            from dohyo.lab.plots.rewards import plot_reward_curves

            plot_reward_curves({config.policy: read_records(self.folder)}, self.folder / "learning_curves.png", known)
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
            "reward_scale": self.parts[1].scale,  # type: ignore[attr-defined]
            "entropy": config.entropy,
            "restarts": config.restarts,
            "policy": config.policy,
        }
        objective: Any = self.parts[2]
        if objective.estimator is not None:
            result |= {
                "estimator": config.estimator,
                "expected_cost": objective.estimator.expected_cost,
                "estimator_arguments": to_dict(objective.estimator),
                "encoder": config.encoder,
            }
        return result
