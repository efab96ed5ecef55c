"""Find the large values between two matmuls: the logits of a loss head, the scores of attention.

A loss head is cut from its matmul to one value per row, and back.

::

    logits = linear(x, w)               (n, v)    forward
    nll, lse = vocab_nll(logits, y)     (n,)
    ...
    grad_logits = vocab_nll_backward(grad_nll, logits, y, lse)    (n, v)    backward
    grad_w = mm(t(grad_logits), x)      (v, h)
    grad_x = mm(grad_logits, w)         (n, h)

Attention with dropout, which no fused kernel computes with our masks, is cut from the scores of the
queries to their context::

    scores = bmm(q, k)                  (b, s, l)    b: samples times heads
    probs = dropout(softmax(scores))    (b, s, l)
    context = bmm(probs, v)             (b, s, d)

No operator is hard-coded: a chain is a matmul with more columns than its factor, all values of its
size that depend on it, and their readers. Of these values, forward may read only one value per row
outside of the chain, or, for attention, results at most half as large.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.fx import (
    ancestors,
    descendants,
    is_call,
    is_getitem,
    shape_of,
    tensor_operands,
)
from sp_compiler.ir.op_traits import matmul_factors
from sp_compiler.ir.symbolic import example_number, example_numel
from sp_compiler.passes.chunks.row_rules import DROPOUTS, RowDims, row_dims
from sp_compiler.trace.joint import JointGraph

Kind = Literal["loss", "attention"]
"""Kind of a chain. The matmul of a loss head is (rows, classes), that of attention (samples times
heads, queries, keys)."""
_NUM_DIMS = {"loss": 2, "attention": 3}


@dataclass
class Chain:
    """Nodes that can run a chunk of rows at a time.

    Attributes:
        product: the node that computes the logits (n, v), or the scores (b, s, l).
        dims: the dims of rows of every node, in graph order.
        forward: nodes that forward runs.
        backward: nodes that backward runs in addition to recomputed ones.
        large: nodes as large as the product, which are not read outside.
        obstacle: why the chain cannot be chunked, and the node; ``None`` if it can.
    """

    product: Node
    dims: dict[Node, RowDims] = field(default_factory=dict)
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    large: set[Node] = field(default_factory=set)
    obstacle: tuple[str, Node] | None = None

    @property
    def kind(self) -> Kind:
        return "attention" if self.product.meta["val"].dim() == 3 else "loss"

    @property
    def num_rows(self) -> int:
        """Rows of the matmul: tokens of a loss head, queries of attention."""
        return shape_of(self.product)[-2]


def chains(joint: JointGraph, kind: Kind) -> list[Chain]:
    """Return all chains of ``joint`` of this kind; chains that cannot be chunked are reported with
    the reason."""
    backward = joint.backward_nodes()
    complete: list[Chain] = []
    for node in joint.graph.nodes:
        # A matmul inside an earlier chain is cut with that one.
        if node in backward or not widens(node, kind):
            continue
        if any(node in each.dims for each in complete):
            continue
        chain = _Growth(joint, node, backward).chain()
        if chain is not None and chain.obstacle is not None:
            reason, at = chain.obstacle
            report_of(Pass.CHUNK).decline(at, reason)
        elif chain is not None and any(not chain.dims.keys().isdisjoint(x.dims) for x in complete):
            report_of(Pass.CHUNK).decline(node, "a part of its chain is in another matmul's chunks")
        elif chain is not None:
            complete.append(chain)
    return complete


def widens(node: Node, kind: Kind) -> bool:
    """Return whether ``node`` is a matmul that a chain of this kind may begin with: its rows are
    longer than those of its operands."""
    factors = matmul_factors(node) if node.op == "call_function" else None
    if factors is None or node.meta["val"].dim() != _NUM_DIMS[kind]:
        return False
    # Example sizes: comparing open sizes would record the result.
    columns, depth = node.meta["val"].shape[-1], factors[0].meta["val"].shape[-1]
    return example_number(columns) > example_number(depth)


class _Growth:
    """Grows a chain from its matmul."""

    def __init__(self, joint: JointGraph, product: Node, backward: set[Node]) -> None:
        self._order = {node: place for place, node in enumerate(joint.graph.nodes)}
        self._backward = backward
        self._rows_dim = product.meta["val"].dim() - 2
        self._known: dict[Node, int] = {product: self._rows_dim}
        self._chain = Chain(product)
        self._dependent = descendants([product])
        self._size = _numel(product)

    def chain(self) -> Chain | None:
        """Return the chain; ``None`` if forward reads so much of it that chunks gain nothing, or if
        it starts from a matmul of three dims that is not of attention with dropout."""
        chain = self._chain
        self._grow([chain.product])
        forward = self._parts()[0]
        results = [node for node in forward if self._is_result(node)]
        most = example_number(chain.num_rows)
        if chain.kind == "attention":
            # Without dropout attention is fused, or written by the model in its own way; and the
            # matmuls of experts have three dims too.
            if not all(self._runs_on_scores(*targets) for targets in _OF_ATTENTION):
                return None
            if chain.obstacle is not None:
                return chain  # the obstacle may have ended it before its results
            most = self._size // 2
        if not results or any(_numel(node) > most for node in results):
            return None
        for part in (0, 1):
            self._close(self._parts()[part])
        chain.forward, chain.backward = self._parts()
        chain.large = {node for node in self._known if self._is_large(node)}
        placement = chain.product.meta.get("placement")
        if placement is not None and placement.is_sharded and placement.dim == self._rows_dim:
            self._refuse("its rows are sharded over the ranks", chain.product)
        return chain

    def _grow(self, nodes: Iterable[Node]) -> None:
        """Add ``nodes`` and connected values as large as the logits."""
        queue = list(nodes)
        for node in queue:  # the queue grows
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
            # Towards the operands only along large values: rows of hidden states are read as they
            # are, a slice per chunk.
            for operand, dim in zip(tensor_operands(node), dims.operands, strict=True):
                if dim is not None and self._is_large(operand) and self._is_made(operand):
                    self._known.setdefault(operand, dim)
                    queue.append(operand)
            if len(dims.results) == 1 and dims.results[0] is not None:
                self._known[node] = dims.results[0]
            # If an operator has several results, only getitem reads them.
            has_several = not isinstance(node.meta["val"], Tensor)
            if has_several or (node in self._known and self._is_large(node)):
                queue += node.users

    def _dims(self, node: Node) -> RowDims | None:
        if is_getitem(node):
            source, index = node.args
            # If it was reached from a reader, not from its operator, the other parts are unknown.
            made = self._chain.dims.get(source)
            return None if made is None else RowDims((None,), (made.results[index],))
        return row_dims(node, self._known)

    def _close(self, part: list[Node]) -> None:
        """Add nodes between nodes of ``part``: values per row that are used in rows again."""
        is_backward = bool(part) and part[0] in self._backward
        between = (descendants(part) & ancestors(part)).difference(part)
        # Collectives among them are repeated in backward, chunk by chunk: that cost counts when
        # the number of chunks is chosen.
        for node in sorted(between, key=self._order.__getitem__):
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

    def _runs_on_scores(self, *targets: object) -> bool:
        """Return whether one of ``targets`` runs in forward on scores of this matmul."""
        size = shape_of(self._chain.product)[1:]
        later = self._dependent - self._backward
        return any(is_call(node, *targets) and shape_of(node)[-2:] == size for node in later)

    def _is_made(self, node: Node) -> bool:
        """Return whether ``node`` is computed from the matmul, or in backward. Other large values,
        such as masks and targets, exist anyway, and are read in slices."""
        return node in self._backward or node in self._dependent

    def _refuse(self, reason: str, node: Node) -> None:
        # The first reason is nearest to the product; others mostly follow from it.
        self._chain.obstacle = self._chain.obstacle or (reason, node)


_RETURNED = "the logits are returned: they must exist in full"
_OF_ATTENTION = ((torch.ops.aten._softmax.default,), DROPOUTS)


def _numel(node: Node) -> int:
    value = node.meta["val"]
    return example_numel(value) if isinstance(value, Tensor) else 0
