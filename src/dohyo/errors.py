"""This package's own error type, and the ways to raise it that several rooms share."""

from collections.abc import Iterator
from contextlib import contextmanager
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


def check_seed(name: str, value: int | None) -> None:
    """A DohyoError unless `value` is a seed that every generator takes, also when a few millions are added to it."""
    if value is not None and not 0 <= value < 2**31:
        raise DohyoError(f"{name} is {value}; a seed is a whole number from 0 to {2**31 - 1}")


def in_one_line(error: Exception) -> str:
    """The type and the message of another's error, for a message of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def reporting(message: str) -> Iterator[None]:
    """Turn whatever a user's code raises into a DohyoError with this message, in which {} stands for the error."""
    try:
        yield
    except DohyoError:
        raise
    except Exception as error:
        raise DohyoError(message.replace("{}", in_one_line(error))) from error
