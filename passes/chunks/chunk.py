"""Run a loss head, or attention, chunk by chunk of rows: logits and scores never exist in full.

::

    logits = linear(x, w)                        for each chunk i of the rows:
    nll, lse = vocab_nll(logits, y)                  logits_i = linear(x_i, w)
                                         ->          nll_i, lse_i = vocab_nll(logits_i, y_i)
                                                 nll, lse = cat(nll_i), cat(lse_i)

    grad = vocab_nll_backward(g, logits, ...)    for each chunk i, its logits recomputed:
    grad_w = mm(t(grad), x)                          grad_i = vocab_nll_backward(g_i, logits_i, ...)
    grad_x = mm(grad, w)                 ->          grad_w += mm(t(grad_i), x_i)
                                                     grad_x[rows of i] = mm(grad_i, w)

Attention with dropout is decomposed, because a fused kernel would draw other masks. Its rows are
queries: each chunk computes its scores, probabilities and context with all keys::

    scores = bmm(q, k)                           for each chunk i of the queries:
    probs = dropout(softmax(scores), ...)            scores_i = bmm(q_i, k)
    context = bmm(probs, v)              ->          probs_i = dropout(softmax(scores_i), ..., i)
                                                     context_i = bmm(probs_i, v)
                                                 context = cat(context_i)

Backward recomputes the probabilities of a chunk under every policy, draws its masks again from the
positions of its elements, and sums the gradients of keys and values. The memory for values as large
as the scores is divided by the number of chunks; q, k and v are saved as by any policy that
recomputes attention.

Mutates a copy of the joint graph. Reads ``meta["val"]`` and the sharding rules; writes
``meta["chunk"]``, which the tags follow: ``"part"`` on forward nodes of one chunk, which backward
recomputes, ``"joined"`` on the concatenation of all chunks: saved for a loss head, and for
attention tagged as the policy tags a context.

Gradients are computed in backward, from recomputed logits. Cut cross-entropy (arXiv 2411.09009)
does so too; Liger-Kernel (arXiv 2410.10989) computes them in forward, while the logits exist, and
scales them later by the gradient of the loss. That saves the second matmul, 2nhv/t operations per
rank, which is a third more for the head: 2 % of a step of Llama-3-8B (16 GFLOP per token forward,
1.05 of them in the head). But it is correct only for a loss that is linear in its rows, holds the
gradient of the weight, vh/t, and the unreduced one of the hidden states, nh, from forward to
backward, wastes work in evaluation, and underflows in float16, because it does not see the loss
scale. The logsumexp of each row is saved, so no collective is repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

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
from sp_compiler.ir.rewriting import fake_value, make_like
from sp_compiler.ops.accumulate import ADD_PRODUCT, WRITE_ROWS
from sp_compiler.passes.chunks.chains import Chain, Kind, chains
from sp_compiler.passes.chunks.counts import counts_of_attention, counts_of_losses
from sp_compiler.passes.chunks.row_rules import DROPOUTS
from sp_compiler.rules.registry import LocalCall, result_shapes
from sp_compiler.rules.table import local_call
from sp_compiler.trace.joint import JointGraph

aten = torch.ops.aten


def chunk(
    joint: JointGraph,
    world_size: int,
    loss_counts: Sequence[int] | None,
    attention_counts: Sequence[int] | None = (1,),
) -> list[JointGraph]:
    """Return copies of ``joint`` with its loss heads and attention in different numbers of chunks,
    the fewest first; the copy without chunks is ``joint`` itself.

    Args:
        joint: simplified, not tagged yet; not modified.
        world_size: number of ranks.
        loss_counts: numbers of chunks of loss heads; ``None`` for powers of two with enough rows
            per chunk.
        attention_counts: the same for attention with dropout.

    Raises:
        OpenRowsError: the number of rows is open.
    """
    of_losses, rows = counts_of_losses(joint, loss_counts)
    of_attention = counts_of_attention(joint, attention_counts)
    ways = []
    for num_losses, num_attention in itertools.product(of_losses, of_attention):
        if num_losses == num_attention == 1:
            ways.append(joint)
            continue
        # Tokens are flattened only where losses are cut: elsewhere the graph stays as it is.
        base_graph = rows if num_losses > 1 else joint
        counts: dict[Kind, int] = {"loss": num_losses, "attention": num_attention}
        ways.append(_in_chunks(base_graph, counts, world_size))
    return ways


def _in_chunks(joint: JointGraph, counts: Mapping[Kind, int], world_size: int) -> JointGraph:
    named = ", ".join(f"{kind} in {count} chunks" for kind, count in counts.items() if count > 1)
    copy = replace(joint.copy(), chunks=named)
    for kind, count in counts.items():
        for chain in chains(copy, kind) if count > 1 else ():
            # A block may have several attentions, some with fewer queries.
            own = min(count, chain.num_rows)
            _Rewrite(copy.graph, chain, own, world_size).run()
            report_of(Pass.CHUNK).rewrote(kind=f"{kind} in {own} chunks")
    copy.graph.lint()
    return copy


class _Rewrite:
    """Replaces one chain by one copy per chunk."""

    def __init__(self, graph: Graph, chain: Chain, count: int, world_size: int) -> None:
        self._graph = graph
        self._chain = chain
        self._world_size = world_size
        num_rows = chain.num_rows
        # Rows that the count does not divide evenly are spread: chunks differ by at most one row.
        self._bounds = [num_rows * index // count for index in range(count + 1)]
        # By chunk: copies of nodes, and row slices of values that all chunks read, cut once each.
        self._parts: list[dict[Node, Node]] = [{} for _ in range(count)]
        self._slices: list[dict[tuple[Node, int], Node]] = [{} for _ in range(count)]

    def run(self) -> None:
        chain = self._chain
        self._replace(chain.forward, self._join_forward)
        self._replace(chain.backward, self._join_backward)
        # Readers first: FX does not erase a node that has users.
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
        # A reader of the chain that is between its nodes moves after it.
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
        """Each chunk of a loss head is written into the results at once, so that it is freed before
        the next."""
        totals: dict[Node, Node] = {}
        results = self._results(members)
        # If a policy recomputes the context too, sharing the probabilities between both would keep
        # those of all chunks alive until the gradient of the context exists.
        needed = ancestors(members) if self._chain.kind == "attention" else set()
        again = [node for node in self._chain.forward if node in needed]
        for index in range(len(self._parts)):
            for node in again:
                self._copy(node, index)
            for node in members:
                if node in results:
                    self._add_part(node, index, totals)
                else:
                    self._copy(node, index)
        for node in results:
            if node not in totals:
                (dim,) = self._chain.dims[node].results
                parts = [part[node] for part in self._parts]
                totals[node] = self._call(node, aten.cat.default, (parts, dim))
        return totals

    def _add_part(self, node: Node, index: int, totals: dict[Node, Node]) -> None:
        """Compute one chunk of a result and add it to its total, unless all are joined at the
        end."""
        (dim,) = self._chain.dims[node].results
        part = self._parts[index]
        if dim is None and is_call(node, aten.mm.default):
            # Accumulated by the matmul: a separate sum would hold two gradients of the weight at
            # once, each as large as the weight.
            total = totals[node] if index else self._zeros(node)
            args = (total, *self._operands(node, index), self._world_size)
            totals[node] = part[node] = self._call(node, ADD_PRODUCT.overload, args)
        elif dim is None:
            self._copy(node, index)
            parts = [totals[node], part[node]] if index else [part[node]]
            totals[node] = self._sum(node, parts)
        elif self._chain.kind == "attention":
            # Parts of a rank's heads are segments of the dim, which no tensor of zeros can be
            # declared to have. Joining the parts at the end does not raise the peak: by then
            # nothing else of a chunk is alive, and its scores are larger than the gradient of all
            # queries.
            self._copy(node, index)
        else:
            # In place, because "cat" would hold the parts together with the result.
            total = totals[node] if index else self._zeros(node)
            self._copy(node, index)
            args = (total, part[node], dim, self._bounds[index], self._world_size)
            totals[node] = self._call(node, WRITE_ROWS.overload, args)

    def _zeros(self, node: Node) -> Node:
        """Zeros of the size of a result: totals start from them, not from the first chunk, so that
        all chunks look the same."""
        like = tensor_operands(node)[0]
        args = (self._parts[0].get(like, like), list(shape_of(node)))
        return self._call(node, aten.new_zeros.default, args)

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
        if is_call(node, *DROPOUTS):
            # Not the arguments of one of several ranks, which the rules would give.
            places = {"first_query": self._bounds[index], "num_queries": self._bounds[-1]}
            args = tuple((map_arg(arguments(node), new.__getitem__) | places).values())
        elif not is_getitem(node):
            rows = self._bounds[index + 1] - self._bounds[index]
            shapes = [
                tuple(rows if at == dim else size for at, size in enumerate(shape))
                for shape, dim in zip(result_shapes(node), dims.results, strict=True)
            ]
            bound = map_arg(arguments(node), new.__getitem__)
            # To the operator a chunk is like a rank's shard: the same rules say which of its size
            # arguments differ.
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
