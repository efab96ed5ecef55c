"""Recurrent layers with dropout between them as one operator per layer and separate dropouts."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.op_traits import draws
from sp_compiler.ir.rewriting import insert_call, replace_results

_aten = torch.ops.aten
RECURRENT = tuple(
    getattr(getattr(_aten, name), overload)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
)


def separate_layers(node: Node) -> None:
    """``lstm(x, layers=2, dropout=p)`` -> ``lstm(dropout(lstm(x, layers=1)), layers=1)``.

    The states after the last step, one per layer and direction, are concatenated again. An operator
    without dropout does not change.
    """
    if not draws(node):
        return
    args = arguments(node)
    num_layers = args["num_layers"]
    states = args["hx"] if isinstance(args["hx"], (list, tuple)) else [args["hx"]]
    per_layer = len(args["params"]) // num_layers
    directions = 2 if args["bidirectional"] else 1
    first = "input" if "input" in args else "data"  # packed sequences are stored in one tensor
    last_states: list[list[Node]] = [[] for _ in states]
    value = args[first]
    for layer in range(num_layers):
        if layer:
            dropped = _call(node, _aten.native_dropout.default, value, args["dropout"], True)
            value = _call(node, operator.getitem, dropped, 0)
        rows = (layer * directions, (layer + 1) * directions)
        own = [_call(node, _aten.slice.Tensor, state, 0, *rows) for state in states]
        changes = {
            first: value,
            "hx": own if len(states) > 1 else own[0],
            "params": args["params"][layer * per_layer : (layer + 1) * per_layer],
            "num_layers": 1,
            "dropout": 0.0,
        }
        results = _call(node, node.target, *(args | changes).values())
        value = _call(node, operator.getitem, results, 0)
        for position, known in enumerate(last_states, 1):
            known.append(_call(node, operator.getitem, results, position))
    results_of_all = [value, *(_call(node, _aten.cat.default, s, 0) for s in last_states)]
    replace_results(node, results_of_all)


def _call(node: Node, target: Any, *args: Any) -> Node:
    return insert_call(node, target, args, origin=Pass.NORMALIZE)
