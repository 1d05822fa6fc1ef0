"""Names that a person typed: of this package's things, and of their own as `package.module:name`."""

import difflib
import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args

from dohyo.errors import DohyoError

T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say to someone who wrote `name`.

    Example:
        >>> nearest("guassian", ["bernoulli", "gaussian"])
        "did you mean 'gaussian'? the names are bernoulli, gaussian"
    """
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return (f"did you mean {near[0]!r}? " if near else "") + f"the names are {', '.join(names) or 'none'}"


def named(names: Mapping[str, T], name: str, what: str) -> T:
    """The entry called `name`, or a ValueError that suggests the nearest one."""
    if name in names:
        return names[name]
    raise DohyoError(f"unknown {what} {name!r}: {nearest(name, names)}")


def users_object(name: str, what: str) -> Any:
    """What `package.module:name` names, looked for in the current folder first.

    Args:
        what: class or function, for the error message.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        placeholder = "Class" if what == "class" else what
        raise DohyoError(f"{name!r} is no {what}; write package.module:{placeholder}, with dots and without .py")
    module = _imported(module_name, name)
    if not hasattr(module, attribute):
        others = [key for key, value in vars(module).items() if isinstance(value, type) == (what == "class") and callable(value)]
        raise DohyoError(f"{name}: {module.__file__} has no {attribute}: {nearest(attribute, others)}")
    return getattr(module, attribute)


def users_function(name: str) -> Any:
    """The callable that `package.module:function` names."""
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
        raise DohyoError(
            f"{name}: its module cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    finally:
        sys.path.remove(here)


def check_choice(value: str, kind: Any, what: str) -> None:
    """A DohyoError that suggests the nearest choice unless `value` is one of the `Literal` type `kind`."""
    named(dict.fromkeys(get_args(kind)), value, what)
