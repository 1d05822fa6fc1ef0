"""The state of a run at the end of an epoch, and its checkpoint: one file, replaced atomically."""

import copy
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dohyo.contract import split
from dohyo.errors import DohyoError, reporting
from dohyo.files import replacing
from dohyo.lab.claims import check_checkpoint
from dohyo.lab.folder import CHECKPOINT, as_values, check_values
from dohyo.lab.training.chains import Chains, has_chains
from dohyo.lab.training.config import LoopConfig, Progress, StepConfig, resumable_fields
from dohyo.lab.training.processes import gather
from dohyo.lab.training.tasks import Task

_CHAINS = {"waiting": bool, "since": int, "lost": bool}
_NUMBERS = {each.name: float | int if each.type is float else each.type for each in dataclasses.fields(Progress)}


@dataclass(eq=False)
class State:
    """A run between two epochs: what is needed to continue as if nothing had happened."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    order: torch.Generator  # shuffles the data; the same on every process
    depth: torch.Generator  # draws K; the same on every process only if a batch shares one K
    best: dict[str, Any]  # the parameters that the run would return if it ended now
    rate: float  # the learning rate, which an optimiser may hold in single precision on a GPU
    noise: torch.Generator | None = None  # else, with the same numbers, torch's global one, which each process seeds for itself
    average: AveragedModel | None = None  # the parameters averaged over epochs, if wanted
    progress: Progress = field(default_factory=Progress)
    chains: Chains | None = None  # those that theta follows in the end, if any

    def __post_init__(self) -> None:
        self.theta, self.phi = split(self.model)
        self._follow(self.chains)

    @classmethod
    def start(cls, model: nn.Module, config: StepConfig, fabric: Fabric, shared_k: bool, own_noise: bool = False) -> "State":
        """A run that has not begun."""
        model.load_state_dict(fabric.broadcast(model.state_dict()))
        model = model.to(fabric.device)
        rank = fabric.global_rank
        seed = config.seed + 1_000_003 * (rank + 1)
        noise = torch.Generator(fabric.device).manual_seed(seed) if own_noise else None
        if noise is None:
            torch.manual_seed(seed)
        k_seed = config.seed if config.k_seed is None else config.k_seed
        return cls(
            model,
            _optimiser(model, config, fabric.device),
            order=torch.Generator().manual_seed(config.seed + 2_000_003),
            depth=torch.Generator().manual_seed(k_seed + (0 if shared_k else 7_000_003 * rank) + 1),
            best=_copied(model.state_dict()),
            rate=config.learning_rate,
            noise=noise,
            average=averaged(model, config.average) if isinstance(config, LoopConfig) and config.average else None,
            chains=Chains(isinstance(config, LoopConfig) and config.anneal_from > 0) if has_chains(model) else None,
        )

    def _follow(self, chains: Chains | None) -> None:
        """Take how far the run is with its chains, and with it the model whose log-weights theta and phi follow."""
        self.chains = chains
        self.following: Any = self.model.model if chains is not None and chains.waiting else self.model

    def set_rate(self, rate: float) -> None:
        self.rate = rate
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def after_epoch(self, score: float | None, config: StepConfig) -> None:
        """Count the epoch, and keep the parameters if they are the best so far or if there is no score."""
        if self.average is not None:
            self.average.update_parameters(self.model)
        progress = self.progress
        progress.epoch += 1
        if score is None or score < progress.best_score:
            progress.best_score = progress.best_score if score is None else score
            progress.best_epoch, progress.stale = progress.epoch, 0
            self.best = _copied(self.model.state_dict())
        else:
            progress.stale += 1
            progress.drops += config.drops(progress)

    def turn(self) -> None:
        """Let theta follow chains from here on. What was validated by samples is not compared with what is by chains."""
        self._follow(Chains(waiting=False, since=self.progress.epoch))
        self.progress.best_score, self.progress.stale = math.inf, 0

    def save(self, folder: Path, config: StepConfig, fabric: Fabric, task: Task[Any]) -> None:
        """Write the checkpoint; every process must call this, but only the first one writes, and all wait for it."""
        noise = {"depth": self.depth.get_state(), "task": task.state_dict()}
        if self.noise is not None:
            noise[fabric.device.type] = self.noise.get_state()
        else:
            noise["cpu"] = torch.random.get_rng_state()
            if fabric.device.type == "cuda":
                noise["cuda"] = torch.cuda.get_rng_state(fabric.device)
        checkpoint = {
            "model": _copied(self.model.state_dict()),
            "best": self.best,
            **({} if self.average is None else {"average": _copied(self.average.module.state_dict())}),
            "optimiser": {
                "state": {place: _copied(own) for place, own in self.optimiser.state_dict()["state"].items()},
                "fused": bool(self.optimiser.param_groups[0].get("fused")),
            },
            "config": identity(config),
            "order": self.order.get_state(),
            "noise": gather(fabric, noise),
            "numbers": dataclasses.asdict(self.progress),
            **({} if self.chains is None else {"chains": dataclasses.asdict(self.chains)}),
        }
        if fabric.is_global_zero:
            try:
                with replacing(folder / CHECKPOINT) as temporary:
                    torch.save(checkpoint, temporary)
            except RuntimeError as error:  # torch raises this if the disk is full
                reason = str(error).splitlines()[0]
                raise OSError(f"{folder / CHECKPOINT} cannot be written ({reason}); the previous one is kept") from error
        fabric.barrier()  # what is read next is this one

    def restore(self, folder: Path, config: StepConfig, fabric: Fabric, task: Task[Any]) -> None:
        """Restore the folder's checkpoint, if there is one."""
        if not (folder / CHECKPOINT).exists():
            return
        checkpoint = load_checkpoint(folder)
        with reporting(f"{folder / CHECKPOINT}: is damaged, or was made by another program ({{}}); start a new run"):
            self._restore(checkpoint, folder, config, fabric, task)

    def _restore(self, checkpoint: dict[str, Any], folder: Path, config: StepConfig, fabric: Fabric, task: Task[Any]) -> None:
        processes = len(checkpoint["noise"])
        if processes != fabric.world_size:
            raise DohyoError(f"{folder}: the run had {processes} processes, not {fabric.world_size}; resume with as many")
        for key, value in identity(config).items():
            before = checkpoint["config"].get(key, value)  # an option that did not exist then had its default
            if before != value:
                raise DohyoError(
                    f"{folder}: {key} is {value} now, but was {before} when the run began; restore it, or start a new run"
                )
        self.model.load_state_dict(checkpoint["model"])
        own = self.optimiser.state_dict()  # its options depend on the machine, so only its moments are restored
        self.optimiser.load_state_dict({**own, "state": checkpoint["optimiser"]["state"]})
        if fabric.device.type == "cpu" and not checkpoint["optimiser"].get("fused"):  # it rounds otherwise; old ones lack the key
            for group in self.optimiser.param_groups:
                group["fused"] = None
        for parameter, moments in self.optimiser.state.items():
            for name, moment in moments.items():
                if isinstance(moment, Tensor) and moment.dim() and moment.shape != parameter.shape:
                    raise DohyoError(f"{name} of the optimiser is {tuple(moment.shape)}, its parameter {tuple(parameter.shape)}")
                moments[name] = moment.clone() if isinstance(moment, Tensor) else moment  # a stranger's may overlap
        self.best = checkpoint["best"]
        if self.chains is not None:
            self._follow(Chains(**{name: checkpoint["chains"][name] for name in _CHAINS}))
        self.order.set_state(checkpoint["order"])
        noise = checkpoint["noise"][fabric.global_rank]
        self.depth.set_state(noise["depth"])
        if self.noise is not None and fabric.device.type in noise:
            self.noise.set_state(noise[fabric.device.type])
        elif self.noise is None:
            if "cpu" in noise:
                torch.random.set_rng_state(noise["cpu"])
            if fabric.device.type == "cuda" and "cuda" in noise:
                torch.cuda.set_rng_state(noise["cuda"], fabric.device)
        task.load_state_dict(noise["task"])
        for name, value in checkpoint["numbers"].items():
            setattr(self.progress, name, value)
        if self.average is not None:
            self.average.module.load_state_dict(checkpoint["average"])
            self.average.n_averaged.fill_(self.progress.epoch)


def _optimiser(model: nn.Module, config: StepConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimiser; on a CUDA GPU its numbers are on the device, so that a step can be recorded and never waits."""
    parameters = list(model.parameters())
    gpu = device.type == "cuda"
    # The fused kernel reads its rate and steps in single precision, whatever the parameters have.
    rate: Any = torch.tensor(config.learning_rate, dtype=torch.float32, device=device) if gpu else config.learning_rate
    if config.optimiser == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=rate, alpha=config.beta2, eps=config.epsilon, capturable=gpu)
    betas, amsgrad = (config.beta1, config.beta2), config.optimiser == "amsgrad"
    # On a CPU the fused kernel takes parameters, gradients and moments for rows of numbers in one and the same order.
    fused = gpu or (device.type == "cpu" and all(parameter.is_contiguous() for parameter in parameters))
    fused = fused and all(parameter.is_floating_point() for parameter in parameters)
    return torch.optim.Adam(parameters, rate, betas, config.epsilon, amsgrad=amsgrad, capturable=gpu, fused=fused or None)


def averaged(model: nn.Module, epochs: int) -> AveragedModel:
    """A copy of the model whose parameters are to be averaged over the last epochs; its buffers are the last ones.

    A run may end at any epoch, and old parameters are not kept, so that recent ones weigh more: exponentially, with the mean age
    and the variance that a plain mean over `epochs` of them would have. Until there are half as many it is the plain mean.
    """
    with reporting("averaging needs a copy of the model, and there is none ({}); set average to 0"):
        return AveragedModel(model, avg_fn=lambda mean, new, n: mean.lerp(new, max(1 / (int(n) + 1), 2 / (epochs + 1))))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of tensors that may be views: `deepcopy` and `torch.save` would copy the whole tensors they are views of."""
    return {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in values.items()}


def identity(config: StepConfig) -> dict[str, Any]:
    """The part of a config that a resumed run must not change, as plain data."""
    free = {*resumable_fields(config), "init_from"}  # a checkpoint holds what began with it, and the folder may have been moved
    return {key: value for key, value in as_values(config).items() if key not in free}


def load_progress(folder: Path) -> Progress:
    """How far the run in a folder has come."""
    return Progress(**load_checkpoint(folder)["numbers"])


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Load the checkpoint of a run onto the CPU, as plain data: nothing in it can run code."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise DohyoError(f"{folder}: has no {CHECKPOINT} yet; train it first (--resume {folder})")
    try:
        check_checkpoint(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make torch and pickle raise anything
        reason = str(error) if isinstance(error, DohyoError) else type(error).__name__
        raise DohyoError(f"{path}: is not a checkpoint of dohyo, or is damaged ({reason})") from error
    parts = {"model": dict, "best": dict, "optimiser": dict, "config": dict, "numbers": dict, "noise": list}
    if not isinstance(checkpoint, dict) or not all(isinstance(checkpoint.get(key), kind) for key, kind in parts.items()):
        raise DohyoError(f"{path}: is not a checkpoint of dohyo, or is damaged")
    chains = checkpoint.setdefault("chains", {"waiting": False, "since": 0, "lost": checkpoint.get("lost") is True})  # a new key
    known = {each.name for each in dataclasses.fields(Progress)}
    tasks = [isinstance(noise, dict) and "task" in noise for noise in checkpoint["noise"]]
    if set(checkpoint["numbers"]) != known or not all(tasks) or not isinstance(chains, dict):
        raise DohyoError(f"{path}: was made by another version of dohyo; start a new run, or resume it with that version")
    numbers = check_values(checkpoint["numbers"], _NUMBERS, path, "start a new run")
    for name, number in (numbers | check_values(chains, _CHAINS, path, "start a new run")).items():
        if isinstance(number, int) and not 0 <= number < 2**53:
            raise DohyoError(f"{path}: {name} is {number!r:.40}; start a new run")
    return checkpoint
