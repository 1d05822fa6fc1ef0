"""Estimators of log p(x) from log-weights, and their names.

On the command line an estimator is its class name in kebab case; in JSON or YAML it is a mapping of `name` and its
arguments, with the law as a nested mapping.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from dohyo.errors import DohyoError
from dohyo.estimators.estimator import Estimator, name_of
from dohyo.estimators.fixed import ELBO, IWAE, JVI
from dohyo.estimators.multilevel import MultilevelRR, MultilevelSS
from dohyo.estimators.roulette import SUMO, SymmetricSUMO
from dohyo.laws import Finite, Geometric, HarmonicTail, Law, PowerLaw
from dohyo.names import named

__all__ = ["ELBO", "IWAE", "JVI", "SUMO", "Estimator", "MultilevelRR", "MultilevelSS", "SymmetricSUMO"]

T = TypeVar("T")
ESTIMATORS: dict[str, type[Estimator]] = {
    name_of(cls): cls for cls in (ELBO, IWAE, JVI, SUMO, SymmetricSUMO, MultilevelRR, MultilevelSS)
}
LAWS: dict[str, type[Law]] = {name_of(cls): cls for cls in (HarmonicTail, Geometric, PowerLaw, Finite)}


def to_dict(thing: Estimator | Law) -> dict[str, Any]:
    """A mapping for JSON or YAML, which `from_dict` turns back into an equal estimator.

    Example:
        >>> to_dict(SUMO(2))
        {'name': 'sumo', 'm': 2, 'law': {'name': 'harmonic-tail', 'alpha': 80, 'decay': 0.9}, 'centre': []}
    """
    fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}  # type: ignore[arg-type]
    return {"name": name_of(type(thing))} | {key: _plain(value) for key, value in fields.items()}


def from_dict(mapping: Mapping[str, Any]) -> Estimator:
    """The estimator that `to_dict` described."""
    return _build(mapping, ESTIMATORS, "estimator")


def _plain(value: Any) -> Any:
    if isinstance(value, Law):
        return to_dict(value)
    if value == math.inf:
        return None
    return list(value) if isinstance(value, tuple) else value


def _build(mapping: Mapping[str, Any], names: Mapping[str, type[T]], what: str) -> T:
    if not isinstance(mapping, Mapping) or "name" not in mapping:
        raise DohyoError(f"{what} is {mapping!r}; it must be a mapping with a 'name', as to_dict writes it")
    cls = named(names, mapping["name"], what)
    arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in mapping.items() if key != "name"}
    known = {field.name: None for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in arguments:
        named(known, key, f"argument of {mapping['name']}")
    if "law" in arguments:
        arguments["law"] = _build(arguments["law"], LAWS, "law")
    return cls(**arguments)
