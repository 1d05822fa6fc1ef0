"""Matrix products of a compiled network, rewritten to run faster on a GPU.

The gradients of weight matrices are long sums. They are computed in parts, and in the memory layout of the weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_aten = torch.ops.aten
_TILE, _BLOCKS, _SHORTEST = 64, 640, 256


class Products(CustomGraphPass):
    """A pass for Inductor, its option "post_grad_custom_post_pass": A'B of (rows, ...), or of batches.

    The standard product gives each block of the result to one unit of the GPU, which sums over all rows by itself. A small
    result has few blocks, so most units would be idle. So the rows are split, and the sums of the parts are added. If the number
    of rows varies, the first number seen decides how they are split. If (A'B)' is wanted, as autograd does for a linear layer,
    B'A is computed, which saves a transposition later.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for target in (_aten.mm.default, _aten.bmm.default):
            for product in graph.find_nodes(op="call_function", target=target):
                old, new, (left, right), users = product, product, product.args, list(product.users)
                with graph.inserting_before(product):
                    if len(users) == 1 and _is_transposed(users[0]):
                        old, left, right = users[0], _transposed(graph, right), _transposed(graph, left)
                        new = _call(graph, target, _size(old), left, right)
                    parts = _parts(_size(left), _size(right))
                    if parts > 1 and _is_transposed(left) and _free(left.args[0]) and _free(right):
                        new = _in_parts(graph, left.args[0], right, parts)
                if new is not old:
                    old.replace_all_uses_with(new)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _parts(left: torch.Size, right: torch.Size) -> int:
    """The number of parts in which to sum over the rows of (..., m, rows) x (..., rows, n)."""
    (*batch, m, rows), n = left, right[-1]
    if not all(isinstance(size, int) for size in (*batch, m, n)):
        return 1
    known, length = (rows, rows) if isinstance(rows, int) else (int(rows.node.expr.as_coeff_Mul()[0]) or 1, rows.node.hint)
    blocks = (*batch, 1)[0] * -(-m // _TILE) * -(-n // _TILE)
    most = min(_BLOCKS // blocks, length // _SHORTEST)
    return max((parts for parts in range(2, most + 1) if known % parts == 0), default=1)


def _in_parts(graph: fx.Graph, left: fx.Node, right: fx.Node, parts: int) -> fx.Node:
    """The product of left' (..., rows, m) and right (..., rows, n)."""
    (*batch, rows, m), n = _size(left), _size(right)[-1]
    whole, length = (*batch, 1)[0] * parts, rows // parts
    left = _call(graph, _aten.reshape.default, [whole, length, m], left, [whole, -1, m])
    right = _call(graph, _aten.reshape.default, [whole, length, n], right, [whole, -1, n])
    products = _call(graph, _aten.bmm.default, [whole, m, n], _transposed(graph, left), right)
    split = _call(graph, _aten.reshape.default, [*batch, parts, m, n], products, [*batch, parts, m, n])
    return _call(graph, _aten.sum.dim_IntList, [*batch, m, n], split, [len(batch)])


def _is_transposed(node: Any) -> bool:
    return node.target is _aten.permute.default and list(node.args[1]) in ([1, 0], [0, 2, 1])


def _free(node: fx.Node) -> bool:
    """Whether a batch may be reshaped: not if its size varies but its strides do not, as for some tensors of the forward pass."""
    value: Tensor = node.meta["val"]
    return value.ndim == 2 or isinstance(value.shape[1], int) or not isinstance(value.stride(0), int)


def _transposed(graph: fx.Graph, node: fx.Node) -> Any:
    if _is_transposed(node):
        return node.args[0]
    *batch, a, b = _size(node)
    return _call(graph, _aten.permute.default, [*batch, b, a], node, [1, 0] if not batch else [0, 2, 1])


def _call(graph: fx.Graph, target: Any, size: Sequence[int], node: fx.Node, *rest: Any) -> fx.Node:
    """A call whose result has this size. It is not run on an example, which might fix a size that varies."""
    new = graph.call_function(target, (node, *rest))
    new.meta["val"] = node.meta["val"].new_empty(size)
    return new


def _size(node: fx.Node) -> torch.Size:
    value: Tensor = node.meta["val"]
    return value.shape
