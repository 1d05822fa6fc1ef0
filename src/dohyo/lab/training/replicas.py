"""Models of one architecture whose parameters are stacked, so that one batched program runs them all.

Each replica keeps its own stream of noise. The noise that a model asks for is drawn beforehand, by each replica's generator in
turn, and handed to the model when it asks: so a replica gets exactly the numbers that it would get alone, and what is left is
a pure function of tensors, which can be mapped over replicas and compiled.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dohyo.errors import DohyoError
from dohyo.lab.training.flat import flattened
from dohyo.lab.training.noise import Asked, DrawnBy, Given
from dohyo.objectives.losses import bind_options, source_of

Source = Callable[[Tensor], Any]
Options = dict[str, bool]


class Unbatchable(DohyoError):  # noqa: N818
    """Why these models cannot run as one program."""


class _Weights(nn.Module):
    """A model as a function: x, rows, noise -> log-weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, rows: Tensor, noise: list[Tensor], options: Options) -> Tensor:
        with Given(noise):
            log_w: Tensor = _bound(self.model, x, options)(rows)
        return log_w


def _bound(model: Any, x: Tensor, options: Options) -> Source:
    return model.bind(x, **options) if hasattr(model, "bind") else lambda rows: model.log_weights(x, rows)


@dataclass(eq=False)
class Replicas:
    """Several models as one, for the objective: data and log-weights are those of the first model, then of the second, ...

    The models' own parameters become views of the stacked ones: who changes the one changes the other. What else a model holds
    is taken as it is now, but for buffers, which `refresh` reads again.

    Attributes:
        models: Alike but for the numbers in them.
        noises: The generator of each one's noise.
        compiler: What the network goes through, `torch.compile` with its options; None for nothing.
        varying: Whether the number of log-weights changes from step to step.
        drawn: The noise for the next call, where `draw` was asked for it beforehand.
    """

    models: list[nn.Module]
    noises: list[torch.Generator]
    compiler: Callable[[Any], Any] | None = None
    varying: bool = False
    drawn: list[Tensor] = field(default_factory=list)
    _shapes: dict[Any, list[torch.Size]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.models[0]
        trained = parameters_of(first)
        self.flat, views = flattened([[*theta, *phi] for theta, phi in map(parameters_of, self.models)])
        leaves = [view.requires_grad_() for view in views]
        self.theta, self.phi = leaves[: len(trained[0])], leaves[len(trained[0]) :]
        leaf_of = {id(p): leaf for p, leaf in zip([*trained[0], *trained[1]], leaves, strict=True)}
        phi = {id(parameter) for parameter in trained[1]}
        self.stacked, self.phi_names = {}, set()
        for name, parameter in first.named_parameters():
            if parameter.requires_grad and id(parameter) not in leaf_of:
                raise Unbatchable(f"{name} is trained, but neither among decoder_parameters() nor encoder_parameters()")
            frozen = [model.get_parameter(name).detach() for model in self.models]
            self.stacked[f"model.{name}"] = leaf_of[id(parameter)] if parameter.requires_grad else torch.stack(frozen)
            if id(parameter) in phi:
                self.phi_names.add(f"model.{name}")
        self.buffers = {f"model.{name}": self._buffers(name) for name, _ in first.named_buffers()}
        self.function = _Weights(_empty(first)).train()
        self._one, self._two = self._together, self._apart
        if self.compiler is not None:
            self._one, self._two = self.compiler(self._together), self.compiler(self._apart)
            if self.theta and self.phi:
                self.bind_apart = self._bind_apart  # worth it only where a compiler joins the two passes

    def _buffers(self, name: str) -> Tensor:
        return torch.stack([model.get_buffer(name) for model in self.models])

    def refresh(self) -> None:
        """Read the models' buffers again, into the same memory."""
        for name, stacked in self.buffers.items():
            stacked.copy_(self._buffers(name.removeprefix("model.")))

    def bind(self, x: Tensor, **options: bool) -> Source:
        """rows -> log-weights of x, which holds as many data of each model; every datum must have as many rows."""
        return lambda rows: self._one(*self._arguments(x, rows, options)).flatten()

    def _bind_apart(self, x: Tensor, **options: bool) -> Source:
        """rows -> the same log-weights twice: with a gradient in theta alone, and in phi alone."""

        def both(rows: Tensor) -> tuple[Tensor, Tensor]:
            theta, phi = self._two(*self._arguments(x, rows, options))
            return theta.flatten(), phi.flatten()

        return both

    def _arguments(self, x: Tensor, rows: Tensor, options: Options) -> tuple[Any, ...]:
        """What the program takes: of rows, and of noise that has rows, it sees (data, rows of each), where the first is fixed."""
        count = len(self.models)
        x, rows = x.unflatten(0, (count, -1)), rows[: len(rows) // count]
        table = x.shape[1], len(rows) // x.shape[1]
        drawn, self.drawn = self.drawn or self._draw(x[0], rows, options), []
        noise = [part.unflatten(1, table) if part.shape[1:2] == rows.shape else part[:, None] for part in drawn]
        rows = rows.view(table)
        if self.compiler is not None and self.varying and table[1] > 1:
            torch._dynamo.mark_dynamic(rows, 1)
            for part in noise:
                if part.shape[1:3] == table:  # by accident, perhaps: then a program of its own serves this n
                    torch._dynamo.maybe_mark_dynamic(part, 2)
        return self.stacked, x, rows, noise, options

    def draw(self, x: Tensor, rows: Tensor, options: Options) -> list[Tensor]:
        """The noise for these arguments of `bind`, of each model by its own generator."""
        count = len(self.models)
        return self._draw(x[: len(x) // count], rows[: len(rows) // count], options)

    def _draw(self, x: Tensor, rows: Tensor, options: Options) -> list[Tensor]:
        key = len(x), len(rows), *options.items()
        if key not in self._shapes:  # asked on meta tensors: nothing is computed, so that a step that is recorded stays as it is
            with torch.no_grad(), Asked() as asked:
                _bound(self.function.model, x.to("meta"), options)(rows.to("meta"))
            self._shapes[key] = asked.shapes
        like = next(iter(self.stacked.values()))
        noise = [like.new_empty((len(self.models), *shape)) for shape in self._shapes[key]]
        for replica, generator in enumerate(self.noises):
            for part in noise:
                part[replica].normal_(generator=generator)
        return noise

    def _together(self, stacked: dict[str, Tensor], x: Tensor, rows: Tensor, noise: list[Tensor], options: Options) -> Tensor:
        def one(values: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, noise: list[Tensor]) -> Any:
            drawn = [part.flatten(0, 1) if part.ndim > 1 else part[0] for part in noise]
            return functional_call(self.function, (values, buffers), (x, rows.flatten(), drawn, options))

        log_w: Tensor = vmap(one)(stacked, self.buffers, x, noise)
        return log_w

    def _apart(self, stacked: dict[str, Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
        theta = {name: value.detach() if name in self.phi_names else value for name, value in stacked.items()}
        phi = {name: value if name in self.phi_names else value.detach() for name, value in stacked.items()}
        return self._together(theta, *rest), self._together(phi, *rest)


def _empty(model: nn.Module) -> nn.Module:
    """A copy without numbers. Parameters that were one are one again, which moving to meta undoes."""
    made, names = copy.deepcopy(model).to("meta"), {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        made.get_submodule(owner).register_parameter(own, made.get_parameter(names[id(parameter)]))
    return made


def parameters_of(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """theta and phi, without what is frozen."""
    if isinstance(model, Replicas):
        return model.theta, model.phi
    split = hasattr(model, "encoder_parameters") and hasattr(model, "decoder_parameters")
    theta = model.decoder_parameters() if split else model.parameters()
    phi = model.encoder_parameters() if split else ()
    found = [p for p in theta if p.requires_grad], [p for p in phi if p.requires_grad]
    if any(len({id(p) for p in own}) < len(own) for own in found):
        raise DohyoError(f"{type(model).__name__} lists a parameter twice in decoder_parameters() or encoder_parameters()")
    if {id(p) for p in found[0]} & {id(p) for p in found[1]}:
        raise DohyoError(
            f"{type(model).__name__} lists a parameter in both decoder_parameters() and encoder_parameters(), which follow two "
            "losses; list it in one"
        )
    return found


def check_batchable(
    models: Sequence[nn.Module],
    x: Tensor,
    rows: Tensor,
    encoder: str,
    compiler: Callable[[Any], Any] | None = None,
    varying: bool = False,
) -> None:
    """An `Unbatchable` that says why these models cannot be mapped over, or traced for a compiler, if they cannot.

    Tried on real data: each model must give the log-weights that it gives alone, whatever its code does with noise.

    Args:
        encoder: What phi follows, which decides what is asked of a model.
        compiler: For the trial; None where nothing is to be compiled.
        varying: Whether one program must do for every number of log-weights.
    """
    name, copies = type(models[0]).__name__, [copy.deepcopy(model).train() for model in models]
    options = bind_options(encoder)
    before = [value.clone() for model in copies for value in model.buffers()]
    generators = [torch.Generator(x.device).manual_seed(seed) for seed, _ in enumerate(models)]
    try:
        alone = []
        for model, generator in zip(copies, generators, strict=True):
            with DrawnBy(generator):
                alone.append(_bound(model, x, options)(rows).detach())
            generator.manual_seed(len(alone) - 1)
        if not all(bool(log_w.isfinite().all()) for log_w in alone):
            raise Unbatchable(f"{name} gives log-weights that are not finite before it is trained")
        if any(not torch.equal(a, b) for a, b in zip(before, (b for model in copies for b in model.buffers()), strict=True)):
            raise Unbatchable(f"{name} changes its buffers as it runs (as BatchNorm does)")
        for model in copies:
            if [(n, p.shape) for n, p in model.named_parameters()] != [(n, p.shape) for n, p in copies[0].named_parameters()]:
                raise Unbatchable("the replicas' parameters differ in name or shape")
        if len([*copies[0].named_modules(remove_duplicate=False)]) > len([*copies[0].modules()]):
            raise Unbatchable(f"{name} has one module in two places")  # which functional_call does not put back
        if len({p.dtype for p in copies[0].parameters()}) > 1:
            raise Unbatchable(f"{name} has parameters of several types")
        replicas = Replicas(copies, generators, compiler, varying)
        source = source_of(replicas, x.repeat(len(copies), *(1,) * (x.ndim - 1)), encoder)
        found = source(rows.repeat(len(copies)))
        together = found if isinstance(found, tuple) else (found,)
        torch.stack(together).sum().backward()
    except Unbatchable:
        raise
    except Exception as error:
        reason, what = next(iter(str(error).splitlines()), ""), "mapped over replicas" if compiler is None else "captured"
        raise Unbatchable(f"{name} cannot be {what} ({type(error).__name__}: {reason})") from error
    if not all(torch.allclose(part.detach(), torch.cat(alone), rtol=1e-4, atol=1e-3) for part in together):
        raise Unbatchable(f"{name} gives other log-weights when it is mapped over replicas")
