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
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

Source = Callable[[Tensor], Any]
_TAKE_GENERATOR = {
    torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.normal, torch.Tensor.normal_, torch.rand, torch.randn,
    torch.randint, torch.randperm, torch.multinomial, torch.Tensor.multinomial, torch.Tensor.uniform_, torch.Tensor.exponential_,
    torch.Tensor.random_, torch.Tensor.cauchy_, torch.Tensor.log_normal_, torch.Tensor.geometric_, torch.poisson,
}  # fmt: skip


class Unbatchable(ValueError):  # noqa: N818
    """Why these models cannot run as one program."""


class DrawnBy(TorchFunctionMode):
    """Random numbers come from a generator instead of torch's global one."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.generator is not None and func in _TAKE_GENERATOR:
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


class _Asked(TorchFunctionMode):
    """Notes how much standard normal noise is asked for, and gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if _is_standard_normal(func, args, kwargs):
            self.shapes.append(found.shape)
            return torch.zeros_like(found)
        return found


class _Given(TorchFunctionMode):
    """Hands out noise that was drawn beforehand, in the order in which it is asked for."""

    def __init__(self, noise: Sequence[Tensor]) -> None:
        super().__init__()
        self.noise, self.place = noise, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_standard_normal(func, args, kwargs):
            self.place += 1
            return self.noise[self.place - 1]
        return func(*args, **(kwargs or {}))


def _is_standard_normal(func: Any, args: Any, kwargs: Any) -> bool:
    """As `torch.distributions` draw it. Other randomness is refused by vmap."""
    return func is torch.Tensor.normal_ and len(args) == 1 and not kwargs


class _Weights(nn.Module):
    """A model as a function: x, rows, noise -> log-weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, rows: Tensor, noise: list[Tensor], options: dict[str, bool]) -> Tensor:
        with _Given(noise):
            log_w: Tensor = _bound(self.model, x, options)(rows)
        return log_w


def _bound(model: Any, x: Tensor, options: dict[str, bool]) -> Source:
    return model.bind(x, **options) if hasattr(model, "bind") else lambda rows: model.log_weights(x, rows)


@dataclass(eq=False)
class Replicas:
    """Several models as one, for the objective: data and log-weights are those of the first model, then of the second, ...

    The models' own parameters become views of the stacked ones: who changes the one changes the other.

    Attributes:
        models: Alike but for the numbers in them.
        noises: The generator of each one's noise.
        compiled: Run the network through `torch.compile`.
        varying: Whether the number of log-weights changes from step to step.
    """

    models: list[nn.Module]
    noises: list[torch.Generator]
    compiled: bool = False
    varying: bool = False
    _shapes: dict[Any, list[torch.Size]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.models[0]
        trained = parameters_of(first)
        self.flat, views = flattened([[*theta, *phi] for theta, phi in map(parameters_of, self.models)])
        leaves = [view.requires_grad_() for view in views]
        self.theta, self.phi = leaves[: len(trained[0])], leaves[len(trained[0]) :]
        names = {id(parameter): f"model.{name}" for name, parameter in first.named_parameters()}
        self.stacked = {names[id(p)]: leaf for p, leaf in zip([*trained[0], *trained[1]], leaves, strict=True)}
        for name, parameter in first.named_parameters():
            if not parameter.requires_grad:
                self.stacked[f"model.{name}"] = torch.stack([model.get_parameter(name).detach() for model in self.models])
        self.phi_names = {names[id(parameter)] for parameter in trained[1]}
        self.buffers = {
            f"model.{name}": torch.stack([model.get_buffer(name) for model in self.models]) for name, _ in first.named_buffers()
        }
        self.function = _Weights(copy.deepcopy(first).to("meta"))
        self._one, self._two = self._together, self._apart
        if self.compiled:
            self._one, self._two = torch.compile(self._together, fullgraph=True), torch.compile(self._apart, fullgraph=True)
            self.bind_apart = self._bind_apart  # worth it only where a compiler joins the two passes

    @property
    def runs(self) -> int:
        return len(self.models)

    def bind(self, x: Tensor, **options: bool) -> Source:
        """rows -> log-weights of x, which holds as many data of each model; every model must have the same rows."""
        return lambda rows: self._one(*self._arguments(x, rows, options)).flatten()

    def _bind_apart(self, x: Tensor, **options: bool) -> Source:
        """rows -> the same log-weights twice: with a gradient in theta alone, and in phi alone."""

        def both(rows: Tensor) -> tuple[Tensor, Tensor]:
            theta, phi = self._two(*self._arguments(x, rows, options))
            return theta.flatten(), phi.flatten()

        return both

    def _arguments(self, x: Tensor, rows: Tensor, options: dict[str, bool]) -> tuple[Any, ...]:
        count = len(self.models)
        x, rows = x.unflatten(0, (count, -1)), rows[: len(rows) // count]
        noise = self._noise(x[0], rows, options)
        if self.compiled and self.varying:
            for tensor, dimension in ((rows, 0), *((part, 1) for part in noise)):
                torch._dynamo.mark_dynamic(tensor, dimension)
        return self.stacked, x, rows, noise, options

    def _noise(self, x: Tensor, rows: Tensor, options: dict[str, bool]) -> list[Tensor]:
        key = len(x), len(rows), *options.items()
        if key not in self._shapes:
            with torch.no_grad(), _Asked() as asked:
                _bound(self.models[0], x, options)(rows)
            self._shapes[key] = asked.shapes
        like = next(iter(self.stacked.values()))
        noise = [like.new_empty((len(self.models), *shape)) for shape in self._shapes[key]]
        for replica, generator in enumerate(self.noises):
            for part in noise:
                part[replica].normal_(generator=generator)
        return noise

    def _together(
        self, stacked: dict[str, Tensor], x: Tensor, rows: Tensor, noise: list[Tensor], options: dict[str, bool]
    ) -> Tensor:
        def one(values: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, noise: list[Tensor]) -> Any:
            return functional_call(self.function, (values, buffers), (x, rows, noise, options))

        log_w: Tensor = vmap(one)(stacked, self.buffers, x, noise)
        return log_w

    def _apart(self, stacked: dict[str, Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
        theta = {name: value.detach() if name in self.phi_names else value for name, value in stacked.items()}
        phi = {name: value if name in self.phi_names else value.detach() for name, value in stacked.items()}
        return self._together(theta, *rest), self._together(phi, *rest)


def parameters_of(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """theta and phi, without what is frozen."""
    if isinstance(model, Replicas):
        return model.theta, model.phi
    split = hasattr(model, "encoder_parameters") and hasattr(model, "decoder_parameters")
    theta = model.decoder_parameters() if split else model.parameters()
    phi = model.encoder_parameters() if split else ()
    return [p for p in theta if p.requires_grad], [p for p in phi if p.requires_grad]


def flattened(tensors: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Each run's tensors in one row of a table: the table, and for each tensor its view of all runs, (runs, ...).

    The tensors themselves become views of the table: who changes the one changes the other.
    """
    flat = torch.cat([flat_row([own.detach()[None] for own in row]) for row in tensors])
    for row, own in zip(flat, tensors, strict=True):
        for tensor, view in zip(own, unflattened(row, own), strict=True):
            tensor.data = view
    return flat, unflattened(flat, [torch.empty(len(tensors), *tensor.shape, device="meta") for tensor in tensors[0]])


def flat_row(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors (runs, ...) side by side as a table (runs, numbers)."""
    flat = [tensor.reshape(len(tensor), -1) for tensor in tensors]
    return torch.cat([pad(part, (0, _room(part.shape[1]) - part.shape[1])) for part in flat], 1)


def row_length(tensors: Sequence[Tensor]) -> int:
    """How many columns `flat_row` makes of them."""
    return sum(_room(tensor[0].numel()) for tensor in tensors)


def unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `flat_row` put side by side, as views; of one run if `flat` is one row."""
    views, start = [], 0
    for tensor in like:
        size = tensor.numel() // (len(flat) if flat.ndim == 2 else 1)
        views.append(flat[..., start : start + size].view(tensor.shape))
        start += _room(size)
    return views


def _room(size: int) -> int:
    """Rounded up, so that each begins where a matrix product can load it in whole lines."""
    return -(-size // 32) * 32


def check_batchable(models: Sequence[nn.Module], x: Tensor, rows: Tensor) -> None:
    """An `Unbatchable` that says why these models cannot be mapped over, if they cannot.

    Tried on real data: each model must give the log-weights that it gives alone, whatever its code does with noise.
    """
    copies = [copy.deepcopy(model) for model in models]
    before = [value.clone() for model in copies for value in model.buffers()]
    generators = [torch.Generator(x.device).manual_seed(seed) for seed, _ in enumerate(models)]
    try:
        alone = []
        for model, generator in zip(copies, generators, strict=True):
            with DrawnBy(generator):
                alone.append(_bound(model, x, {})(rows).detach())
            generator.manual_seed(len(alone) - 1)
        if any(not torch.equal(a, b) for a, b in zip(before, (b for model in copies for b in model.buffers()), strict=True)):
            raise Unbatchable(f"{type(models[0]).__name__} changes its buffers as it runs (as BatchNorm does)")
        for model in copies:
            if [(n, p.shape) for n, p in model.named_parameters()] != [(n, p.shape) for n, p in copies[0].named_parameters()]:
                raise Unbatchable("the replicas' parameters differ in name or shape")
        replicas = Replicas(copies, generators)
        together = replicas.bind(x.repeat(len(copies), *(1,) * (x.ndim - 1)))(rows.repeat(len(copies))).detach()
    except Unbatchable:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise Unbatchable(
            f"{type(models[0]).__name__} cannot be mapped over replicas ({type(error).__name__}: {reason})"
        ) from error
    wanted = torch.cat(alone)
    if not torch.allclose(together, wanted, rtol=1e-4, atol=1e-3):
        raise Unbatchable(f"{type(models[0]).__name__} gives other log-weights when it is mapped over replicas")
