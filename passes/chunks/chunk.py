"""Run a loss head one chunk of rows at a time, so that the logits never all exist at once.

::

    logits = linear(x, w)                        for each chunk i of the rows:
    nll, lse = vocab_nll(logits, y)                  logits_i = linear(x_i, w)
                                         ->          nll_i, lse_i = vocab_nll(logits_i, y_i)
                                                 nll, lse = cat(nll_i), cat(lse_i)

    grad = vocab_nll_backward(g, logits, ...)    for each chunk i, its logits recomputed:
    grad_w = mm(t(grad), x)                          grad_i = vocab_nll_backward(g_i, logits_i, ...)
    grad_x = mm(grad, w)                 ->          grad_w += mm(t(grad_i), x_i)
                                                     grad_x[rows of i] = mm(grad_i, w)

Mutates a copy of the joint graph. Reads ``meta["val"]`` and the sharding rules; writes
``meta["chunk"]``, which the tags follow: ``"part"`` on forward nodes of one chunk, which backward
recomputes, ``"joined"`` on the concatenation of all chunks, which is saved.

Gradients are computed in backward, from recomputed logits. Cut cross-entropy (arXiv 2411.09009)
does so too; Liger-Kernel (arXiv 2410.10989) computes them in forward, while the logits exist, and
scales them later by the gradient of the loss. That saves the second product, 2nhv/t operations per
rank, which is a third more for the head: 2 % of a step of Llama-3-8B (16 GFLOP per token forward,
1.05 of them in the head). But it is right only for a loss that is linear in its rows, holds the
gradient of the weight, vh/t, and the unreduced one of the hidden states, nh, from forward to
backward, wastes work in evaluation, and underflows in float16, because it does not see the loss
scale. The logsumexp of each row is saved, so no collective is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.placement import R, S
from sp_compiler.ir.fx import (
    ancestors,
    arguments,
    base_name,
    descendants,
    is_call,
    is_getitem,
    shape_of,
    tensor_operands,
)
from sp_compiler.ir.op_traits import base
from sp_compiler.ir.rewriting import fake_value, make_like
from sp_compiler.ir.symbolic import is_open
from sp_compiler.ops.accumulate import ADD_PRODUCT, WRITE_ROWS
from sp_compiler.ops.registry import operator_of
from sp_compiler.ops.vocabulary import VOCAB_NLL
from sp_compiler.ops.vocabulary_losses import VOCAB_LOGSUMEXP, VOCAB_SMOOTHED_NLL
from sp_compiler.passes.chunks.chains import Chain, chains, widens
from sp_compiler.passes.chunks.flatten import flatten_rows
from sp_compiler.passes.chunks.row_losses import losses_by_row
from sp_compiler.rules.registry import LocalCall, result_shapes
from sp_compiler.rules.table import local_call
from sp_compiler.trace.joint import JointGraph

aten = torch.ops.aten

_LOSSES = (VOCAB_NLL, VOCAB_SMOOTHED_NLL, VOCAB_LOGSUMEXP)
_UNSHARDED_LOSSES = (aten.nll_loss_forward.default, aten._log_softmax.default)

MOST_CHUNKS = 16
"""More would make the generated text long, and what is left of the logits small beside the rest."""
LEAST_ROWS = 1024
"""Rows of a chunk, where their number is chosen: a product of fewer runs below its full speed."""


class OpenRowsError(UnsupportedError):
    """The number of rows of a loss head that may have to be chunked is open."""


def chunk(joint: JointGraph, world_size: int, counts: Sequence[int] | None) -> list[JointGraph]:
    """Return copies of ``joint`` with its loss heads in different numbers of chunks, the fewest
    first.

    Args:
        joint: simplified, not tagged yet; not modified.
        world_size: number of ranks.
        counts: numbers of chunks; ``None`` for powers of two with enough rows per chunk.

    Raises:
        OpenRowsError: the number of rows of a loss head is open.
    """
    if counts == (1,):
        return [joint]
    ways = [joint] if counts is None else []
    if _has_open_rows(joint, counts):
        raise OpenRowsError(
            "a loss head in chunks of rows needs to know their number; loss_chunks=1 leaves it open"
        )
    num_rows = [shape_of(product)[0] for product in _products(joint)]
    # Looked at first: most blocks are not long enough, and to find chains takes a copy.
    least_rows = 2 * LEAST_ROWS if counts is None else 1
    if any(map(is_open, num_rows)) or max(num_rows, default=0) < least_rows:
        return [joint]
    # A copy, for the joint graph as it is stays the way without chunks.
    rows = joint.copy()
    products = _products(rows)
    flatten_rows(rows.graph, products)
    losses_by_row(rows.graph)
    longest = max((shape_of(each.product)[0] for each in chains(rows)), default=0)
    most = min(MOST_CHUNKS, longest // LEAST_ROWS)
    for count in counts or [2**power for power in range(1, most.bit_length())]:
        if longest:
            ways.append(_in_chunks(rows, min(count, longest), world_size))
    return ways or [joint]


def _products(joint: JointGraph) -> list[Node]:
    """Return products of the forward whose rows are longer than their operands'."""
    backward = joint.backward_nodes()
    return [node for node in joint.graph.nodes if node not in backward and widens(node)]


def _has_open_rows(joint: JointGraph, counts: Sequence[int] | None) -> bool:
    """Return whether the number of rows of a loss head that may be chunked is open."""
    returned = {base(node) for node in joint.outputs}
    for node in joint.graph.nodes:
        over_vocabulary = operator_of(node.target) in _LOSSES
        if not over_vocabulary and not is_call(node, *_UNSHARDED_LOSSES):
            continue
        logits = node.args[0]
        placement = logits.meta.get("placement")
        if placement is not None and placement.is_sharded and placement.dim == 0:
            continue  # rows of ranks are not cut, and leave sizes open
        num_rows, classes = math.prod(shape_of(logits)[:-1]), shape_of(logits)[-1]
        # The comparison is recorded: a longer call gets a program of its own, maybe in chunks.
        is_long = counts is not None or num_rows >= 2 * LEAST_ROWS
        # Returned logits stay whole, and leave sizes open.
        wide = [x for x in ancestors([logits]) & returned if shape_of(x)[-1:] == (classes,)]
        if is_open(num_rows) and is_long and not wide:
            return True
    return False


def _in_chunks(joint: JointGraph, count: int, world_size: int) -> JointGraph:
    copy = joint.copy()
    for chain in chains(copy):
        _Rewrite(copy.graph, chain, count, world_size).run()
        report_of(Pass.CHUNK).rewrote(kind=f"in {count} chunks")
    copy.graph.lint()
    return copy


class _Rewrite:
    """Replaces one chain by one copy per chunk."""

    def __init__(self, graph: Graph, chain: Chain, count: int, world_size: int) -> None:
        self._graph = graph
        self._chain = chain
        self._world_size = world_size
        num_rows = chain.product.meta["val"].shape[0]
        # Rows that the count does not divide are spread: chunks differ by one row at most.
        self._bounds = [num_rows * index // count for index in range(count + 1)]
        # By chunk: copies of nodes, and rows of what all chunks read, which are sliced once.
        self._parts: list[dict[Node, Node]] = [{} for _ in range(count)]
        self._slices: list[dict[tuple[Node, int], Node]] = [{} for _ in range(count)]

    def run(self) -> None:
        chain = self._chain
        self._replace(chain.forward, self._join_forward)
        self._replace(chain.backward, self._join_backward)
        # Readers first: FX erases no node that has users.
        for node in reversed([*chain.forward, *chain.backward]):
            self._graph.erase_node(node)

    def _replace(
        self, members: Sequence[Node], join: Callable[[Sequence[Node]], Mapping[Node, Node]]
    ) -> None:
        """Make outside readers use ``join(members)``, inserted after the last member."""
        if not members:
            return
        inside, order = set(members), {node: at for at, node in enumerate(self._graph.nodes)}
        behind = members[-1].next
        # What reads the chain and stands between its nodes goes behind it.
        readers = descendants(members).difference(inside)
        delayed = [node for node in readers if order[node] < order[members[-1]]]
        with self._graph.inserting_before(behind):
            totals = join(members)
        for node in sorted(delayed, key=order.__getitem__):
            behind.prepend(node)
        for node, total in totals.items():
            node.replace_all_uses_with(total, delete_user_cb=lambda user: user not in inside)

    def _join_forward(self, members: Sequence[Node]) -> dict[Node, Node]:
        for index in range(len(self._parts)):
            for node in members:
                self._copy(node, index)
                self._parts[index][node].meta["chunk"] = "part"
        totals = {}
        for node in self._results(members):
            parts = [part[node] for part in self._parts]
            (dim,) = self._chain.dims[node].results
            if dim is None:
                totals[node] = self._sum(node, parts)
            else:
                totals[node] = self._call(node, aten.cat.default, (parts, dim))
            totals[node].meta["chunk"] = "joined"
        return totals

    def _join_backward(self, members: Sequence[Node]) -> dict[Node, Node]:
        """Each chunk is written into the results at once, so that it is freed before the next."""
        totals: dict[Node, Node] = {}
        results = self._results(members)
        for index, part in enumerate(self._parts):
            for node in members:
                (dim,) = self._chain.dims[node].results[:1]
                is_product = dim is None and is_call(node, aten.mm.default)
                if node in results and (is_product or dim is not None) and not index:
                    # Of zeros, not of the first chunk: all chunks read alike then.
                    like = tensor_operands(node)[0]
                    size = (part.get(like, like), list(shape_of(node)))
                    totals[node] = self._call(node, aten.new_zeros.default, size)
                if node in results and is_product:
                    # Accumulated inside the product: a sum apart would hold two gradients of the
                    # weight at once, each as large as the weight.
                    args = (totals[node], *self._operands(node, index))
                    total = self._call(node, ADD_PRODUCT.overload, (*args, self._world_size))
                    totals[node] = part[node] = total
                    continue
                self._copy(node, index)
                if node in results and dim is not None:
                    # In place, as "cat" would hold the parts beside the result.
                    args = (totals[node], part[node], dim, self._bounds[index])
                    total = self._call(node, WRITE_ROWS.overload, (*args, self._world_size))
                    totals[node] = total
                elif node in results:
                    parts = [*([totals[node]] if index else []), part[node]]
                    totals[node] = self._sum(node, parts)
        return totals

    def _results(self, members: Sequence[Node]) -> list[Node]:
        """Return nodes of the chain that are read outside."""
        inside = set(members)
        return [
            node
            for node in members
            if node not in self._chain.large and any(user not in inside for user in node.users)
        ]

    # One chunk.

    def _copy(self, node: Node, index: int) -> None:
        """Add a copy of ``node`` on the rows of one chunk."""
        operands, dims = self._operands(node, index), self._chain.dims[node]
        new = dict(zip(tensor_operands(node), operands, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
        target = node.target
        if not is_getitem(node):
            rows = self._bounds[index + 1] - self._bounds[index]
            shapes = [
                tuple(rows if at == dim else size for at, size in enumerate(shape))
                for shape, dim in zip(result_shapes(node), dims.results, strict=True)
            ]
            bound = map_arg(arguments(node), new.__getitem__)
            # A chunk is to the operator what a rank's shard is: the same rules say which of its
            # size arguments differ.
            call = LocalCall(
                node,
                bound,
                tuple(R if dim is None else S(dim) for dim in dims.operands),
                tuple(R if dim is None else S(dim) for dim in dims.results),
                tuple(shapes),
                len(self._parts),
            )
            target, args, kwargs = local_call(call, args, kwargs)
        self._parts[index][node] = self._call(node, target, args, kwargs)

    def _operands(self, node: Node, index: int) -> list[Node]:
        """Return the operands of ``node`` for one chunk: copies of the chunk, or its rows of shared
        values."""
        operands = []
        dims = self._chain.dims[node].operands
        for operand, dim in zip(tensor_operands(node), dims, strict=True):
            if operand in self._parts[index]:
                operands.append(self._parts[index][operand])
            elif dim is None:
                operands.append(operand)
            else:
                operands.append(self._rows(operand, index, dim))
        return operands

    def _rows(self, node: Node, index: int, dim: int) -> Node:
        key = (node, dim)
        if key not in self._slices[index]:
            args = (node, dim, self._bounds[index], self._bounds[index + 1])
            self._slices[index][key] = self._call(node, aten.slice.Tensor, args)
        return self._slices[index][key]

    # All chunks.

    def _sum(self, node: Node, parts: Sequence[Node]) -> Node:
        total = parts[0]
        for part in parts[1:]:
            total = self._call(node, aten.add.Tensor, (total, part))
        return total

    def _call(
        self,
        like: Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Node:
        """Add a call with the meta of ``like``, including its placement."""
        about = {"name": base_name(like), "val": fake_value(target, args, kwargs or {})}
        return make_like(self._graph, target, args, kwargs, like=like, origin=Pass.CHUNK, **about)
