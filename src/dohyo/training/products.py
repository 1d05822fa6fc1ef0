"""The gradients of weight matrices, as a GPU likes them: long sums in parts, and results in the order of the weights."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_aten = torch.ops.aten
_TILE, _BLOCKS, _SHORTEST = 64, 640, 256


class WeightGradients(CustomGraphPass):
    """A pass for Inductor, its option "post_grad_custom_post_pass", over batched products A'B with A and B (batch, rows, ...).

    The library's product gives each block of the result to one unit of the GPU, which sums over all rows by itself. A small
    result has few blocks, so most units would wait: the rows are split, and the parts' sums added. And where (A'B)' is what is
    wanted, as autograd does of a linear layer, B'A is computed, so that nobody must turn it round later.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for product in graph.find_nodes(op="call_function", target=_aten.bmm.default):
            old, new, (left, right), users = product, product, product.args, list(product.users)
            with graph.inserting_before(product):
                if len(users) == 1 and _is_transposed(users[0]):
                    old, left, right = users[0], _transposed(graph, right), _transposed(graph, left)
                    new = _call(graph, "bmm", left, right)
                parts = _parts(_size(left), _size(right))
                if parts > 1 and _is_transposed(left):
                    new = _in_parts(graph, left.args[0], right, parts)
            if new is not old:
                old.replace_all_uses_with(new)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _parts(left: torch.Size, right: torch.Size) -> int:
    """In how many parts to sum over the rows of (batch, m, rows) x (batch, rows, n)."""
    (batch, m, rows), n = left, right[2]
    if not all(isinstance(size, int) for size in (batch, m, n)):
        return 1
    known, length = (rows, rows) if isinstance(rows, int) else (int(rows.node.expr.as_coeff_Mul()[0]), rows.node.hint)
    blocks = batch * -(-m // _TILE) * -(-n // _TILE)
    most = min(_BLOCKS // blocks, length // _SHORTEST)
    return max((parts for parts in range(2, most + 1) if known % parts == 0), default=1)


def _in_parts(graph: fx.Graph, left: fx.Node, right: fx.Node, parts: int) -> fx.Node:
    """The product of left' (batch, rows, m) and right (batch, rows, n)."""
    (batch, _, m), n = _size(left), _size(right)[2]
    left = _call(graph, "permute", _call(graph, "reshape", left, [batch * parts, -1, m]), [0, 2, 1])
    products = _call(graph, "bmm", left, _call(graph, "reshape", right, [batch * parts, -1, n]))
    return graph.call_function(_aten.sum.dim_IntList, (_call(graph, "reshape", products, [batch, parts, m, n]), [1]))


def _is_transposed(node: fx.Node) -> bool:
    return node.target is _aten.permute.default and list(node.args[1]) == [0, 2, 1]  # type: ignore[arg-type]


def _transposed(graph: fx.Graph, node: fx.Node) -> Any:
    if _is_transposed(node):
        return node.args[0]
    new = _call(graph, "permute", node, [0, 2, 1])
    new.meta["val"] = node.meta["val"].permute(0, 2, 1)
    return new


def _call(graph: fx.Graph, name: str, *arguments: Any) -> fx.Node:
    return graph.call_function(getattr(_aten, name).default, arguments)


def _size(node: fx.Node) -> torch.Size:
    value: Tensor = node.meta["val"]
    return value.shape
