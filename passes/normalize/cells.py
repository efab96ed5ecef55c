"""Recurrent cells and bilinear forms as matmuls."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, shape_of
from sp_compiler.ir.rewriting import insert_call, replace_with

_aten = torch.ops.aten


def gru_cell(node: Node) -> None:
    """Two projections with three gates each, which are sharded gate by gate."""
    args = arguments(node)
    state = args["hx"]
    of_input = _gates(node, args["input"], args["w_ih"], args["b_ih"])
    of_state = _gates(node, state, args["w_hh"], args["b_hh"])
    reset, update = (
        _call(node, _aten.sigmoid.default, _call(node, _aten.add.Tensor, first, second))
        for first, second in zip(of_input[:2], of_state[:2], strict=True)
    )
    remembered = _call(node, _aten.mul.Tensor, reset, of_state[2])
    new = _call(node, _aten.tanh.default, _call(node, _aten.add.Tensor, of_input[2], remembered))
    # As torch orders it: the update gate says how much of the old state stays.
    kept = _call(node, _aten.mul.Tensor, update, _call(node, _aten.sub.Tensor, state, new))
    replace_with(node, _call(node, _aten.add.Tensor, new, kept))


def _gates(node: Node, x: Node, weight: Node, bias: Node | None) -> list[Node]:
    width = shape_of(weight)[0] // 3
    given = (x, weight) if bias is None else (x, weight, bias)
    projected = _call(node, _aten.linear.default, *given)
    parts = _call(node, _aten.split_with_sizes.default, projected, [width] * 3, -1)
    return [_call(node, operator.getitem, parts, gate) for gate in range(3)]


def bilinear(node: Node) -> None:
    """``x1 @ W[o] @ x2`` for every output o: one matmul with all of ``W``, then sums of rows."""
    args = arguments(node)
    first, second, weight = args["input1"], args["input2"], args["weight"]
    outputs, width, other = shape_of(weight)
    # Outputs stay outermost, so that a rank has all rows of its own outputs.
    matrices = _call(node, _aten.transpose.int, weight, -2, -1)
    matrices = _call(node, _aten.reshape.default, matrices, [outputs * other, width])
    rows = _call(node, _aten.linear.default, first, matrices)
    rows = _call(node, _aten.reshape.default, rows, [*shape_of(first)[:-1], outputs, other])
    second = _call(node, _aten.unsqueeze.default, second, -2)
    products = _call(node, _aten.mul.Tensor, rows, second)
    result = _call(node, _aten.sum.dim_IntList, products, [-1])
    if args["bias"] is not None:
        result = _call(node, _aten.add.Tensor, result, args["bias"])
    replace_with(node, result)


def _call(node: Node, target: Any, *args: Any) -> Node:
    return insert_call(node, target, args, origin=Pass.NORMALIZE)
