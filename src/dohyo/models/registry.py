"""Models by name: those of this package, and a user's own `package.module:name`."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from dohyo.contract import offers
from dohyo.errors import DohyoError
from dohyo.models.latent import LatentVariableModel
from dohyo.models.vae import VAE, TwoLayerVAE
from dohyo.names import nearest, users_object

MODELS: dict[str, type[LatentVariableModel]] = {"vae": VAE, "vae2": TwoLayerVAE}


def build(name: str, **arguments: Any) -> nn.Module:
    """The model called `name`, built with these arguments.

    Args:
        name: A key of `MODELS`, or `package.module:name`, your own class or a function of yours that returns a model, looked for
            in the current folder first. The model must be an `nn.Module` with `log_weights(x, rows)`.
        arguments: For the class or function. Those that your own does not take are left out, so it need not accept every option.

    Example:
        >>> type(build("vae", data=64, hidden=32, latent=8)).__name__
        'VAE'
        >>> build("vea")
        Traceback (most recent call last):
            ...
        dohyo.DohyoError: unknown model 'vea': did you mean 'vae'? the names are vae, vae2; your own is package.module:Class
    """
    maker = _maker(name)
    if ":" in name:
        arguments = {key: value for key, value in arguments.items() if _takes(maker, key)}
    for key in arguments:
        if not _takes(maker, key):
            raise DohyoError(f"{name} has no argument {key!r}: {nearest(key, inspect.signature(maker).parameters)}")
    try:
        inspect.signature(maker).bind(**arguments)
    except TypeError as error:
        raise DohyoError(f"{name} cannot be built: {error}; give the argument a default in {name.split(':')[-1]}") from error
    model = maker(**arguments)
    if not (isinstance(model, nn.Module) and (offers(model, "log_weights") or offers(model, "bind"))):
        raise DohyoError(f"{name} returned {_article(model)}; it must be a torch.nn.Module with log_weights(x, rows)")
    return model


def takes(name: str, argument: str, by_name: bool = False) -> bool:
    """Whether the model called `name` is built with this argument; `by_name`: its signature says so, not just **options."""
    maker = _maker(name)
    return _takes(maker, argument) and (not by_name or argument in inspect.signature(maker).parameters)


def _maker(name: str) -> Callable[..., nn.Module]:
    if ":" not in name:
        if name not in MODELS:
            raise DohyoError(f"unknown model {name!r}: {nearest(name, MODELS)}; your own is package.module:Class")
        return MODELS[name]
    maker = users_object(name, "class")
    if not callable(maker) or isinstance(maker, nn.Module):
        raise DohyoError(f"{name} is {_article(maker)}; it must be a class that derives from torch.nn.Module, or a function")
    if isinstance(maker, type):
        _check_class(name, maker)
    return maker  # type: ignore[no-any-return]


def _check_class(name: str, cls: type) -> None:
    if not issubclass(cls, nn.Module):
        raise DohyoError(f"{name} is {_article(cls)}; it must be a class that derives from torch.nn.Module, or a function")
    if not (offers(cls, "log_weights") or offers(cls, "bind")):
        raise DohyoError(f"{name} has no method log_weights(x, rows); write one, or derive from dohyo.models.LatentVariableModel")
    if inspect.isabstract(cls):
        raise DohyoError(f"{name} lacks {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))}; write these methods")


def _takes(maker: Callable[..., Any], key: str) -> bool:
    """Whether a class or function takes the argument `key`; a constructor inherited from `nn.Module` takes none."""
    parameters = inspect.signature(maker).parameters
    if key in parameters:
        return parameters[key].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return anything and getattr(maker, "__init__", None) is not nn.Module.__init__


def _article(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
