"""Two backward passes share what is the same in them, and nothing that is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from dohyo.lab.training.captured import network
from dohyo.lab.training.replicas import Replicas
from dohyo.lab.training.shared_products import share_products
from dohyo.models import VAE

NOISE = torch.Generator().manual_seed(0)
SIZES = (2, 30), (2, 30), (2, 30, 8), (2, 8, 5), (2, 5, 4)
USUAL = tuple(torch.randn(size, generator=NOISE) for size in SIZES)
EQUAL = *torch.randn(2, 5, 5, generator=NOISE), *torch.randn(3, 5, 5, 5, generator=NOISE)  # sizes tell nothing
CUBES = tuple(torch.randn(5, 5, 5, 5, generator=NOISE))
Function = Callable[..., tuple[Tensor, ...]]


def back(u: Tensor, w: Tensor, v: Tensor) -> Function:
    """Tangents -> what flows back to the first of two layers and through both, as autograd writes it."""
    mask, zero, slope = u > 0, torch.full((), 0.0), w.sum()

    def through(t: Tensor) -> tuple[Tensor, Tensor]:
        left = torch.where(mask, -(t.unsqueeze(2).expand(u.shape) * u / 3 - t[..., None] * u), zero)
        return left, torch.bmm(torch.bmm(left, w) * slope, v)

    return through


def last(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    through = back(u, w, v)
    return through(s)[1], through(t)[1].sum(1)


def everything(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    through = back(u, w, v)
    return *through(s), *through(t)


def weights_too(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """With the gradient of w, for the second only."""
    through = back(u, w, v)
    first, (left, second) = through(s)[1], through(t)
    return first, torch.bmm(u.permute(0, 2, 1), left), second


def one_further(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The second stops before the last layer."""
    middle = [torch.bmm(each[..., None] * u, w) * 2 for each in (s, t)]
    return torch.bmm(middle[0], v), middle[1].sum(1), middle[1].exp()


def straight(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two layers with nothing between them."""
    return tuple(torch.bmm(torch.bmm(each[..., None] * u, w), v) for each in (s, t))


def other_weights(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two products of what is the same but for its tangents, which is then needed once."""
    return torch.bmm(s[..., None] * u, w), torch.bmm(t[..., None] * u, w + 1)


def squared(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.bmm((each * each)[..., None] * u, w) for each in (s, t))


def divided(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.bmm(u / each[..., None], w) for each in (s, t))


def cancelled(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.bmm(each[..., None] * u / (each[..., None] * u), w) for each in (s, t))


def shifted(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.bmm(each[..., None] * u + u, w) for each in (s, t))


def chosen(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """One, not zero, where not chosen."""
    mask, one = u > 0, torch.full((), 1.0)
    return tuple(torch.bmm(torch.where(mask, each[..., None] * u, one), w) for each in (s, t))


def across(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Each row of the product is of several rows."""
    turned = u.permute(0, 2, 1)
    return tuple(torch.bmm(turned, each[..., None] * u) for each in (s, t))


def sideways(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Tangents of columns, of which there are as many as rows."""
    square = torch.bmm(u, u.permute(0, 2, 1))
    return tuple(torch.bmm(square * each[:, None, :], square) for each in (s, t))


def stretched(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Tangents that torch's rules put along the last dimensions."""
    return tuple(torch.bmm(u * each, w) for each in (s, t))


def dense(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Tangents of each number, not of rows."""
    return tuple(torch.bmm(each * u, w) for each in (s, t))


def twice(s: Tensor, t: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The same goes through two layers."""
    more = w + 1
    return tuple(torch.bmm(each[..., None] * u, weights) for weights in (w, more) for each in (s, t))


SHARED = {
    last: (4, 2),
    everything: (4, 2),
    weights_too: (5, 3),
    one_further: (3, 2),
    straight: (4, 2),
    twice: (4, 2),
    other_weights: (2, 2),
}
LEFT_ALONE = (squared, divided, cancelled, shifted, chosen, across, sideways)
CASES = [(function, tensors) for tensors in (USUAL, EQUAL) for function in (*SHARED, *LEFT_ALONE)]


@pytest.mark.parametrize(("function", "tensors"), [*CASES, (stretched, EQUAL), (dense, CUBES)])
def test_sharing(function: Function, tensors: tuple[Tensor, ...]) -> None:
    def named(tangents_1: Tensor, tangents_2: Tensor, u: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return function(tangents_1, tangents_2, u, w, v)

    made = make_fx(named, tracing_mode="fake")(*tensors)
    assert made.graph.find_nodes(op="placeholder")[0].name.startswith("tangents")
    before, text = len(_products(made.graph)), str(made.graph)
    share_products(made.graph)
    made.graph.eliminate_dead_code()
    made.graph.lint()
    made.recompile()
    if function in SHARED:
        assert (before, len(_products(made.graph))) == SHARED[function]
    else:
        assert str(made.graph) == text
    few = torch.arange(tensors[0].numel()).reshape(tensors[0].shape) % 3 == 0
    for scale in (1.0, 0.0, 1e-30):  # of some rows of the one tangents, or of the other, or of all
        for s, t in ((scale * few + ~few, 1.0), (1.0, scale * few + ~few), (scale, 1.0), (1.0, scale)):
            given = tensors[0] * s, tensors[1] * t, *tensors[2:]
            for found, wanted in zip(made(*given), function(*given), strict=True):
                assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    if function is weights_too:  # the tangent of which most is wanted is divided by
        (divided_by,) = {node.args[1] for node in made.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
                         if "tangents" in node.args[0].name}  # fmt: skip
        assert divided_by.args[2].name.startswith("tangents_2")


def test_half_precision_is_left_alone() -> None:
    """It cannot hold what is divided by in place of zero."""
    tensors = [tensor.half() for tensor in USUAL]
    made = make_fx(lambda tangents_1, tangents_2, u, w, v: twice(tangents_1, tangents_2, u, w, v), tracing_mode="fake")(*tensors)
    share_products(made.graph)
    made.graph.eliminate_dead_code()
    assert len(_products(made.graph)) == 4


@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
@pytest.mark.parametrize(("replicas", "varying"), [(1, False), (2, True)])
def test_gradients_of_theta_and_phi(replicas: int, varying: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real model, compiled, against two passes uncompiled; the decoder's three layers are passed once, not twice."""
    counted = []

    def counting(graph: Any) -> None:
        before = len(_products(graph))
        share_products(graph)
        graph.eliminate_dead_code()
        counted.append((before, len(_products(graph))))

    monkeypatch.setattr("dohyo.lab.training.products.share_products", counting)
    torch.manual_seed(0)
    models = [VAE(data=12, hidden=6, latent=4) for _ in range(replicas)]
    team = Replicas(models, [torch.Generator() for _ in models], network, varying)
    x = torch.rand(5 * replicas, 12).round()
    with config.patch(force_disable_caches=True):
        for n in (3, 7) if varying else (3,):
            rows = torch.arange(len(x)).repeat_interleave(n)
            seeds = torch.randn(2, len(rows))

            def fresh() -> None:
                for seed, noise in enumerate(team.noises):
                    noise.manual_seed(seed)

            fresh()
            both = team.bind_apart(x, detach_posterior=True)(rows)
            found = torch.autograd.grad(both, [*team.theta, *team.phi], list(seeds))
            wanted: list[Tensor] = []
            for parameters, seed in ((team.theta, seeds[0]), (team.phi, seeds[1])):
                fresh()
                log_w = team._together(*team._arguments(x, rows, {"detach_posterior": True})).flatten()
                wanted += torch.autograd.grad(log_w, parameters, seed)
            for one, other in zip(found, wanted, strict=True):
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    assert counted == [(6, 6), (13, 11)]


def _products(graph: Any) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default))
