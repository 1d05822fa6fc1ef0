"""Whether a log-density is fit for reverse-KL inference, before an hour is spent on it."""

from collections.abc import Callable

import torch
from torch import Tensor

from dohyo.errors import DohyoError, in_one_line, reporting
from dohyo.lab.targets.target import Target


def check(target: Target, x: Tensor) -> None:
    """Evaluate a target and its gradient once, and say in one line what is wrong with them.

    A log-density of -inf is a density of zero, which is allowed at some of the points but not at all of them. What else the
    target offers, such as samples, is tried as well: better now than after the training.

    Args:
        x: Points such as a model samples at first, (n, dimension).

    Example:
        >>> from dohyo.lab.targets import Custom, Funnel
        >>> check(Funnel(), torch.randn(10, 2))
        >>> check(Custom(lambda x: -x.square(), dimension=2, name="mine"), torch.randn(10, 2))
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: mine gave a float32 tensor (10, 2); it must be a tensor (10,), one log-density for each row of x: ...
    """
    name = target.name
    if x.ndim != 2 or x.shape[1] != target.dimension or len(x) == 0 or not x.is_floating_point():
        raise DohyoError(f"x is {what(x)}; {name} needs floating-point numbers (n, {target.dimension})")
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        with reporting(f"{name} raised {{}} at x {tuple(x.shape)}"):
            log_p = target(x)
        check_shape(name, log_p, x)
        _check_values(name, log_p, x)
        _check_gradient(name, log_p, x)
    x, generator = x.detach(), torch.Generator().manual_seed(0)
    calls: dict[str, Callable[[], object]] = {
        "quantities(x)": lambda: target.quantities(x),
        "sample(n, generator)": lambda: target.sample(2, generator),
        "reference()": target.reference,
    }
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a sampler that ignores the generator leaves no trace
        for method, call in calls.items():
            with reporting(f"{name}: its {method} raised {{}}"):
                call()


def check_shape(name: str, log_p: object, x: Tensor) -> None:
    """An error unless `log_p` is a tensor with one number for each row of x."""
    if not isinstance(log_p, Tensor) or log_p.shape != (len(x),):
        raise DohyoError(
            f"{name} gave {what(log_p)}; it must be a tensor ({len(x)},), one log-density for each row of x: sum over x's last "
            "axis only, as in .sum(-1)"
        )


def what(value: object) -> str:
    """A value's type, for an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _check_values(name: str, log_p: Tensor, x: Tensor) -> None:
    if not log_p.is_floating_point():
        raise DohyoError(f"{name} gave {what(log_p)}; log-densities must be floating-point numbers, with a gradient")
    if log_p.device != x.device:
        raise DohyoError(f"{name} gave a tensor on {log_p.device} for x on {x.device}; make its constants on x.device")
    for bad, word in ((log_p.isnan(), "NaN"), (log_p == torch.inf, "+inf")):
        if bool(bad.any()):
            raise DohyoError(f"{name} is {word} at {_where(bad, x)}; it must be a number, or -inf where the density is zero")
    if bool((log_p == -torch.inf).all()):
        raise DohyoError(f"{name} is -inf at {_where(log_p == -torch.inf, x)}; move or scale it to where a model starts")


def _check_gradient(name: str, log_p: Tensor, x: Tensor) -> None:
    gradient = None
    if log_p.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(log_p.sum(), x, allow_unused=True)
        except RuntimeError as error:
            raise DohyoError(f"{name} cannot be differentiated: {in_one_line(error)}") from error
    if gradient is None:
        raise DohyoError(
            f"{name} has no gradient; compute it from x with torch operations alone: no .detach(), .item(), .numpy(), "
            "integers or torch.no_grad()"
        )
    bad = ~gradient.isfinite().all(1)
    if bool(bad.any()):
        raise DohyoError(
            f"{name} has a gradient that is NaN or infinite at {_where(bad, x)}; both branches of a torch.where must be finite, "
            "and sqrt, log and norm have no gradient at zero"
        )


def _where(bad: Tensor, x: Tensor) -> str:
    point = x[bad][0].tolist()
    shown = ", ".join(f"{value:.4g}" for value in point[:4]) + (", ..." if len(point) > 4 else "")
    return f"{int(bad.sum())} of {len(x)} points, such as x = ({shown})"
