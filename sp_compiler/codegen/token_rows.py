"""Computation on rows of tokens instead of 3-d views, so that redundant views are not printed.

A model computes on (batch, sequence, hidden), its matmuls on rows of tokens. In between,
pointwise operators can work on the rows::

    c_fc = addmm(...)                      c_fc = addmm(...)
    c_fc_3d = view(c_fc, (8, 128, 64))     tanh = tanh(c_fc)
    tanh = tanh(c_fc_3d)             ->    c_proj = mm(tanh, w)
    tanh_2d = view(tanh, (1024, 64))
    c_proj = mm(tanh_2d, w)

Each element is computed from the same elements by the same kernel, in the same memory order.

The same holds for a split along the last dim whose parts are all reshaped::

    qkv_3d = view(qkv, (8, 128, 96))
    q, k, v = split(qkv_3d, 32, 2)           q, k, v = split(qkv, 32, -1)
    q_4d = view(q, (8, 128, 4, 8))     ->    q_4d = view(q, (8, 128, 4, 8))
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, tensor_operands
from sp_compiler.ir.op_traits import RESHAPES, draws, is_tagged_pointwise
from sp_compiler.ir.rewriting import copy_graph, make_like
from sp_compiler.ir.symbolic import is_open, same_shape

aten = torch.ops.aten


def on_token_rows(graph: Graph) -> Graph:
    """Return a copy of ``graph`` for printing; its outputs have their original shapes."""
    copy = copy_graph(graph)
    returned = set(copy.output_node().all_input_nodes)
    for node in list(copy.nodes):
        if node in returned:  # its shape and strides are the caller's
            continue
        if node.target in RESHAPES:
            _skip_view(node)
        elif _is_flat_split(node):
            _split_rows(node)
        elif (rows := _rows(node)) is not None:
            _compute_on_rows(node, rows)
    # Backwards, because a view may be the only user of the view before it.
    for node in reversed(list(copy.nodes)):
        if node.target in RESHAPES and not node.users:
            copy.erase_node(node)
    return copy


def _skip_view(node: Node) -> None:
    """``view(view(x, a), b)`` -> ``view(x, b)``, or ``x`` if that has this shape."""
    source = node.args[0]
    if source.target in RESHAPES:
        source = source.args[0]
        node.replace_input_with(node.args[0], source)
    if same_shape(source.meta["val"].shape, node.meta["val"].shape):
        node.replace_all_uses_with(source)


def _rows(node: Node) -> torch.Size | None:
    """Return the shape of the rows that all operands of ``node`` are views of, else ``None``."""
    value = node.meta.get("val")
    # Random numbers depend on the shape in which they are drawn.
    if not is_tagged_pointwise(node) or draws(node) or not isinstance(value, Tensor):
        return None
    rows: torch.Size | None = None
    for operand in tensor_operands(node):
        shape = operand.meta["val"].shape
        if not shape:  # a scalar broadcasts over rows too
            continue
        source = operand.args[0] if operand.target in RESHAPES else None
        if source is None or not same_shape(shape, value.shape) or not _is_rows(source, shape):
            return None
        if rows is not None and not same_shape(rows, source.meta["val"].shape):
            return None
        rows = source.meta["val"].shape
    return rows


def _is_rows(source: Node, shape: Collection[Any]) -> bool:
    """Return whether ``source`` is ``shape`` with all dims but the last merged into one."""
    value = source.meta["val"]
    if any(map(is_open, (*value.shape, *shape))) or value.dim() != 2 or len(shape) < 3:
        return False
    return bool(value.shape[-1] == list(shape)[-1] and value.is_contiguous())


def _compute_on_rows(node: Node, rows: torch.Size) -> None:
    """``op(view(x, s), view(y, s))`` -> ``view(op(x, y), s)``."""
    value = node.meta["val"]
    for operand in dict.fromkeys(tensor_operands(node)):
        if operand.target in RESHAPES:
            node.replace_input_with(operand, operand.args[0])
    # The view moves after the operator, so that the next one may work on the rows in turn.
    with node.graph.inserting_after(node):
        args = (node, list(value.shape))
        view = make_like(node.graph, aten.view.default, args, like=node, origin=Pass.CODEGEN)
    node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)
    _retype(node, value.new_empty(rows))


def _is_flat_split(node: Node) -> bool:
    """Return whether a reshape before a split is redundant with those after it.

    It must not change the last dim, which is split, and all parts must be reshaped.
    """
    if node.target is not aten.split_with_sizes.default or node.args[0].target not in RESHAPES:
        return False
    source = node.args[0].args[0]
    # That reshape is the end of a torch.matmul, which is printed as one call with it.
    if source.target is aten.bmm.default:
        return False
    shape, rows = node.args[0].meta["val"].shape, source.meta["val"].shape
    along = arguments(node)["dim"] % len(shape)
    if along != len(shape) - 1 or not same_shape(shape[-1:], rows[-1:]):
        return False
    # A part that is used directly would have another shape.
    uses = [user for part in node.users for user in part.users]
    return all(user.target in RESHAPES for user in uses)


def _split_rows(node: Node) -> None:
    """``split(view(x, s), sizes, last)[i]`` -> ``split(x, sizes, -1)[i]``."""
    view, sizes, *_ = node.args
    rows = view.args[0]
    node.args = (rows, sizes, -1)
    # Split by torch itself, so that the parts have the right strides.
    parts = rows.meta["val"].split(sizes, -1)
    node.meta["val"] = [*parts]
    for part in node.users:
        _retype(part, parts[part.args[1]])


def _retype(node: Node, value: Tensor) -> None:
    """Change the value of ``node`` to rows with the same last dim."""
    num_dims, placement = node.meta["val"].dim(), node.meta.get("placement")
    node.meta["val"] = value
    # The dim of a placement is one of the old shape; if several dims are merged into rows, it may
    # have no equivalent.
    if placement is not None and placement.is_sharded:
        del node.meta["placement"]
        if placement.dim == num_dims - 1:
            node.meta["placement"] = replace(placement, dim=value.dim() - 1)
