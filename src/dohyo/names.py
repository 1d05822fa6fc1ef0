"""Names that a user typed: of something in this package, or of their own code as `package.module:name`."""

import difflib
import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dohyo.errors import DohyoError, in_one_line

T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for someone who typed `name`.

    Example:
        >>> nearest("guassian", ["bernoulli", "gaussian"])
        "did you mean 'gaussian'? the names are bernoulli, gaussian"
    """
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return (f"did you mean {near[0]!r}? " if near else "") + f"the names are {', '.join(names) or 'none'}"


def named(names: Mapping[str, T], name: str, what: str) -> T:
    """The entry called `name`, or an error that suggests the nearest one."""
    if name in names:
        return names[name]
    raise DohyoError(f"unknown {what} {name!r}: {nearest(name, names)}")


def choices(hint: Any) -> tuple[str, ...]:
    """The values that the `Literal` types within a type hint allow.

    Example:
        >>> choices(Literal["linear", "none"] | None)
        ('linear', 'none')
    """
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for part in get_args(hint) for choice in choices(part))


def check_choices(made: Any) -> None:
    """`check_choice` for the strings in the fields of a dataclass, also for those in tuples."""
    hints = get_type_hints(type(made))
    for field in fields(made):
        kind, value = hints[field.name], getattr(made, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if choices(kind) and isinstance(each, str):
                check_choice(each, kind, field.name)


def users_object(name: str, what: str) -> Any:
    """The object that `package.module:name` refers to, a class or function; the current folder is searched first."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        placeholder = "Class" if what == "class" else what
        raise DohyoError(f"{name!r} is not a {what}; write package.module:{placeholder}, with dots and without .py")
    module = _imported(module_name, name)
    if not hasattr(module, attribute):
        own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name}
        others = [key for key, value in own.items() if callable(value) and (what == "class" or not isinstance(value, type))]
        raise DohyoError(f"{name}: {module.__file__} has no {attribute}: {nearest(attribute, others)}")
    return getattr(module, attribute)


def users_function(name: str) -> Any:
    """The function that `package.module:function` refers to."""
    function = users_object(name, "function")
    if not callable(function):
        raise DohyoError(f"{name} is a {type(function).__name__}; it must be a function")
    return function


def _imported(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise DohyoError(f"{name}: there is no module {error.name!r} in {here} or among the installed packages") from error
        raise DohyoError(f"{name}: its module needs {error.name!r}, which is not installed") from error
    except Exception as error:  # a user's module may raise anything
        raise DohyoError(f"{name}: its module cannot be imported ({in_one_line(error)})") from error
    finally:
        sys.path.remove(here)


def check_choice(value: str, kind: Any, what: str) -> None:
    """A DohyoError that suggests the nearest choice unless `value` is one of the `Literal` type `kind`."""
    named(dict.fromkeys(choices(kind)), value, what)
