"""Models of one architecture whose parameters are stacked in one table, so that one batched program runs them all.

Each replica keeps its own stream of noise. Each replica's generator makes the noise in advance, and the model gets it when it
asks. So a replica gets exactly the numbers that it would get on its own, and what remains is a pure function of tensors, which
can be mapped over replicas and compiled.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import pad

from dohyo.contract import bound, marking, split
from dohyo.errors import DohyoError
from dohyo.lab.fast.noise import Asked, Given, Piece, fill
from dohyo.objectives.weighing import bind_options

LINE = 128  # padded rows come in tables of so many lines, whose length varies
Tensors = dict[str, Tensor]
Weights = tuple[Tensor, list[Tensor]]


class Unbatchable(DohyoError):  # noqa: N818
    """Why these models cannot run as one program."""


class Functions(nn.Module):
    """A model's functions; `forward` calls the one that is named, with noise that was made in advance."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, name: str, noise: list[Tensor], *arguments: Any, **options: bool) -> Any:
        with Given(noise):
            return getattr(self, name)(*arguments, **options)

    def weights(self, x: Tensor, rows: Tensor, **options: bool) -> Tensor:
        return bound(self.model, x, **options)(rows)

    def marked(self, x: Tensor, rows: Tensor, **options: bool) -> Weights:
        """Log-weights, and the factors of the marks."""
        with marking() as marks:
            log_w = self.weights(x, rows, **options)
        return log_w, [mark.factor for mark in marks]

    def joint(self, n: int) -> tuple[Tensor, Tensor]:
        z, x = self.model.sample_joint(n)
        return z, x

    def log_q(self, x: Tensor, z: Tensor) -> Tensor:
        return self.model.posterior(self.model.encode(x)).log_prob(z)  # type: ignore[no-any-return]


@dataclass(eq=False)
class Stacked:
    """Several models as one: data and log-weights are those of the first model, then of the second, ...

    The models' own parameters become views of the stacked ones: changing one changes the other. Everything else in a model keeps
    its present value, except buffers, which `refresh` reads again.
    """

    models: Sequence[nn.Module]  # which differ only in their numbers
    generators: Sequence[torch.Generator]  # of each model's noise
    encoder: str  # what phi follows: it decides whether the proposal is marked, and whether the parameters of log q are constants
    compiler: Callable[[Any], Any] | None = None  # `torch.compile` with its options; None to leave the network uncompiled
    varying: bool = False  # whether the number of log-weights changes from step to step
    padded: bool = False  # whether rows are those of a `captured.Layout`, and not equally many for each datum
    _pieces: dict[Any, list[Piece]] = field(default_factory=dict)
    _functions: ClassVar[type[Functions]] = Functions

    def __post_init__(self) -> None:
        first = self.models[0]
        theta, phi = split(first)
        self.flat, views = flattened([[*theta, *phi] for theta, phi in map(split, self.models)])
        leaves = [view.requires_grad_() for view in views]
        self.theta, self.phi = leaves[: len(theta)], leaves[len(theta) :]
        leaf_of = {id(p): leaf for p, leaf in zip([*theta, *phi], leaves, strict=True)}
        self.parameters = {}
        for name, parameter in first.named_parameters():
            if parameter.requires_grad and id(parameter) not in leaf_of:
                raise Unbatchable(f"{name} is trained, but neither among decoder_parameters() nor encoder_parameters()")
            frozen = [model.get_parameter(name).detach() for model in self.models]
            self.parameters[f"model.{name}"] = leaf_of[id(parameter)] if parameter.requires_grad else torch.stack(frozen)
        self.buffers = {f"model.{name}": self._buffers(name) for name, _ in first.named_buffers()}
        self.of_theta = {name for name, leaf in self.parameters.items() if any(leaf is own for own in self.theta)}
        self.options = bind_options(self.encoder)
        self.function: Any = self._functions(_empty(first)).train()
        self._run: Callable[..., Any] = self._mapped if self.compiler is None else self.compiler(self._mapped)

    def _buffers(self, name: str) -> Tensor:
        return torch.stack([model.get_buffer(name) for model in self.models])

    def refresh(self) -> None:
        """Read the models' buffers again, into the same memory."""
        for name, stacked in self.buffers.items():
            stacked.copy_(self._buffers(name.removeprefix("model.")))

    def __call__(self, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Weights:
        """Log-weights of x, the data of all models, and the marks' factors; rows are of one model, and the same for all."""
        x = x.unflatten(0, (len(self.models), -1))
        rows, noise = self._in_lines(LINE if self.padded else x.shape[1], rows, noise)
        log_w, factors = self._run(self.parameters, self.buffers, x, rows, noise)
        return log_w.flatten(), factors

    def _in_lines(self, lines: int, rows: Tensor, noise: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Rows, and noise with rows, as tables of so many lines: one size is fixed, which the compiler makes use of."""
        table = lines, len(rows) // lines
        noise = [part.unflatten(1, table) if part.shape[1:2] == rows.shape else part[:, None] for part in noise]
        rows = rows.view(table)
        if self.compiler is not None and self.varying and table[1] > 1:
            torch._dynamo.mark_dynamic(rows, 1)
            for part in noise:
                if part.shape[1:3] == table:  # perhaps by coincidence: this n then gets a separate program
                    torch._dynamo.maybe_mark_dynamic(part, 2)
        return rows, noise

    def noise(self, x: Tensor, rows: Tensor) -> list[Tensor]:
        """The noise for these arguments, made by each model's own generator."""
        x = x[: len(x) // len(self.models)]
        pieces = self.pieces(x) if self.padded else self._exact_pieces(x, rows)
        noise = [torch.empty_like(part, device=self.flat.device) for part in self.like(pieces, len(rows))]
        self.fill(noise, pieces, [len(rows)])
        return noise

    def like(self, pieces: Sequence[Piece], rows: int) -> list[Tensor]:
        """Tensors on meta with the shapes of this noise of all models."""
        like = self.flat.to("meta")
        return [like.new_empty((len(self.models), *([rows] if of_rows else []), *size)) for _, size, of_rows in pieces]

    def fill(self, noise: Sequence[Tensor], pieces: Sequence[Piece], totals: Sequence[int]) -> None:
        """Draw noise as each model would on its own, for one set of log-weights after another."""
        for replica, generator in enumerate(self.generators):
            start = 0
            for total in totals:
                for part, (kind, _, of_rows) in zip(noise, pieces, strict=True):
                    if of_rows:
                        fill(part[replica, start : start + total], kind, generator)
                    elif start == 0:
                        fill(part[replica], kind, generator)
                start += total

    def pieces(self, x: Tensor) -> list[Piece]:
        """The noise that one model asks for with data like x, for any number of log-weights."""
        if len(x) not in self._pieces:
            few, more = (self._exact_pieces(x, torch.zeros(rows, dtype=torch.long)) for rows in (3, 5))
            self._pieces[len(x)] = [self._piece(*both) for both in zip(few, more, strict=True)]
        return self._pieces[len(x)]

    def _piece(self, few: Piece, more: Piece) -> Piece:
        """The piece of which these are the sizes with 3 and with 5 rows."""
        size = few.size[1:]
        if few != more and (few.size, more.size) != ((3, *size), (5, *size)):
            raise Unbatchable(f"{type(self.models[0]).__name__} draws noise for its log-weights that is not one row for each")
        return few if few == more else Piece(few.kind, size, of_rows=True)

    def _exact_pieces(self, x: Tensor, rows: Tensor) -> list[Piece]:
        """The same for these rows alone."""
        key = len(x), len(rows)
        if key not in self._pieces:  # on meta tensors nothing is computed, so nothing is added to a recording
            with torch.no_grad():
                self._pieces[key] = self._asked(x.to("meta"), rows.to("meta"))
        return self._pieces[key]

    def _asked(self, x: Tensor, rows: Tensor) -> list[Piece]:
        """The noise that one model asks for, with its rows."""
        with Asked() as asked:
            self.function.weights(x, rows, **self.options)
        return list(asked.noise)

    def _mapped(self, parameters: Tensors, buffers: Tensors, x: Tensor, rows: Tensor, noise: list[Tensor]) -> Any:
        """The program that runs the network, for all models."""

        def one(values: Tensors, buffers: Tensors, x: Tensor, noise: list[Tensor]) -> Any:
            given = [part.flatten(0, 1) if part.ndim > 1 else part[0] for part in noise]
            arguments = given, x, rows.flatten()
            if self.encoder == "same":  # nothing is marked
                return functional_call(self.function, (values, buffers), ("weights", *arguments), self.options), []
            return functional_call(self.function, (values, buffers), ("marked", *arguments), self.options)

        return vmap(one)(parameters, buffers, x, noise)


def _empty(model: nn.Module) -> nn.Module:
    """A copy without numbers. Moving to meta would split shared parameters, so they are tied again."""
    made, names = copy.deepcopy(model).to("meta"), {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        made.get_submodule(owner).register_parameter(own, made.get_parameter(names[id(parameter)]))
    return made


def flattened(tensors: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Each run's tensors in one row of a table: the table, and for each tensor its view of all runs, (runs, ...).

    The tensors themselves become views of the table: changing one changes the other.
    """
    flat = torch.cat([flat_row([own.detach()[None] for own in row]) for row in tensors])
    for row, own in zip(flat, tensors, strict=True):
        for tensor, view in zip(own, unflattened(row, own), strict=True):
            tensor.data = view
    return flat, unflattened(flat, [torch.empty(len(tensors), *tensor.shape, device="meta") for tensor in tensors[0]])


def flat_row(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors (runs, ...) side by side in a table (runs, numbers)."""
    flat = [tensor.reshape(len(tensor), -1) for tensor in tensors]
    spare = [_room(part.shape[1]) - part.shape[1] for part in flat]
    return torch.cat([pad(part, (0, more)) if more else part for part, more in zip(flat, spare, strict=True)], 1)


def row_length(tensors: Sequence[Tensor]) -> int:
    """The number of columns in `flat_row` of these tensors."""
    return sum(_room(tensor[0].numel()) for tensor in tensors)


def unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `flat_row` put side by side, as views; those of one run if `flat` is one row."""
    views, start = [], 0
    for tensor in like:
        size = tensor.numel() // (len(flat) if flat.ndim == 2 else 1)
        views.append(flat[..., start : start + size].view(tensor.shape))
        start += _room(size)
    return views


def _room(size: int) -> int:
    """Round up, so that each tensor begins where a matrix product can load 16 bytes at once."""
    return -(-size // 4) * 4
