"""Random numbers from a run's own generator, made when the code asks for them or in advance."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Kind = Literal["normal", "uniform"]

_LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
_TAKE_GENERATOR = {
    torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.normal, torch.Tensor.normal_, torch.rand, torch.randn,
    torch.randint, torch.randperm, torch.multinomial, torch.Tensor.multinomial, torch.Tensor.uniform_, torch.Tensor.exponential_,
    torch.Tensor.random_, torch.Tensor.cauchy_, torch.Tensor.log_normal_, torch.Tensor.geometric_, torch.poisson, torch.binomial,
    torch._standard_gamma, torch._sample_dirichlet,
}  # fmt: skip


class Piece(NamedTuple):
    """Noise that a model asks for: its kind and its size, the latter without the rows if there is one for each log-weight."""

    kind: Kind
    size: torch.Size
    of_rows: bool = False


class FromGenerator(TorchFunctionMode):
    """Takes random numbers from a generator instead of torch's global one of that device, unless the call names a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LIKE and len(args) == 1:
            options = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            func, args, kwargs = _LIKE[func], (args[0].shape,), options
        if func in _TAKE_GENERATOR and kwargs.get("generator") is None and self._here(args, kwargs):
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)

    def _here(self, args: Any, kwargs: Any) -> bool:
        tensors = [value for value in args if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        return device.type == self.generator.device.type


class Asked(TorchFunctionMode):
    """Records the noise that is asked for, its kind and shape, and returns zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: list[Piece] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if (kind := _kind(func, args, kwargs)) is not None:
            self.noise.append(Piece(kind, found.shape))
            return torch.zeros_like(found)
        return found


class Given(TorchFunctionMode):
    """Returns noise that was made in advance, in the order in which it is asked for."""

    def __init__(self, noise: Sequence[Tensor]) -> None:
        super().__init__()
        self.noise, self.place = noise, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _kind(func, args, kwargs) is None:
            return func(*args, **(kwargs or {}))
        self.place += 1
        noise = self.noise[self.place - 1]
        return noise if func is not torch.normal else args[0] + args[1] * noise


def fill(noise: Tensor, kind: Kind, generator: torch.Generator) -> None:
    """Draw what `Given` will return, as the functions that ask for it would."""
    if kind == "normal":
        noise.normal_(generator=generator)
    else:
        noise.uniform_(generator=generator)


def _kind(func: Any, args: Any, kwargs: Any) -> Kind | None:
    """What noise this call asks for, if in one of the ways of `torch.distributions` or of most handwritten code. vmap refuses
    other randomness."""
    if kwargs or len(args) != (2 if func is torch.normal else 1):
        return None
    if func is torch.Tensor.normal_ or func is torch.randn_like or func is torch.normal:
        return "normal"
    return "uniform" if func is torch.rand_like else None
