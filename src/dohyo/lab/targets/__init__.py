"""Targets for reverse-KL variational inference: log-densities up to a constant, and what is known about them.

By name there are this package's, and a user's own `package.module:function`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from dohyo.errors import DohyoError, reporting, whole
from dohyo.lab.targets.posteriors import EightSchools, ORings
from dohyo.lab.targets.synthetic import Autoregressive, Banana, Funnel, Mixture, Ring
from dohyo.lab.targets.target import Custom, Target, check, same_dimension
from dohyo.names import nearest, users_function

__all__ = [
    "TARGETS", "Autoregressive", "Banana", "Custom", "EightSchools", "Funnel", "Mixture", "ORings", "Ring", "Target", "check",
    "target",
]  # fmt: skip

TARGETS: dict[str, Callable[[], Target]] = {
    "funnel": Funnel,
    "banana": Banana,
    "mixture": Mixture,
    "ring": Ring,
    "eight-schools": EightSchools,
    "eight-schools-centred": partial(EightSchools, centred=True),
    "o-rings": ORings,
    "autoregressive": Autoregressive,
}


def target(of: str | Callable[..., Any], dimension: int | None = None) -> Target:
    """The target with this name, or a user's own.

    Args:
        of: A key of `TARGETS`; `package.module:function`, for which the current folder is searched first; a `Target`; or a
            function from x (n, dimension) to log-densities (n,), up to a constant. A class is built without arguments.
        dimension: The dimension of a function that has no attribute `dimension`.

    Example:
        >>> target("funnel")
        Funnel(scale=1.35)
        >>> target(lambda x: -x.abs().sum(-1), dimension=3).dimension
        3
        >>> target("funel")
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: unknown target 'funel': did you mean 'funnel'? the names are ...; your own is package.module:function
    """
    function: Any = of
    name = of if isinstance(of, str) else str(getattr(of, "__name__", type(of).__name__))
    if isinstance(of, str) and ":" in of:
        function = users_function(of)
    elif isinstance(of, str):
        if of not in TARGETS:
            raise DohyoError(f"unknown target {of!r}: {nearest(of, TARGETS)}; your own is package.module:function")
        function = TARGETS[of]()
    if isinstance(function, type):
        with reporting(f"the class {name} cannot be built without arguments ({{}}); name a function, or an object that is built"):
            function = function()
    if not callable(function):
        raise DohyoError(f"{name} is not callable; use one of {', '.join(TARGETS)}, package.module:function or a function")
    if not isinstance(function, Target):
        return Custom(function, dimension, name)
    own = whole(f"{name}: its dimension", getattr(function, "dimension", None))
    same_dimension(name, own if dimension is None else dimension, own)
    return function
