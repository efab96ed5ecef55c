"""Make operators between a loss head's matmul and its loss work on rows.

::

    y = view(linear(x, w), (b, s, v))            y = linear(x, w)
    z = tanh(y)                            ->    z = tanh(y)
    loss(view(z, (b * s, v)))                    loss(z)

A chunk of rows is contiguous in (b * s, v) but not in (b, s, v). Tokens are flattened to rows by
the sharding rules, in forward and backward. Mutates the graph; new nodes get the meta of those that
they replace, without the placement, which refers to a dim.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import (
    arguments,
    is_call,
    placements_of,
    reduced_dims,
    shape_of,
    tensor_operands,
)
from sp_compiler.ir.op_traits import RESHAPES
from sp_compiler.ir.rewriting import copy_call, fake_value, make_like
from sp_compiler.ir.symbolic import is_open
from sp_compiler.passes.chunks.row_rules import factors_of
from sp_compiler.passes.normalize.negative_dims import make_negative
from sp_compiler.passes.simplify import simplify
from sp_compiler.rules.registry import LocalCall, operand_shapes, result_shapes
from sp_compiler.rules.strategies import Offers, Strategy, strategies
from sp_compiler.rules.table import local_call

aten = torch.ops.aten
_SUMS = (aten.sum.default, aten.sum.dim_IntList)


def flatten_rows(graph: Graph, products: Collection[Node]) -> None:
    """Flatten the token dims of values computed from ``products`` that are as large as those.

    All of their sizes must be fixed.
    """
    shapes = {shape_of(product) for product in products}
    changed = False
    # In graph order: after a flattened operator comes a view, which its readers then see.
    for node in list(graph.nodes):
        views = [x for x in node.all_input_nodes if _rows_of(x) in shapes]
        if node.op != "call_function" or node.target in RESHAPES or not views:
            continue
        if _sums_tokens(node):
            _flatten_sum(node)
            changed = True
        elif isinstance(node.meta["val"], Tensor) and (way := _by_rows(node, views[0])):
            _flatten(node, way)
            changed = True
    if changed:
        simplify(graph)


def _rows_of(node: Node) -> tuple[int, ...] | None:
    """Return the shape of the rows (b * s, v) that ``node`` is a view (b, s, v) of."""
    if node.target not in RESHAPES:
        return None
    rows, shape = shape_of(node.args[0]), shape_of(node)
    # Open sizes, which cannot be looked up, belong to values other than those to be cut.
    if len(rows) != 2 or len(shape) < 3 or any(map(is_open, rows)):
        return None
    return rows if rows[-1] == shape[-1] else None


def _sums_tokens(node: Node) -> bool:
    """Return whether ``node`` sums over all tokens, as the gradients of a bias (v,) and of a factor
    of all logits do."""
    if not is_call(node, *_SUMS):
        return False
    tokens = range(len(shape_of(node.args[0])) - 1)
    return set(tokens).issubset(reduced_dims(node))


def _flatten_sum(node: Node) -> None:
    graph, x = node.graph, arguments(node)["self"]
    rank = len(shape_of(x))
    with graph.inserting_before(node):
        flat = _view(x, _flat(shape_of(x), rank - 1))
        dims = [0, 1] if rank - 1 in reduced_dims(node) else [0]
        args = (flat, dims) if is_call(node, aten.sum.dim_IntList) else (flat,)
        kwargs = dict(node.kwargs)
        rows = copy_call(graph, node, args, kwargs, node.name)
        rows.meta |= {"val": fake_value(node.target, rows.args, kwargs), "origin": Pass.CHUNK}
        # The placement names a dim of the unflattened value; the view after it has that placement.
        rows.meta.pop("placement", None)
        node.replace_all_uses_with(_view(rows, shape_of(node), node))
    graph.erase_node(node)


def _by_rows(node: Node, view: Node) -> Strategy | None:
    """Return the strategy to run ``node`` on flattened rows; ``None`` if there is none."""
    tokens = shape_of(view)[:-1]
    rule = factors_of(node)
    # A conversion has the sharded dim among its arguments, as text.
    if rule is None or placements_of(node) is not None:
        return None

    def rows(shape: tuple[int, ...]) -> int:
        return len(tokens) if shape[: len(tokens)] == tokens else 0

    # The sharding rules know which operators may work on rows: for one rank, they offer only that.
    offers = Offers(
        world_size=1,
        shardable=lambda factor: False,
        segmentations=lambda factor: (),
        operand_rows=[rows(shape) for shape in operand_shapes(node)],
        result_rows=[rows(shape) for shape in result_shapes(node)],
    )
    ways = strategies(rule, len(rule.operands), len(rule.results), offers)
    return next((way for way in ways if way.results[0].kind == "T"), None)


def _flatten(node: Node, way: Strategy) -> None:
    graph, (shape,) = node.graph, result_shapes(node)
    if node.target.namespace == "aten":
        # Autograd's nodes count from the front: ``sum(x, [2])`` where x was broadcast.
        make_negative(node)
    with graph.inserting_before(node):
        new: dict[Node, Node] = {}
        for operand, placement in zip(tensor_operands(node), way.operands, strict=True):
            new[operand] = operand
            if placement.kind == "T":
                new[operand] = _view(operand, _flat(shape_of(operand), placement.dim))
        args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
        flat = _flat(shape, way.results[0].dim)
        bound = map_arg(arguments(node), new.__getitem__)
        call = LocalCall(node, bound, way.operands, way.results, (flat,), 1)
        target, args, kwargs = local_call(call, args, kwargs)
        rows = copy_call(graph, node, args, kwargs, node.name)
        rows.target = target
        rows.meta |= {"val": fake_value(target, args, kwargs), "origin": Pass.CHUNK}
        rows.meta.pop("placement", None)
        node.replace_all_uses_with(_view(rows, shape, node))
    graph.erase_node(node)


def _flat(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (math.prod(shape[:count]), *shape[count:])


def _view(x: Node, shape: tuple[int, ...], like: Node | None = None) -> Node:
    args = (x, list(shape))
    # Rows that are expanded over the tokens are not contiguous: they are copied.
    target = aten.view.default if x.meta["val"].is_contiguous() else aten.reshape.default
    value = fake_value(target, args, {})
    name = f"{x.name}_view"
    view = make_like(x.graph, target, args, like=like or x, origin=Pass.CHUNK, name=name, val=value)
    if like is None:
        view.meta.pop("placement", None)
    return view
