"""Backward passes that differ in the coefficients of their rows share their products.

Theta's loss and phi's are sums of the same log-weights with other coefficients. As each log-weight has rows of its own in the
network, what flows back to a layer that both losses pass is the same but for a factor of each row: s_i u_i and t_i u_i. So the
one is multiplied by the layer's weights, and the other's product is that product times t_i / s_i. An s_i of zero is taken for a
number too small to matter, by which one can divide all the same.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.symbolic_shapes import statically_known_true

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.bmm.default)
_LEAST = 1e-20  # lost in any sum of coefficients, while what flows back is below 1e10; single precision holds its products


def share_products(graph: fx.Graph) -> None:
    """Changes the graph of a backward pass, whose tangents are placeholders of that name. Numbers change by rounding only."""
    _Sharing(graph).run()


class _Scaled(NamedTuple):
    """Of a node that is a tangent, along the node's first dimensions, times what does not depend on it and has this key."""

    tangent: fx.Node
    key: int


class _Sharing:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.keys: dict[str, int] = {}
        self.scaled: dict[Any, _Scaled] = {}
        self.nodes: dict[_Scaled, fx.Node] = {}

    def run(self) -> None:
        products = []
        for node in self.graph.nodes:
            if (tangent := self._tangent(node)) is not None:
                self.scaled[node] = scaled = _Scaled(tangent, self._key(node))
                self.nodes.setdefault(scaled, node)
                if node.target in _PRODUCTS:
                    products.append(node)
        base = self._base(products)
        if base is not None:
            with self.graph.inserting_before(next(node for node in self.graph.nodes if node.op != "placeholder")):
                self.divisor = self._divisor(base)
            for product in products:
                self._replace(product, base)
            stable_topological_sort(self.graph)

    def _base(self, products: list[fx.Node]) -> fx.Node | None:
        """The tangent whose products serve the others', if any can: that of which most is wanted for its own sake."""
        wanted: dict[fx.Node, int] = {}
        tangents = {scaled.tangent for scaled in self.nodes}
        for product in products:
            left: Any = product.args[0]
            tangent, key = self.scaled[left]
            if any(_Scaled(other, key) in self.nodes for other in tangents - {tangent}):
                wanted[tangent] = wanted.get(tangent, 0) + len(left.users)
        return max(wanted, key=lambda tangent: wanted[tangent], default=None)

    def _tangent(self, node: fx.Node) -> fx.Node | None:
        """The tangent that a node is a multiple of, if it is known to be."""
        value, target, args = node.meta.get("val"), node.target, node.args
        if node.op == "placeholder":
            wide = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
            return node if wide and node.name.startswith("tangents") else None
        within = [arg for arg in node.all_input_nodes if arg in self.scaled]
        found = {self.scaled[arg].tangent for arg in within}
        if len(found) != 1 or not isinstance(value, Tensor):
            return None
        (tangent,) = found
        axes = tangent.meta["val"].shape
        if len(axes) > value.ndim or not all(statically_known_true(a == b) for a, b in zip(axes, value.shape, strict=False)):
            return None
        if target is _aten.unsqueeze.default:
            return tangent
        if any(arg.meta["val"].ndim != value.ndim for arg in within):
            return None
        own = [isinstance(arg, fx.Node) and arg in self.scaled for arg in args]
        if target in _PRODUCTS:
            linear = own == [True, False] and len(axes) < value.ndim
        elif target is _aten.mul.Tensor:
            linear = sum(own) == 1
        elif target in (_aten.add.Tensor, _aten.sub.Tensor):
            linear = all(own)
        elif target is _aten.where.self:
            linear = not own[0] and all(scaled or _is_zero(arg) for scaled, arg in zip(own[1:], args[1:], strict=True))
        else:
            one = (_aten.neg.default, _aten.expand.default, _aten.mul.Scalar, _aten.div.Tensor)
            linear = target in one and own[0] and not any(own[1:])
        return tangent if linear else None

    def _key(self, node: fx.Node) -> int:
        """The same for nodes that differ in nothing but their tangents."""
        if node.op == "placeholder":
            text = f"tangent {node.meta['val'].shape} {node.meta['val'].dtype}"
        else:
            named = fx.map_arg((node.args, node.kwargs), lambda arg: self.scaled[arg].key if arg in self.scaled else arg.name)
            text = f"{node.target} {named}"
        return self.keys.setdefault(text, len(self.keys))

    def _divisor(self, base: fx.Node) -> fx.Node:
        """The base tangent, everywhere, without zeros."""
        value = base.meta["val"]
        small = self._call(_aten.lt.Scalar, value.to(torch.bool), self._call(_aten.abs.default, value, base), _LEAST)
        least = self._call(_aten.full.default, value.new_empty(()), [], _LEAST, dtype=value.dtype, device=value.device)
        divisor = self._call(_aten.where.self, value, small, least, base)
        base.replace_all_uses_with(divisor, delete_user_cb=lambda user: user not in (small, small.args[0], divisor))
        return divisor

    def _replace(self, product: fx.Node, base: fx.Node) -> None:
        """Writes the product of another tangent as that of the base times a ratio."""
        left: Any = product.args[0]
        tangent, key = self.scaled[left]
        twin = self.nodes.get(_Scaled(base, key))
        if tangent is base or twin is None:
            return
        value = product.meta["val"]
        with self.graph.inserting_before(product):
            own = _Scaled(base, self.scaled[product].key)
            if own not in self.nodes:
                self.nodes[own] = self._call(product.target, value, twin, product.args[1])
            ratio = self._call(_aten.div.Tensor, tangent.meta["val"], tangent, self.divisor)
            for _ in range(value.ndim - ratio.meta["val"].ndim):
                size = ratio.meta["val"]
                ratio = self._call(_aten.unsqueeze.default, size.unsqueeze(-1), ratio, size.ndim)
            new = self._call(_aten.mul.Tensor, value, self.nodes[own], ratio)
        product.replace_all_uses_with(new)
        self.scaled[new] = self.scaled[product]

    def _call(self, target: Any, value: Tensor, *args: Any, **kwargs: Any) -> fx.Node:
        """A call whose result is like this value."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node


def _is_zero(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is _aten.full.default and bool(node.args[1] == 0)
