"""Models as one program, and the test of whether that is possible."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dohyo.contract import bound, check_marks, marking, through_chains
from dohyo.lab.fast.chains import StackedChains
from dohyo.lab.fast.noise import FromGenerator
from dohyo.lab.fast.stacked import Stacked, Unbatchable
from dohyo.objectives.weighing import bind_options


def stack(models: Sequence[nn.Module], *arguments: Any) -> Stacked:
    """`Stacked` for models of any kind."""
    return (StackedChains if through_chains(models[0]) else Stacked)(models, *arguments)


def check_batchable(
    models: Sequence[nn.Module],
    x: Tensor,
    rows: Tensor,
    encoder: str,
    compiler: Callable[[Any], Any] | None = None,
    varying: bool = False,
) -> None:
    """Raise an `Unbatchable` that says why, if these models cannot be mapped over or traced for a compiler.

    They are tried on real data: each model must give the same log-weights as on its own, whatever its code does with noise.

    Args:
        encoder: What phi follows, which decides what a model needs.
        compiler: The compiler for the trial; None if nothing will be compiled.
        varying: Whether one program must serve every number of log-weights.
    """
    name, copies = type(models[0]).__name__, [copy.deepcopy(model).train() for model in models]
    before = [value.clone() for model in copies for value in model.buffers()]
    generators = [torch.Generator(x.device).manual_seed(seed) for seed, _ in enumerate(models)]
    try:
        alone = []
        for model, generator in zip(copies, generators, strict=True):
            with FromGenerator(generator):
                alone.append(_weights(model, x, rows, encoder))
            generator.manual_seed(len(alone) - 1)
        if not all(bool(log_w.isfinite().all()) for log_w in alone):
            raise Unbatchable(f"{name} gives log-weights that are not finite before it is trained")
        if any(not torch.equal(a, b) for a, b in zip(before, (b for model in copies for b in model.buffers()), strict=True)):
            raise Unbatchable(f"{name} changes its buffers as it runs (as BatchNorm does)")
        for model in copies:
            if [(n, p.shape) for n, p in model.named_parameters()] != [(n, p.shape) for n, p in copies[0].named_parameters()]:
                raise Unbatchable("the replicas' parameters differ in name or shape")
        if len([*copies[0].named_modules(remove_duplicate=False)]) > len([*copies[0].modules()]):
            raise Unbatchable(f"{name} has one module in two places")  # functional_call does not restore it
        if len({p.dtype for p in copies[0].parameters()}) > 1:
            raise Unbatchable(f"{name} has parameters of several types")
        if varying and through_chains(models[0]):
            raise Unbatchable("a random number of chains has no fixed shape")
        stacked = stack(copies, generators, encoder, compiler, varying)
        x, rows = x.repeat(len(copies), *(1,) * (x.ndim - 1)), rows.repeat(len(copies))
        together, others = stacked(x, rows, stacked.noise(x, rows))
        parts = [together, *(other for other in others if other.requires_grad)]
        torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
    except Unbatchable:
        raise
    except Exception as error:
        reason, what = next(iter(str(error).splitlines()), ""), "mapped over replicas" if compiler is None else "captured"
        raise Unbatchable(f"{name} cannot be {what} ({type(error).__name__}: {reason})") from error
    if not torch.allclose(together.detach(), torch.cat(alone), rtol=1e-4, atol=1e-3):
        raise Unbatchable(f"{name} gives other log-weights when it is mapped over replicas")


def _weights(model: Any, x: Tensor, rows: Tensor, encoder: str) -> Tensor:
    """A model's log-weights on its own, checked."""
    options = bind_options(encoder)
    if through_chains(model):
        model.bind_encoder(x, **options)(rows)
        return bound(model, x)(rows).detach()
    with marking() as marks:
        log_w = bound(model, x, **options)(rows)
    if encoder != "same":
        check_marks(model, log_w, marks, len(rows), x)
    return log_w.detach()
