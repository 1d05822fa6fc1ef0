"""This package's own error type, and the two checks that every room needs."""

from numbers import Integral
from typing import Any


class DohyoError(ValueError):
    """Something the caller can put right: the message says what came, what is needed and what to write instead."""


DohyoError.__module__ = "dohyo"


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value` if it is a whole number of at least `least`, else a DohyoError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise DohyoError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return int(value)


def in_one_line(error: Exception) -> str:
    """The type and the message of somebody else's error, for a message of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
