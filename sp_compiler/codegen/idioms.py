"""Groups of nodes that can be printed as one torch function, which runs the same kernels.

``view(bmm(view(clone(a)), view(clone(b))))`` is ``torch.matmul(a, b)``, which for more than two
dims copies operands that it cannot view, multiplies with ``bmm`` and views the result. The nodes
are printed as one call only if nothing else uses the inner ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from sp_compiler.ir.op_traits import RESHAPES, base
from sp_compiler.ir.symbolic import same_shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Matmul:
    """``result`` is ``torch.matmul(left, right)``, computed by the nodes ``inside``."""

    result: Node
    left: Node
    right: Node
    inside: tuple[Node, ...]


class Idioms:
    """The idioms of a graph.

    Attributes:
        matmuls: matmuls by the node of their result.
    """

    def __init__(self, graph: Graph) -> None:
        # A returned value must have its own statement, so it cannot be a part of an expression.
        returned = {base(node) for node in graph.output_node().all_input_nodes}
        candidates = [_matmul(node) for node in graph.nodes if node.target in RESHAPES]
        self.matmuls = {
            match.result: match
            for match in candidates
            if match is not None and returned.isdisjoint(match.inside)
        }

    def forget(self, result: Node) -> None:
        """Print the nodes of ``result`` separately."""
        del self.matmuls[result]


def _matmul(node: Node) -> Matmul | None:
    product = node.args[0]
    # Nothing else may use the product: it would not exist.
    if product.target is not aten.bmm.default or len(product.users) > 1:
        return None
    batch = node.meta["val"].shape[:-2]
    if len(batch) < 2:  # torch.matmul of three dims is bmm itself
        return None
    inside: list[Node] = []
    factors = []
    for flat in product.args:
        factor = _unflattened(flat, batch)
        if factor is None:
            return None
        factors.append(factor[0])
        inside += factor[1:]
    left, right = factors
    shape = (*batch, left.meta["val"].shape[-2], right.meta["val"].shape[-1])
    if not same_shape(node.meta["val"].shape, shape):
        return None
    return Matmul(node, left, right, (*inside, product))


def _unflattened(flat: Node, batch: torch.Size) -> list[Node] | None:
    """Return ``flat`` with its batch dims, and the nodes that flatten them."""
    if flat.target not in RESHAPES or len(flat.users) > 1:
        return None
    # matmul itself clones a factor that it cannot view.
    factor, nodes = flat.args[0], [flat]
    if factor.target is aten.clone.default and len(factor.users) == 1:
        factor, nodes = factor.args[0], [factor, flat]
    shape = (*batch, *flat.meta["val"].shape[-2:])
    return [factor, *nodes] if same_shape(factor.meta["val"].shape, shape) else None
