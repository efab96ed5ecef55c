"""Rewrite a loss of unsharded classes to one per row, so that rows can be chunked.

::

    loss, count = nll_loss_forward(p, y, w, mean)        rows, _ = nll_loss_forward(p, y, w, none)
                                                   ->    loss = sum(rows) / sum(w[y])
    nll_loss_backward(g, p, y, w, mean, count)           nll_loss_backward(g / sum(w[y]), ..., none)

The mean over a chunk would be divided by only the weights of that chunk, which are 0 if all its
labels are ignored. Mutates the graph; new nodes get the meta of those that they replace.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, calls, is_call, shape_of
from sp_compiler.ir.rewriting import fake_value, make_like

_aten = torch.ops.aten
_MEAN, _NONE = 1, 0  # torch's enumeration of reductions; 2 is the sum


def losses_by_row(graph: Graph) -> None:
    """Rewrite every loss of ``graph`` that is a mean or a sum of its rows."""
    for node in calls(graph, _aten.nll_loss_forward.default):
        bound = arguments(node)
        # The loss of one token, without a dim of rows, is not a sum.
        if bound["reduction"] != _NONE and bound["self"].meta["val"].dim() == 2:
            _by_row(graph, node)


def _by_row(graph: Graph, node: Node) -> None:
    bound = arguments(node)
    dtype = bound["self"].meta["val"].dtype
    # As torch's kernels accumulate: in half precision the sum of many rows would overflow.
    wide = torch.promote_types(dtype, torch.float32)
    with graph.inserting_before(node):
        args = (bound["self"], bound["target"], bound["weight"], _NONE, bound["ignore_index"])
        pair = _call(node, node.target, *args)
        # For losses per row the second result is 0, and backward does not read it.
        rows, unread = (_call(node, operator.getitem, pair, index) for index in range(2))
        total = _call(node, _aten.sum.dim_IntList, rows, [0], dtype=wide)
        divisor = _weight_of_labels(node, wide) if bound["reduction"] == _MEAN else None
        if divisor is not None:
            total = _call(node, _aten.div.Tensor, total, divisor)
        if wide is not dtype:
            total = _call(node, _aten._to_copy.default, total, dtype=dtype)
    results = list(node.users)  # getitems
    for backward in [user for result in results for user in result.users]:
        if is_call(backward, _aten.nll_loss_backward.default):
            _backward_by_row(graph, backward, args, divisor, unread)
    for result in results:
        # Without a mean nothing reads the second result, and cross entropy never does.
        result.replace_all_uses_with(total if result.args[1] == 0 else unread)
        graph.erase_node(result)
    graph.erase_node(node)


def _backward_by_row(
    graph: Graph, node: Node, forward: tuple[Any, ...], divisor: Node | None, unread: Node
) -> None:
    grad = arguments(node)["grad_output"]
    dtype = grad.meta["val"].dtype
    with graph.inserting_before(node):
        # The forward's steps in reverse: the division, then the sum, which gives every row the same
        # gradient.
        if divisor is not None:
            grad = _call(node, _aten.div.Tensor, grad, divisor)
        if grad.meta["val"].dtype is not dtype:
            grad = _call(node, _aten._to_copy.default, grad, dtype=dtype)
        grad = _call(node, _aten.expand.default, grad, [shape_of(node)[0]])
        rows = _call(node, node.target, grad, *forward, unread)
    node.replace_all_uses_with(rows)
    graph.erase_node(node)


def _weight_of_labels(node: Node, dtype: torch.dtype) -> Node:
    """Return the total weight of the labels: their number, or the sum of their class weights."""
    bound = arguments(node)
    counted = _call(node, _aten.ne.Scalar, bound["target"], bound["ignore_index"])
    if bound["weight"] is not None:
        # An ignored label need not be a valid class.
        label = _call(node, _aten.where.ScalarOther, counted, bound["target"], 0)
        weights = _call(node, _aten.index.Tensor, bound["weight"], [label])
        counted = _call(node, _aten.where.ScalarOther, counted, weights, 0)
    return _call(node, _aten.sum.dim_IntList, counted, [0], dtype=dtype)


def _call(like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    about = {"name": target.__name__.split(".")[0], "val": fake_value(target, args, kwargs)}
    return make_like(like.graph, target, args, kwargs, like=like, origin=Pass.CHUNK, **about)
