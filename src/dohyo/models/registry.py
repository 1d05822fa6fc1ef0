"""Models by name: those of this package, and a user's own `package.module:Class`."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from torch import nn

from dohyo.models.latent import LatentVariableModel
from dohyo.models.names import nearest
from dohyo.models.two_layer import TwoLayerVAE
from dohyo.models.vae import VAE

MODELS: dict[str, type[LatentVariableModel]] = {"vae": VAE, "vae2": TwoLayerVAE}


def build(name: str, **arguments: Any) -> nn.Module:
    """The model called `name`, built with these arguments.

    Args:
        name: A key of `MODELS`, or `package.module:Class` for a class of your own, looked for in the current folder
            first. It must be an `nn.Module` with `log_weights(x, rows)`.
        arguments: For the constructor. Those that a class of your own does not take are left out, so that it need not
            know of every option.

    Example:
        >>> type(build("vae", data=64, hidden=32, latent=8)).__name__
        'VAE'
        >>> build("vea")
        Traceback (most recent call last):
            ...
        ValueError: unknown model 'vea': did you mean 'vae'? the names are vae, vae2; your own is package.module:Class
    """
    if ":" in name:
        cls = _users_class(name)
        arguments = {key: value for key, value in arguments.items() if _takes(cls, key)}
    elif name in MODELS:
        cls = MODELS[name]
        for key in arguments:
            if not _takes(cls, key):
                raise ValueError(f"{name} has no argument {key!r}: {nearest(key, inspect.signature(cls).parameters)}")
    else:
        raise ValueError(f"unknown model {name!r}: {nearest(name, MODELS)}; your own is package.module:Class")
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{name} cannot be built: {error}; give the argument a default in {cls.__name__}") from error
    return cls(**arguments)


def _users_class(name: str) -> type[nn.Module]:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ValueError(f"{name!r} is no class; write package.module:Class, with dots and without .py")
    module = _imported(module_name, name)
    classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    cls = getattr(module, attribute, None)
    if cls is None:
        raise ValueError(f"{name}: {module.__file__} has no {attribute}: {nearest(attribute, classes)}")
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"{name} is {_article(cls)}; it must be a class that derives from torch.nn.Module")
    if not callable(getattr(cls, "log_weights", None)):
        raise ValueError(f"{name} has no method log_weights(x, rows); write one, or derive from dohyo.models.LatentVariableModel")
    if inspect.isabstract(cls):
        raise ValueError(f"{name} lacks {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))}; write these methods")
    return cls


def _imported(module_name: str, name: str) -> Any:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{name}: there is no module {error.name!r} in {here} or among the installed packages") from error
        raise ValueError(f"{name}: its module needs {error.name!r}, which is not installed") from error
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"{name}: its module cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    finally:
        sys.path.remove(here)


def _takes(cls: type, key: str) -> bool:
    """Whether the constructor takes the argument `key`; one that is inherited from `nn.Module` takes none."""
    parameters = inspect.signature(cls).parameters
    if key in parameters:
        return parameters[key].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return anything and cls.__init__ is not nn.Module.__init__  # type: ignore[misc]


def _article(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
