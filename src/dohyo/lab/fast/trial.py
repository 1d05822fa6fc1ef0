"""Models as one program, and the test of whether that is possible."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dohyo.contract import bound, offers, through_chains
from dohyo.lab.fast.captured import Layout, Shape, layouts
from dohyo.lab.fast.chains import StackedChains
from dohyo.lab.fast.noise import FromGenerator
from dohyo.lab.fast.sampled import StackedSamplers
from dohyo.lab.fast.stacked import Stacked, Unbatchable, Weights
from dohyo.objectives import Reinforce, ReverseKL
from dohyo.objectives.weighing import bind_options, draw_weights


def stack(models: Sequence[nn.Module], *arguments: Any, **options: Any) -> Stacked:
    """`Stacked` for models of any kind."""
    return (StackedChains if through_chains(models[0]) else Stacked)(models, *arguments, **options)


def check_batchable(
    models: Sequence[nn.Module],
    x: Tensor,
    rows: Tensor,
    encoder: str,
    compiler: Callable[[Any], Any] | None = None,
    varying: bool = False,
    padded: bool = False,
) -> None:
    """Raise an `Unbatchable` that says why, if these models cannot be mapped over or traced for a compiler.

    They are tried on real data: each model must give the same log-weights as on its own, whatever its code does with noise. The
    last arguments are those of `Stacked`; if `padded`, the rows are some multiple of `LINE`.
    """

    def together(copies: list[nn.Module], generators: list[torch.Generator]) -> Weights:
        if padded and through_chains(copies[0]):
            raise Unbatchable("each datum has its own number of chains, for which there is no program")
        stacked = stack(copies, generators, encoder, compiler, varying, padded)
        every = x.repeat(len(copies), *(1,) * (x.ndim - 1))
        log_w, others = stacked(every, rows, stacked.noise(every, rows))
        return log_w.view(len(copies), -1), others

    _check(models, compiler, lambda model: _weights(model, x, rows, encoder), together)


def check_samplers(models: Sequence[nn.Module], task: Any, objective: Any, batch: int, compiler: Any) -> None:
    """`check_batchable` for models that are trained on their own samples."""
    name, estimator = type(models[0]).__name__, getattr(objective, "estimator", None)
    if not isinstance(objective, ReverseKL | Reinforce) or estimator is None or not offers(models[0], "sample_joint"):
        raise Unbatchable(f"{name} is not trained on estimates of log p(x) at its own samples")
    if isinstance(objective, Reinforce) and getattr(task, "values", None) is None:
        raise Unbatchable("the reward is a function of your own, which may need the host")
    device, varying = next(models[0].parameters()).device, estimator.depth_law.cap > 0
    counts = torch.arange(2 * batch) % 2 + 1 if varying else torch.ones(2 * batch, dtype=torch.long)
    shape = Shape.of(2 * batch, int(counts.sum()), 2, varying=True)
    layout = Layout.read(layouts(counts[None], shape, batch)[0].to(device), shape)
    totals = counts.view(2, -1).sum(1).tolist()

    @torch.no_grad()
    def alone(model: Any) -> Tensor:
        source = bound(model, model.sample_joint(batch)[1])
        return torch.cat([source(part) for part in layout.rows[: sum(totals)].split(totals)])

    def together(copies: list[nn.Module], generators: list[torch.Generator]) -> Weights:
        stacked = StackedSamplers(copies, generators, str(objective.encoder), compiler, varying, objective=objective, batch=batch)
        noise = [torch.zeros_like(part, device=device) for part in stacked.like(stacked.wanted, shape.rows)]
        stacked.fill(noise, stacked.wanted, totals)
        log_w, *others = stacked(layout.rows, noise)
        return log_w[:, : sum(totals)], others

    _check(models, compiler, alone, together)


def _check(models: Sequence[nn.Module], compiler: Any, weights: Callable[[Any], Tensor], stacked: Callable[..., Weights]) -> None:
    """Raise an `Unbatchable` unless copies of the models, stacked, have the log-weights (models, ...) of each on its own."""
    name, copies = type(models[0]).__name__, [copy.deepcopy(model).train() for model in models]
    before = [value.clone() for model in copies for value in model.buffers()]
    device = next(models[0].parameters()).device
    generators = [torch.Generator(device).manual_seed(seed) for seed, _ in enumerate(models)]
    with _reported(name, compiler):
        alone = []
        for model, generator in zip(copies, generators, strict=True):
            with FromGenerator(generator):
                alone.append(weights(model))
            generator.manual_seed(len(alone) - 1)
        if not all(bool(log_w.isfinite().all()) for log_w in alone):
            raise Unbatchable(f"{name} gives log-weights that are not finite before it is trained")
        if any(not torch.equal(a, b) for a, b in zip(before, (b for model in copies for b in model.buffers()), strict=True)):
            raise Unbatchable(f"{name} changes its buffers as it runs (as BatchNorm does)")
        _check_alike(copies)
        together, others = stacked(copies, generators)
        parts = [together, *(other for other in others if other.requires_grad)]
        torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
    if not torch.allclose(together.detach(), torch.stack(alone), rtol=1e-4, atol=1e-3):
        raise Unbatchable(f"{name} gives other log-weights when it is mapped over replicas")


@contextlib.contextmanager
def _reported(name: str, compiler: Any) -> Iterator[None]:
    """Whatever is raised inside, as an `Unbatchable`."""
    try:
        yield
    except Unbatchable:
        raise
    except Exception as error:
        reason, what = next(iter(str(error).splitlines()), ""), "mapped over replicas" if compiler is None else "captured"
        raise Unbatchable(f"{name} cannot be {what} ({type(error).__name__}: {reason})") from error


def _check_alike(models: Sequence[nn.Module]) -> None:
    name = type(models[0]).__name__
    for model in models:
        if [(n, p.shape) for n, p in model.named_parameters()] != [(n, p.shape) for n, p in models[0].named_parameters()]:
            raise Unbatchable("the replicas' parameters differ in name or shape")
    if len([*models[0].named_modules(remove_duplicate=False)]) > len([*models[0].modules()]):
        raise Unbatchable(f"{name} has one module in two places")  # functional_call does not restore it
    if len({p.dtype for p in models[0].parameters()}) > 1:
        raise Unbatchable(f"{name} has parameters of several types")


def _weights(model: Any, x: Tensor, rows: Tensor, encoder: str) -> Tensor:
    """A model's log-weights on its own, checked."""
    if through_chains(model):
        model.bind_encoder(x, **bind_options(encoder))(rows)
        return bound(model, x)(rows).detach()
    return draw_weights(model, x, encoder, rows)[0].detach()
