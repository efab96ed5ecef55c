"""Find all values as large as the logits: from their product to one number per row, and back.

::

    logits = linear(x, w)               (n, v)    forward
    nll, lse = vocab_nll(logits, y)     (n,)
    ...
    grad_logits = vocab_nll_backward(grad_nll, logits, y, lse)    (n, v)    backward
    grad_w = mm(t(grad_logits), x)      (v, h)
    grad_x = mm(grad_logits, w)         (n, h)

No operator is hard-coded: a chain is a product with more columns than its factor, all values of its
size that depend on it, and their readers; forward may read only one number per row of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.fx import ancestors, descendants, is_getitem, tensor_operands
from sp_compiler.ir.op_traits import is_collective, matmul_factors
from sp_compiler.ir.symbolic import example_number
from sp_compiler.ops.registry import operator_of
from sp_compiler.passes.chunks.row_rules import RowDims, row_dims
from sp_compiler.trace.joint import JointGraph


@dataclass
class Chain:
    """Nodes that can run a chunk of rows at a time.

    Attributes:
        product: the node that computes the logits (n, v).
        dims: the dims of rows of every node, in graph order.
        forward: nodes that forward runs.
        backward: nodes that backward runs in addition to recomputed ones.
        large: nodes of the size of the logits, which are not read outside.
        obstacle: why it cannot be chunked, and the node; ``None`` if it can.
    """

    product: Node
    dims: dict[Node, RowDims] = field(default_factory=dict)
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    large: set[Node] = field(default_factory=set)
    obstacle: tuple[str, Node] | None = None


def chains(joint: JointGraph) -> list[Chain]:
    """Return all chains of ``joint``; chains that cannot be chunked are reported with the
    reason."""
    backward = joint.backward_nodes()
    complete: list[Chain] = []
    for node in joint.graph.nodes:
        # What an earlier chain holds is cut with that one.
        if node in backward or not widens(node) or any(node in each.dims for each in complete):
            continue
        chain = _Growth(joint, node, backward).chain()
        if chain is not None and chain.obstacle is not None:
            reason, at = chain.obstacle
            report_of(Pass.CHUNK).decline(at, reason)
        elif chain is not None:
            complete.append(chain)
    return complete


def widens(node: Node) -> bool:
    """Return whether the rows of ``node`` are longer than those of its operands."""
    factors = matmul_factors(node) if node.op == "call_function" else None
    if factors is None or node.meta["val"].dim() != 2:
        return False
    # Example numbers: comparing open sizes would record which way it went.
    columns, depth = node.meta["val"].shape[-1], factors[0].meta["val"].shape[-1]
    return example_number(columns) > example_number(depth)


class _Growth:
    """Grows a chain from its product."""

    def __init__(self, joint: JointGraph, product: Node, backward: set[Node]) -> None:
        self._order = {node: place for place, node in enumerate(joint.graph.nodes)}
        self._backward = backward
        self._known: dict[Node, int] = {product: 0}
        self._chain = Chain(product)
        self._size = _numel(product)
        self._num_rows = example_number(product.meta["val"].shape[0])

    def chain(self) -> Chain | None:
        """Return the chain; ``None`` if forward reads more of it than one number per row."""
        chain = self._chain
        self._grow([chain.product])
        results = [node for node in self._parts()[0] if self._is_result(node)]
        if not results or any(_numel(node) > self._num_rows for node in results):
            return None
        for part in (0, 1):
            self._close(self._parts()[part])
        chain.forward, chain.backward = self._parts()
        chain.large = {node for node in self._known if self._is_large(node)}
        placement = chain.product.meta.get("placement")
        if placement is not None and placement.is_sharded and placement.dim == 0:
            self._refuse("its rows are sharded over the ranks", chain.product)
        return chain

    def _grow(self, nodes: Iterable[Node]) -> None:
        """Add ``nodes`` and connected values as large as the logits."""
        queue = list(nodes)
        for node in queue:  # which grows
            if node in self._chain.dims:
                continue
            if node.op != "call_function":
                reason = _RETURNED if node.op == "output" else "it is an input of the block"
                self._refuse(reason, self._chain.product)
                continue
            dims = self._dims(node)
            if dims is None:
                returned = any(user.op == "output" for user in node.users)
                self._refuse(_RETURNED if returned else "its rows depend on each other", node)
                continue
            self._chain.dims[node] = dims
            # Towards the operands only along what is large: rows of hidden states are read as they
            # are, a slice per chunk.
            for operand, dim in zip(tensor_operands(node), dims.operands, strict=True):
                if dim is not None and self._is_large(operand):
                    self._known.setdefault(operand, dim)
                    queue.append(operand)
            if len(dims.results) == 1 and dims.results[0] is not None:
                self._known[node] = dims.results[0]
            # All results of an operator with several are read by getitem alone.
            has_several = not isinstance(node.meta["val"], Tensor)
            if has_several or (node in self._known and self._is_large(node)):
                queue += node.users

    def _dims(self, node: Node) -> RowDims | None:
        if is_getitem(node):
            source, index = node.args
            # Reached from a reader, not from what made it, a part says nothing of the other parts.
            made = self._chain.dims.get(source)
            return None if made is None else RowDims((None,), (made.results[index],))
        return row_dims(node, self._known)

    def _close(self, part: list[Node]) -> None:
        """Add nodes between nodes of ``part``: numbers per row that are used in rows again."""
        is_backward = bool(part) and part[0] in self._backward
        between = (descendants(part) & ancestors(part)).difference(part)
        for node in sorted(between, key=self._order.__getitem__):
            if node not in self._backward and is_collective(node) and not operator_of(node.target):
                self._refuse("its ranks exchange what is recomputed", node)
            self._grow([node])
        part = [node for node in self._chain.dims if (node in self._backward) is is_backward]
        if (descendants(part) & ancestors(part)).difference(part):
            self._refuse("its rows depend on each other", self._chain.product)

    def _parts(self) -> tuple[list[Node], list[Node]]:
        nodes = sorted(self._chain.dims, key=self._order.__getitem__)
        forward = [node for node in nodes if node not in self._backward]
        return forward, [node for node in nodes if node in self._backward]

    def _is_result(self, node: Node) -> bool:
        """Return whether forward reads ``node``, smaller than the logits, outside of the chain."""
        inside = self._chain.dims.keys() | self._backward
        return not self._is_large(node) and any(user not in inside for user in node.users)

    def _is_large(self, node: Node) -> bool:
        return isinstance(node.meta["val"], Tensor) and _numel(node) >= self._size

    def _refuse(self, reason: str, node: Node) -> None:
        # The first reason is nearest to the product; others mostly follow from it.
        self._chain.obstacle = self._chain.obstacle or (reason, node)


_RETURNED = "the logits are returned: they must exist in full"


def _numel(node: Node) -> int:
    value = node.meta["val"]
    return math.prod(map(example_number, value.shape)) if isinstance(value, Tensor) else 0
