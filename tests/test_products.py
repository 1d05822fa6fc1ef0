"""Gradients of weight matrices: split and turned as the pass says, with the same numbers."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from dohyo.lab.fast import products
from dohyo.lab.fast.captured import network
from dohyo.lab.fast.products import Products

parts = products._parts

A, B = torch.randn(2, 1200, 8), torch.randn(2, 1200, 70)


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.permute(0, 2, 1), b)


def turned(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b).permute(0, 2, 1)


def elsewhere(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The product itself is wanted too."""
    found = product(a, b)
    return found + 1, found.permute(0, 2, 1)


@pytest.mark.parametrize(
    ("function", "rows", "wanted"),
    [(product, 1200, {"bmm": 1, "sum": 1, "permute": 1}), (turned, 1200, {"bmm": 1, "sum": 1, "permute": 1}),
     (turned, 300, {"bmm": 1, "sum": 0, "permute": 1}), (product, 300, {"bmm": 1, "sum": 0, "permute": 1}),
     (elsewhere, 1200, {"bmm": 1, "sum": 1, "permute": 2})],
)  # fmt: skip
def test_the_pass(function: object, rows: int, wanted: dict[str, int]) -> None:
    a, b = A[:, :rows], B[:, :rows]
    made = make_fx(function, tracing_mode="fake")(a, b)
    expected = made(a, b)
    Products()(made.graph)
    made.recompile()
    names = [str(node.target).split(".")[1] for node in made.graph.nodes if node.op == "call_function"]
    assert {name: names.count(name) for name in wanted} == wanted
    found = made(a, b)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    if function is turned:
        assert found.is_contiguous()
        assert not expected.is_contiguous()


def again(a: Tensor, b: Tensor) -> Tensor:
    """A product of a turned product."""
    return torch.bmm(turned(a, b), a.permute(0, 2, 1))


def flat(a: Tensor, b: Tensor) -> Tensor:
    """Without a batch."""
    return torch.mm(a[0].permute(1, 0), b[0]).permute(1, 0)


@pytest.mark.parametrize("function", [again, flat])
def test_other_products(function: object) -> None:
    made = make_fx(function, tracing_mode="fake")(A, B)
    expected = made(A, B)
    Products()(made.graph)
    made.graph.lint()
    made.recompile()
    assert any("sum" in str(node.target) for node in made.graph.nodes)
    assert torch.allclose(made(A, B), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's, of its own code
@pytest.mark.parametrize("batch", [1, 2])  # one is a plain product, as `flat` is
def test_compiled_with_a_number_of_rows_that_varies(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for every n, in which the sum over 100 n rows is split."""
    split = []
    monkeypatch.setattr(products, "_parts", lambda *sizes: split.append(parts(*sizes)) or split[-1])

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x.flatten(1, 2), w).square().sum()

    counters.clear()
    run = network(loss)
    with config.patch(force_disable_caches=True):
        for n in (11, 13, 40):
            x, w = torch.randn(batch, 100, n, 8), torch.randn(batch, 8, 70, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 2)
            (found,) = torch.autograd.grad(run(x, w), w)
            (expected,) = torch.autograd.grad(loss(x, w), w)
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-2)
    assert counters["stats"]["unique_graphs"] == 1
    assert max(split) == 4


@pytest.mark.parametrize(
    ("rows", "n", "parts"), [(1200, 70, 4), (1203, 70, 3), (1201, 70, 1), (1200, 64 * 160, 2), (1200, 64 * 400, 1)]
)
def test_how_many_parts(rows: int, n: int, parts: int) -> None:
    """As many as there are units for, of 256 rows at least, and all of one length."""
    assert products._parts(torch.Size([2, 8, rows]), torch.Size([2, rows, n])) == parts


def test_other_permutations_are_left_alone() -> None:
    def otherwise(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a.reshape(8, 2, -1).permute(1, 0, 2), b).permute(1, 0, 2)

    made = make_fx(otherwise, tracing_mode="fake")(A, B)
    Products()(made.graph)
    made.recompile()
    assert torch.equal(made(A, B), otherwise(A, B))
    assert "sum" not in made.code
