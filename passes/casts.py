"""Casts to fewer bits, which autocast inserts per matmul: one for all matmuls, before a gather.

::

    full = convert(x, S(0), R)                x_16 = _to_copy(x, bf16)
    q = linear(_to_copy(full, bf16), w_q)     full = convert(x_16, S(0), R)
    k = linear(_to_copy(full, bf16), w_k)  -> q = linear(full, w_q)
    v = linear(_to_copy(full, bf16), w_v)     k = linear(full, w_k)
                                              v = linear(full, w_v)

Half as many bytes are gathered, and one copy is kept for the gradients of three weights. Forward
and backward compute the same values, bitwise. This is why it comes after differentiation: if the
model had one cast, its gradient would be a sum of three in 16 bits; with three casts it is a sum in
32 bits.

Equal gathers are merged as well if sharding saw several values: gathers whose operands are now one
cast, and those of the gradient of a layer with parallel attention and MLP, which differentiation
gathers for each.

Mutates the graph. Reads ``meta["val"]``; new nodes take the meta of what they replace.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.op_traits import collective_of, is_narrowing_cast, is_pure_view, is_returned
from sp_compiler.ir.rewriting import fake_value, inherit, make_like, merge_equal
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.trace.joint import JointGraph

_aten = torch.ops.aten


def share_casts(joint: JointGraph) -> None:
    """Merge equal casts to fewer bits, and gather their results instead of their operands.

    Args:
        joint: with a node per conversion, as :func:`sp_compiler.trace.joint.trace_joint` returns.
    """
    graph = joint.graph
    # Per direction: a forward value that backward also reads would have to be kept.
    backward = joint.backward_nodes()
    _merge_equal(graph, backward)
    for node in list(graph.nodes):
        if is_narrowing_cast(node):
            _gather_behind(node)
    # Gathers whose operands are now one cast, and casts of values that are also read locally.
    _merge_equal(graph, joint.backward_nodes())
    graph.lint()


def _merge_equal(graph: Graph, backward: Container[Node]) -> None:
    """Merge casts to fewer bits that are equal, and gathers."""
    nodes = list(graph.nodes)
    for is_backward in (False, True):
        equal = merge_equal(
            node
            for node in nodes
            if (node in backward) is is_backward
            and (is_narrowing_cast(node) or _gathers(node))
            and not is_returned(node)
        )
        for node in equal:
            # A value that several modules read belongs to none of them.
            inherit(node, node.args[0])
        report_of(Pass.SIMPLIFY).rewrote(len(equal), kind="merge_equal")


def _gather_behind(cast: Node) -> None:
    """``cast(view(gather(x)))`` -> ``view(gather(cast(x)))``, if the values between have no other
    users."""
    views: list[Node] = []
    source = cast.args[0]
    while is_pure_view(source) and len(source.users) == 1 and not _gathers(source):
        views.append(source)
        source = source.args[0]
    if not _gathers(source) or len(source.users) > 1:
        return
    shard = source.args[0]
    with cast.graph.inserting_before(cast):
        result = _call(cast, cast.target, (shard,), cast.kwargs)
        # The cast's meta has the placement of the gathered value.
        result.meta.pop("placement", None)
        if "placement" in shard.meta:
            result.meta["placement"] = shard.meta["placement"]
        inherit(result, shard)
        for call in (source, *reversed(views)):
            result = _call(call, call.target, (result, *call.args[1:]), call.kwargs)
        if not same_shape(result.meta["val"].stride(), cast.meta["val"].stride()):
            # The cast made a slice or an expanded value contiguous, which a view may need.
            result = _call(cast, _aten.clone.default, (result,), {})
    cast.replace_all_uses_with(result)
    for node in (cast, *views, source):
        node.graph.erase_node(node)
    report_of(Pass.SIMPLIFY).rewrote(kind="gather_behind_cast")


def _call(like: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
    """Add a call in place of ``like``."""
    about = {"name": target.__name__.partition(".")[0], "val": fake_value(target, args, kwargs)}
    return make_like(like.graph, target, args, kwargs, like=like, origin=Pass.SIMPLIFY, **about)


def _gathers(node: Node) -> bool:
    return collective_of(node) == "all_gather"
