"""Models by name: those of this package, and a user's own `package.module:Class`."""

import inspect
from typing import Any

from torch import nn

from dohyo.errors import DohyoError
from dohyo.models.latent import LatentVariableModel
from dohyo.models.two_layer import TwoLayerVAE
from dohyo.models.vae import VAE
from dohyo.names import nearest, users_object

MODELS: dict[str, type[LatentVariableModel]] = {"vae": VAE, "vae2": TwoLayerVAE}


def build(name: str, **arguments: Any) -> nn.Module:
    """The model called `name`, built with these arguments.

    Args:
        name: A key of `MODELS`, or `package.module:Class` for your own class, looked for in the current folder first.
            It must be an `nn.Module` with `log_weights(x, rows)`.
        arguments: For the constructor. Those that your own class does not take are left out, so it need not accept every option.

    Example:
        >>> type(build("vae", data=64, hidden=32, latent=8)).__name__
        'VAE'
        >>> build("vea")
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: unknown model 'vea': did you mean 'vae'? the names are vae, vae2; your own is package.module:Class
    """
    if ":" in name:
        cls = _users_class(name)
        arguments = {key: value for key, value in arguments.items() if _takes(cls, key)}
    elif name in MODELS:
        cls = MODELS[name]
        for key in arguments:
            if not _takes(cls, key):
                raise DohyoError(f"{name} has no argument {key!r}: {nearest(key, inspect.signature(cls).parameters)}")
    else:
        raise DohyoError(f"unknown model {name!r}: {nearest(name, MODELS)}; your own is package.module:Class")
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise DohyoError(f"{name} cannot be built: {error}; give the argument a default in {cls.__name__}") from error
    return cls(**arguments)


def _users_class(name: str) -> type[nn.Module]:
    cls = users_object(name, "class")
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise DohyoError(f"{name} is {_article(cls)}; it must be a class that derives from torch.nn.Module")
    if not callable(getattr(cls, "log_weights", None)):
        raise DohyoError(f"{name} has no method log_weights(x, rows); write one, or derive from dohyo.models.LatentVariableModel")
    if inspect.isabstract(cls):
        raise DohyoError(f"{name} lacks {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))}; write these methods")
    return cls


def _takes(cls: type, key: str) -> bool:
    """Whether the constructor takes the argument `key`; a constructor inherited from `nn.Module` takes none."""
    parameters = inspect.signature(cls).parameters
    if key in parameters:
        return parameters[key].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return anything and cls.__init__ is not nn.Module.__init__  # type: ignore[misc]


def _article(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
