r"""What a model is: what it must have, what it may have, and the errors if something is missing.

A model needs one method, `log_weights(x, rows)`. Everything else is optional and needed only by what uses it:

=====================================  =========================================================================
`bind(x, ...) -> (rows -> log_w)`      encodes x once for any number of calls; DReG and reverse KL need it
`proposed(z)`, `proposed(log_q)`       called in `log_weights`, to show the objectives where the proposal ends
`encoder_parameters()`,                phi and theta, to clip them separately
`decoder_parameters()`
`bind_encoder(x, ...)`                 like `bind`, of the encoder's own samples with theta constant: what phi is trained by
                                       where the log-weights give it no gradient, as those of `Annealed`
`sample_joint(n) -> (z, x)`            for reverse KL and policies, which train on samples from the model
=====================================  =========================================================================

**One loss, one backward pass.** Theta's loss and phi's are sums of the same log-weights, :math:`\sum_i c_i \log w_i` and
:math:`\sum_i c'_i \log w_i`, and phi acts on log w_i only through z_i and log q(z_i; x). So there, and nowhere else, the backward
pass multiplies the gradient of row i by :math:`c'_i / c_i`: theta gets its own gradient, and phi gets its own.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dohyo.errors import DohyoError

Source = Callable[[Tensor], Tensor]

GUIDE, LOOP_GUIDE = "docs/guides/model.md", "docs/guides/own-loop.md"
_ARGUMENTS = {  # of methods that have any
    "log_weights": "x, rows", "bind": "x, detach_posterior=False, detach_x=False", "encode": "x", "posterior": "code",
    "sample_joint": "n", "sample_mean": "n", "reconstruct": "x",
}  # fmt: skip


class Model(Protocol):
    """What every model must have."""

    def log_weights(self, x: Tensor, rows: Tensor, /) -> Tensor:
        """One log-weight for each row: z ~ q(.; x[row]), log p(x, z) - log q(z; x)."""
        ...


def offers(model: object, method: str) -> bool:
    return callable(getattr(model, method, None))


def require(model: object, what: str, *methods: str, instead: str = "") -> None:
    """Raise a DohyoError that names the first method that `what` needs and the model lacks, and what else can be done."""
    for method in methods:
        if not offers(model, method):
            lacking = f"{type(model).__name__} has no {method}({_ARGUMENTS.get(method, '')})"
            if isinstance(model, nn.parallel.DistributedDataParallel):
                raise DohyoError(
                    f"{lacking}, and shares only what its forward computes: wrap a module whose forward returns the loss, as "
                    f"{LOOP_GUIDE} shows, and evaluate the model inside"
                )
            raise DohyoError(
                f"{lacking}, which {what} needs; add it as {GUIDE} shows, or derive the model from "
                f"dohyo.models.LatentVariableModel{instead}"
            )


def bound(model: Model, x: Tensor, **options: bool) -> Source:
    """rows -> log-weights of x[rows], with x encoded only once if the model has `bind`, which gets the options that are true."""
    options = {name: wanted for name, wanted in options.items() if wanted}
    if offers(model, "bind"):
        bind: Any = model.bind  # type: ignore[attr-defined]
        try:
            source = bind(x, **options)
        except TypeError:
            _check_takes(bind, model, options)
            raise
    elif offers(model, "log_weights") and not options:
        source = lambda rows: model.log_weights(x, rows)  # noqa: E731
    else:
        require(model, "an estimate of log p(x)", "log_weights")
        what, instead = f"a gradient with {' and '.join(options)}", ""
        if list(options) == ["detach_posterior"]:
            what, instead = "encoder 'dreg'", ", or train with encoder 'iwae'"
        require(model, what, "bind", instead=instead)
    return lambda rows: source(rows.to(x.device))


def through_chains(model: object) -> bool:
    """Whether the model's log-weights are those of chains, which give phi no gradient."""
    return offers(model, "bind_encoder") and getattr(model, "steps", None) != 0


def one_for_each(chunk: Tensor, log_w: Tensor) -> Tensor:
    """Return `log_w`, or raise a DohyoError if it is not one float for each row of `chunk`."""
    if log_w.shape != chunk.shape or not log_w.is_floating_point():
        raise DohyoError(
            f"log_weights returned {log_w.dtype} {tuple(log_w.shape)} for {len(chunk)} rows; "
            f"it must return one float for each row, ({len(chunk)},)"
        )
    return log_w


def _check_takes(bind: Callable[..., Source], model: object, options: dict[str, bool]) -> None:
    parameters = inspect.signature(bind).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    for name in options:
        if name not in {parameter.name for parameter in parameters}:
            raise DohyoError(f"{type(model).__name__}.bind takes no {name}; give it that argument, as {GUIDE} shows")


def split(model: object) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """theta and phi, without frozen parameters; all are theta if the model does not list the two separately."""
    name = type(model).__name__
    lists = [offers(model, "encoder_parameters"), offers(model, "decoder_parameters")]
    if all(lists):
        theta, phi = list(model.decoder_parameters()), list(model.encoder_parameters())  # type: ignore[attr-defined]
    elif any(lists):
        require(model, "a model that has the other of the two", "encoder_parameters", "decoder_parameters")
    elif isinstance(model, nn.Module):
        theta, phi = list(model.parameters()), []
    else:
        raise DohyoError(f"{name} has no parameters to train; derive it from torch.nn.Module")
    theta, phi = [p for p in theta if p.requires_grad], [p for p in phi if p.requires_grad]
    if any(len({id(p) for p in own}) < len(own) for own in (theta, phi)):
        raise DohyoError(f"{name} lists a parameter twice in decoder_parameters() or encoder_parameters(); list it once")
    if {id(p) for p in theta} & {id(p) for p in phi}:
        raise DohyoError(
            f"{name} lists a parameter in both decoder_parameters() and encoder_parameters(), which follow two losses; "
            "list it in one"
        )
    return theta, phi


@dataclass(frozen=True)
class Mark:
    """A tensor on its way from the proposal to the model."""

    inside: Tensor  # as the proposal made it
    outside: Tensor  # the same numbers, as the model sees them
    factor: Tensor  # (rows,) the gradient that arrives here multiplies the gradient of each row in the backward pass


class _Open(threading.local):
    """The lists that `proposed` adds to, in this thread."""

    def __init__(self) -> None:
        self.lists: list[list[Mark]] = []


_open = _Open()


@contextlib.contextmanager
def marking() -> Iterator[list[Mark]]:
    """Collect what `proposed` marks."""
    marks: list[Mark] = []
    _open.lists.append(marks)
    try:
        yield marks
    finally:
        _open.lists.pop()


def eager() -> bool:
    """Whether what is called is carried out at once, neither compiled nor mapped; only then an autograd.Function may be used."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None


def proposed(tensor: Tensor) -> Tensor:
    """Mark what the proposal made, z or log q(z; x), with one row for each log-weight. The values do not change.

    Call it in `log_weights` on every tensor through which the proposal's parameters act, and use what it returns. In training it
    lets one backward pass give the model and its proposal their own gradients.

    Example:
        >>> import dohyo
        >>> def log_weights(x, log_joint, z, log_q):
        ...     return log_joint(x, dohyo.proposed(z)) - dohyo.proposed(log_q)
    """
    if not _open.lists:
        return tensor
    mark = Mark(tensor, *(_Proposed.apply(tensor) if eager() else _proposed(tensor, 1)))  # type: ignore[no-untyped-call]
    _open.lists[-1].append(mark)
    return mark.outside


# For the compiler and vmap a torch operator: there the backward pass of an autograd.Function is ignored.
@torch.library.custom_op("dohyo::proposed", mutates_args=())
def _proposed(tensor: Tensor, leading: int) -> tuple[Tensor, Tensor]:
    return tensor.clone(), tensor.new_zeros(tensor.shape[:leading])


@_proposed.register_fake
def _shapes(tensor: Tensor, leading: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensor), tensor.new_empty(tensor.shape[:leading])


def _backward(_: object, gradient: Tensor | None, factor: Tensor | None) -> tuple[Tensor | None, None]:
    if gradient is None or factor is None:
        return gradient, None
    return gradient * factor.reshape(*factor.shape, *(1,) * (gradient.ndim - factor.ndim)), None


# No factor is not a factor of zero.
_proposed.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False))


@_proposed.register_vmap
def _mapped(_: object, in_dims: tuple[int | None, ...], tensor: Tensor, leading: int) -> Any:
    return _proposed(tensor.movedim(in_dims[0] or 0, 0), leading + 1), (0, 0)


class _Proposed(torch.autograd.Function):
    """The same, in half the time of an operator written in Python."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return tensor.clone(), tensor.new_zeros(len(tensor))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        return _backward(ctx, *gradients)[0]


class _Steered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, shown: Tensor, ratio: Tensor, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(ratio)
        ctx.count = len(factors)
        return shown.to(loss.dtype).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, None, *ctx.saved_tensors * ctx.count


def steered(loss: Tensor, shown: Tensor, ratio: Tensor, marks: list[Mark]) -> Tensor:
    """The loss sum c_i log w_i, with the value `shown`, and by the ratios c'_i / c_i with phi's own gradient in phi."""
    factors = [mark.factor for mark in marks if mark.factor.requires_grad]
    return _Steered.apply(loss, shown, ratio, *factors)  # type: ignore[no-any-return, no-untyped-call]


def check_marks(model: object, log_w: Tensor, marks: list[Mark], rows: int, data: Tensor) -> None:
    """Raise a DohyoError if phi's gradient cannot be separated from theta's: no marks, or a parameter on both sides of them."""
    name = type(model).__name__
    listed = offers(model, "encoder_parameters")
    phi = [parameter for parameter in model.encoder_parameters() if parameter.requires_grad] if listed else []  # type: ignore[attr-defined]
    if not marks and listed and not phi:
        return  # its proposal has no parameters
    if not marks:
        raise DohyoError(
            f"{name} does not say what its proposal made, so that theta and phi cannot follow two losses in one pass: write "
            f"dohyo.proposed(z) and dohyo.proposed(log_q) in its log_weights or bind, as {LOOP_GUIDE} shows"
        )
    if any(len(mark.factor) != rows for mark in marks):
        raise DohyoError(f"{name} calls dohyo.proposed on tensors without one row for each of the {rows} log-weights")
    ends = {mark.outside.grad_fn for mark in marks}
    inside, outside = _leaves([mark.inside for mark in marks], set()), _leaves([log_w], ends)
    both = [leaf for key, leaf in inside.items() if key in outside and leaf is not data]
    if both:
        raise DohyoError(
            f"{name} uses {_called(model, both[0])} in its proposal and in its model, which follow two losses; give each "
            "its own, or train with encoder 'same', where both follow one (for bounds)"
        )
    unmarked = [parameter for parameter in phi if id(parameter) in outside]
    if unmarked:
        raise DohyoError(
            f"{name} lists {_called(model, unmarked[0])} in encoder_parameters(), but it acts on log w elsewhere than through "
            f"dohyo.proposed(...); mark all that the proposal makes, as {LOOP_GUIDE} shows"
        )


def _called(model: object, parameter: Tensor) -> str:
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return next((f"the parameter {name}" for name, own in named if own is parameter), "one tensor")


def _leaves(tensors: list[Tensor], ends: set[Any]) -> dict[int, Tensor]:
    """The leaves of the graph that these tensors depend on, by id; the search stops at `ends`."""
    leaves = {id(tensor): tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    seen, todo = set(ends), [tensor.grad_fn for tensor in tensors]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        todo += [above for above, _ in node.next_functions]
    return leaves
