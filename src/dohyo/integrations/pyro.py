r"""Models and guides of Pyro: log p(x) of each datum with an error bar, and training on it.

.. math:: \log w_i = \log p_\theta(x_i, z_i) - \log q_\phi(z_i; x_i), \qquad z_i \sim q_\phi(\cdot\,; x_i)

for each datum i of a plate. Pyro multiplies what lies in a subsampling plate by N / B. Here that factor stays outside the
logarithm of the mean, where `RenyiELBO` has it inside, which is then no bound and no estimate of anything.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from dohyo.errors import DohyoError
from dohyo.integrations import pyro_posterior
from dohyo.integrations import pyro_traces as traced
from dohyo.integrations.pyro_objective import LogMarginal as LogMarginal
from dohyo.integrations.pyro_posterior import Latent
from dohyo.integrations.pyro_traces import Messenger, Pointed, pyro


def from_pyro(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...] = (),
    plate: str | None = None,
    *,
    vectorize_particles: bool = True,
) -> "PyroModel":
    """A model of dohyo from a model and a guide of Pyro.

    Three kinds of data, told apart by `args` and `plate`:

    - no `args`: both are called with the data themselves, x[rows], and their plate is as long as what they are given;
    - `args` and `plate`: both are called with `args`, and x holds the indices of the plate's data, `torch.arange(len(data))`;
      the plate must index its data by what it returns, or by `pyro.subsample`, as for subsampling;
    - `args` and no `plate`: all data are one datum, x is `torch.arange(1)`, and log p is the log evidence, global latents
      included.

    Discrete sites may be sampled by the guide, or be absent from it and enumerated in the model.

    Args:
        plate: The data's plate. Without `args` it need only be named where every site lies in several plates.
        vectorize_particles: For the log evidence: draw all rows at once, in an outermost plate. A model whose operations
            cannot take one more dimension on the left needs False, and is then run once for each row.

    Example:
        >>> import dohyo, torch, pyro
        >>> from pyro.distributions import Normal
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", Normal(0.0, 1.0))
        ...         pyro.sample("x", Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", Normal(x / 2, 0.9))
        >>> x = torch.linspace(-2, 2, 100)
        >>> found = dohyo.evaluate(from_pyro(model, guide), x, dohyo.MultilevelRR.at_cost(15), replicates=4)
        >>> exact = Normal(0.0, 2**0.5).log_prob(x).mean()
        >>> abs(found.mean - float(exact)) < 4 * found.noise_stderr
        True
    """
    for what, fn in (("model", model), ("guide", guide)):
        if not callable(fn) or isinstance(fn, Messenger):
            raise DohyoError(
                f"the {what} is a {type(fn).__name__}; it must be a function or module with Pyro's sample statements"
            )
    return PyroModel(model, guide, args, plate, vectorize_particles)


class _Shape(NamedTuple):
    """What is known of the plates: how many dimensions, the data's, the most rows it takes, and whether it takes no fewer."""

    depth: int
    plate: str | None
    most: float
    fixed: bool
    frame: Any


class PyroModel(nn.Module):
    """See `from_pyro`. The modules of model and guide are its own, so that evaluation switches off their dropout."""

    def __init__(
        self, model: Callable[..., Any], guide: Callable[..., Any], args: tuple[Any, ...], plate: str | None, vectorize: bool
    ) -> None:
        super().__init__()
        self.functions, self.args, self.plate, self.vectorize = (model, guide), args, plate, vectorize
        self.parts = nn.ModuleList(dict.fromkeys(module for fn in self.functions for module in modules_of(fn)))
        self._shape: _Shape | None = None
        self._latents: list[Latent] | None = None

    def log_weights(self, x: Tensor, rows: Tensor) -> Tensor:
        """One log-weight for each row: z ~ q(.; x[row]), log p(x, z) - log q(z; x)."""
        shape = self._measured_once(x)
        if self.args and shape.plate is None:
            return self._evidence(x, len(rows), shape)
        return torch.cat([self._of_rows(part, shape) for part in x[rows].split(int(min(shape.most, max(1, len(rows)))))])

    def posterior(self, x: Tensor) -> Distribution:
        """q(z; x) of all latents of the data x, one row each: with `log_joint` what `dohyo.Annealed` needs."""
        if self.args:
            raise DohyoError("chains need a model that is called with the data; write it so, and give from_pyro no args")
        if self._latents is None:
            with traced.unseen():
                self.log_weights(x[:1], torch.zeros(1, dtype=torch.long, device=x.device))  # its checks
        with self._explained():
            found, self._latents = pyro_posterior.posterior(self.functions[1], x, str(self._measured_once(x).plate))
        return found

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """log p(x, z) for z as `posterior` draws it, one number for each row."""
        if self._latents is None:
            self.posterior(x)
        shape = self._measured_once(x)
        trace, log_jacobian = pyro_posterior.replayed(self._latents or [], z)
        with self._explained():
            found = traced.replay(self.functions[0], trace, (x,), {}, -1 - shape.depth)
            return pyro_posterior.log_density(found, str(shape.plate)) + log_jacobian

    def _of_rows(self, rows: Tensor, shape: _Shape) -> Tensor:
        """The log-weights of data (or of indices of data), as many as the plate can take."""
        padding = int(shape.most) - len(rows) if shape.fixed else 0
        given = torch.cat([rows, rows[-1:].expand(padding, *rows.shape[1:])]) if padding else rows
        pointed = Pointed({shape.plate: given} if self.args and shape.plate else {})
        with self._explained(), pointed, self._free_plates(shape):
            traces = traced.run(*self.functions, self.args or (given,), {}, -1 - shape.depth)
            traced.check(traces, shape.plate)
            frame = traced.frames_of(traces)[str(shape.plate)]
            if frame.size != len(given):
                raise DohyoError(
                    f"plate {shape.plate!r} holds {frame.size} data where {len(given)} were given; its size must follow x: "
                    f"pyro.plate({shape.plate!r}, len(x)), or give the data as args and name the plate"
                )
            return (traced.log_density(traces.model, [frame]) - traced.log_density(traces.guide, [frame]))[: len(rows)]

    def _evidence(self, x: Tensor, count: int, shape: _Shape) -> Tensor:
        """`count` log-weights of all data together."""
        if len(x) != 1:
            raise DohyoError(
                f"x has {len(x)} rows, and no plate is named, so that all data are one: give x = torch.arange(1), or for log p "
                "of each datum the plate's name and x = torch.arange(number of data)"
            )
        found = []
        for _ in range(1 if self.vectorize else count):
            model, guide = (traced.in_particles(fn, count, shape.depth) if self.vectorize else fn for fn in self.functions)
            with self._explained():
                traces = traced.run(model, guide, self.args, {}, -2 - shape.depth)
                traced.check(traces, None)
                kept = [traced.frames_of(traces)[traced.PARTICLES]] if self.vectorize else []
                found.append(traced.log_density(traces.model, kept) - traced.log_density(traces.guide, kept))
        return found[0] if self.vectorize else torch.stack(found)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What Pyro and torch say of shapes, with what to do."""
        try:
            yield
        except DohyoError as error:
            raise DohyoError(str(error).splitlines()[0]) from None  # Pyro adds the shapes of the trace
        except (ValueError, RuntimeError) as error:
            said = " ".join(str(error).split("Trace Shapes")[0].split())
            advice = (
                f"all that is in plate {self.plate!r} must be indexed by what the plate returns, or by pyro.subsample"
                if self.args and self.plate
                else "a plate's size must follow x, and operations take one more dimension on the left (or give "
                "vectorize_particles=False)"
            )
            raise DohyoError(f"the model or guide of Pyro failed ({said}); {advice}") from error

    def _measured_once(self, x: Tensor) -> _Shape:
        self._shape = self._shape or self._measured(x)
        return self._shape

    def _measured(self, x: Tensor) -> _Shape:
        """From one run that leaves no trace in torch's generator."""
        pointed = Pointed({})
        with self._explained(), traced.unseen(), pointed:
            # An automatic guide has the size of its plate from its first run, which may not be the model's.
            alone = traced.auto_guide(self.functions[1]) is not None
            traces = traced.run(*self.functions, self.args or (x[:1],), {}, None, alone)
        depth, frames = traced.plate_depth(traces), traced.frames_of(traces)
        if not self.args:
            plate = traced.common_plate(traces, self.plate) or next(iter(frames), None)
            if plate is None:
                raise DohyoError("no site lies in a plate; put model and guide into pyro.plate('data', len(x))")
            frame = frames[plate]
            return _Shape(depth, plate, math.inf if frame.full_size in (None, 1) else frame.full_size, False, frame)
        if self.plate is None:
            return _Shape(depth, None, math.inf, False, None)
        plate = str(traced.common_plate(traces, self.plate))
        if plate not in pointed.plates:
            raise DohyoError(
                f"plate {plate!r} is made outside of the model and the guide; make it inside, so that it can be pointed"
            )
        size = pointed.plates[plate][0][0]
        if x.is_floating_point() or x.ndim != 1 or not bool(((x >= 0) & (x < size)).all()):
            raise DohyoError(
                f"x is {x.dtype} {tuple(x.shape)}; with args and a plate it holds indices of the plate's {size} data: "
                f"torch.arange({size})"
            )
        # The last entry is the model's: an automatic guide's own size is freed below.
        fixed = pointed.plates[plate][-1 if traced.auto_guide(self.functions[1]) else 0][1]
        if fixed is not None and fixed >= size > 1:
            raise DohyoError(f"plate {plate!r} has subsample_size={fixed}, all of its data; leave subsample_size out")
        # With all N rows in the plate, Pyro would take parameters as they are and not index them.
        return _Shape(depth, plate, fixed or max(1, size - 1), fixed is not None, frames[plate])

    @contextmanager
    def _free_plates(self, shape: _Shape) -> Iterator[None]:
        """An automatic guide makes its plate as large as it was at first; here it takes any number of rows."""
        guide = traced.auto_guide(self.functions[1])
        if guide is None or not self.args or guide.create_plates is not None:
            yield
            return
        guide.create_plates = lambda *_, **__: pyro.plate(shape.plate, shape.frame.full_size, dim=shape.frame.dim)
        try:
            yield
        finally:
            guide.create_plates = None


def modules_of(fn: Any, seen: set[int] | None = None) -> list[nn.Module]:
    """The modules that a function of Pyro uses: itself, what it is a method of, and what it has around it."""
    seen = set() if seen is None else seen
    if id(fn) in seen:
        return []
    seen.add(id(fn))
    if isinstance(fn, nn.Module):
        return [fn]
    inner: list[Any] = []
    if isinstance(fn, functools.partial):
        inner = [fn.func, *fn.args, *fn.keywords.values()]
    elif isinstance(fn, MethodType):
        inner = [fn.__self__, fn.__func__]
    elif isinstance(fn, FunctionType):
        around = inspect.getclosurevars(fn)
        inner = [
            part
            for part in (*around.nonlocals.values(), *around.globals.values())
            if not isinstance(part, FunctionType) or part.__module__ == fn.__module__
        ]
    return [module for part in inner for module in modules_of(part, seen)]
