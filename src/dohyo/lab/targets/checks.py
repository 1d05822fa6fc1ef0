"""Whether a log-density is fit for reverse-KL inference, before an hour is spent on it."""

from collections.abc import Callable

import torch
from torch import Tensor

from dohyo.errors import DohyoError
from dohyo.lab.targets.target import Target, check_shape, what


def check(target: Target, x: Tensor) -> None:
    """Evaluate a target and its gradient once, and say in one line what is wrong with them.

    Log-densities of -inf are densities of zero, which a target may have at some of the points, not at all of them. What else
    a target offers, such as draws, is tried too: better now than after the training.

    Args:
        x: Points such as a first model draws, (n, dimension).

    Example:
        >>> from dohyo.lab.targets import Custom, Funnel
        >>> check(Funnel(), torch.randn(10, 2))
        >>> check(Custom(lambda x: -x.square(), dimension=2, name="mine"), torch.randn(10, 2))
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: mine gave a float32 tensor (10, 2); it must be (10,), one log-density for each row of x (10, 2): sum ...
    """
    if x.ndim != 2 or x.shape[1] != target.dimension or len(x) == 0 or not x.is_floating_point():
        raise DohyoError(f"x is {what(x)}; {target.name} needs floating-point draws (n, {target.dimension})")
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        try:
            log_p = target(x)
        except Exception as error:  # a user's target may raise anything
            if isinstance(error, ValueError) and str(error).startswith((f"{target.name} raised ", f"{target.name} gave ")):
                raise  # `Custom` has said so
            raise DohyoError(f"{target.name} raised {_line(error)} at x {tuple(x.shape)}") from error
        _check_value(target.name, log_p, x)
        _check_gradient(target.name, log_p, x)
    x, generator = x.detach(), torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a sampler that ignores the generator leaves no trace
        _check_call(target.name, "quantities", lambda: target.quantities(x))
        _check_call(target.name, "sample", lambda: target.sample(2, generator))
        _check_call(target.name, "reference", target.reference)


def _check_call(name: str, method: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # a user's method may raise anything
        if isinstance(error, ValueError) and str(error).startswith(f"{name}: "):
            raise  # `Custom` has said what is wrong
        raise DohyoError(f"{name}: its {method} raised {_line(error)}") from error


def _check_value(name: str, log_p: object, x: Tensor) -> None:
    check_shape(name, log_p, x)
    assert isinstance(log_p, Tensor)
    if not log_p.is_floating_point():
        raise DohyoError(f"{name} gave {what(log_p)}; log-densities must be floating-point numbers, with a gradient")
    if log_p.device != x.device:
        raise DohyoError(f"{name} gave a tensor on {log_p.device} for x on {x.device}; make its constants on x.device")
    for bad, word in ((log_p.isnan(), "NaN"), (log_p == torch.inf, "+inf")):
        if bool(bad.any()):
            raise DohyoError(
                f"{name} is {word} at {_where(bad, x)}; a log-density must be a number, or -inf where the density is zero"
            )
    if bool((log_p == -torch.inf).all()):
        raise DohyoError(
            f"{name} is -inf at all {len(x)} points, such as x = {_point(x[0])}; move or scale it so that the first draws "
            "meet densities above zero"
        )


def _check_gradient(name: str, log_p: Tensor, x: Tensor) -> None:
    gradient = None
    if log_p.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(log_p.sum(), x, allow_unused=True)
        except RuntimeError as error:
            raise DohyoError(f"{name} cannot be differentiated: {_line(error)}") from error
    if gradient is None:
        raise DohyoError(
            f"{name} has no gradient; compute it from x with torch operations alone: no .detach(), .item(), .numpy(), "
            "integers or torch.no_grad()"
        )
    bad = ~gradient.isfinite().all(1)
    if bool(bad.any()):
        raise DohyoError(
            f"{name} has a gradient that is NaN or infinite at {_where(bad, x)}; a torch.where needs both of its branches "
            "finite, and sqrt, log and norm have no gradient at zero"
        )


def _where(bad: Tensor, x: Tensor) -> str:
    return f"{int(bad.sum())} of {len(x)} points, such as x = {_point(x[bad][0])}"


def _point(row: Tensor) -> str:
    shown = ", ".join(f"{value:.4g}" for value in row.tolist()[:4])
    return f"({shown}{', ...' if len(row) > 4 else ''})"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
