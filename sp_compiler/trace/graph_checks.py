"""Checks that refuse a captured graph, with the line of the user's model.

Without them, an error would come only after parameters are placed, from a kernel or a later pass,
and would not name a line of the user's model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import CaptureError, UnsupportedError
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.text import describe_tensor

_aten = torch.ops.aten
_NORMS = {
    _aten.layer_norm.default: ("input", "weight", "bias"),
    _aten.group_norm.default: ("input", "weight", "bias"),
    _aten.batch_norm.default: ("input", "weight", "bias", "running_mean", "running_var"),
}
# Operator -> the arguments that must have one dtype.
_ALIKE = {
    **_NORMS,
    _aten.linear.default: ("input", "weight", "bias"),
    _aten.addmm.default: ("self", "mat1", "mat2"),
    _aten.index_put.default: ("self", "values"),
    _aten.index_add.default: ("self", "source"),
    _aten.binary_cross_entropy.default: ("self", "target"),
}
_CLASSES = (_aten.cross_entropy_loss.default, _aten.nll_loss_nd.default, _aten.nll_loss.default)
_INDICES = (torch.int64, torch.int32)
_HALVES = (torch.bfloat16, torch.float16)


def refuse_subgraphs(graph: Graph) -> None:
    """Raise an error for control flow such as ``cond`` and ``scan``.

    Sharding rules do not apply inside a subgraph. Those of grad mode and autocast are inlined by
    now.
    """
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UnsupportedError(
                f"operator {node.target} runs a subgraph, which sp_compiler cannot shard: "
                "write it with tensor operations, such as torch.where in place of torch.cond\n"
                + node_origin(node)
            )


def refuse_layouts(graph: Graph) -> None:
    """Raise an error for sparse and nested tensors: the sharding rules, and the counts of bytes
    that stay alive, are those of dense ones."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and value.layout is not torch.strided:
                raise UnsupportedError(
                    f"{node.name} is a tensor with the layout {value.layout}, which sp_compiler "
                    "cannot shard: pass and compute dense tensors (x.to_dense(), or a padded one "
                    "and a mask), or use index_add and scatter_add with indices and values\n"
                    + node_origin(node)
                )


def check_dtypes(graph: Graph, inputs: dict[str, Any]) -> None:
    """Raise an error for an operator that has no kernel for its dtypes; fake tensors accept them.

    Args:
        graph: as captured.
        inputs: the user's values by name of the argument, for the message.

    Raises:
        CaptureError: names the operator, its module and line, its dtypes and the inputs.
    """
    for node in graph.nodes:
        wrong = _wrong(node)
        if not wrong:
            continue
        given = ", ".join(
            f"{name} {describe_tensor(value)}"
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        )
        raise CaptureError(
            f"{node.target} {wrong}\n{node_origin(node)}\n"
            f"  inputs: {given or 'no tensors'}\n"
            "  what to do: pass inputs of the dtype that the model computes in, or convert the "
            "model, as for a call without compiling"
        )


def _wrong(node: Node) -> str:
    """Return what is wrong with the dtypes of an operator, as text; "" if it has a kernel."""
    if node.op != "call_function":
        return ""
    if node.target in _CLASSES:
        # A floating-point target holds class probabilities.
        target = _value(arguments(node)["target"])
        if target.is_floating_point() or target.dtype in (torch.int64, torch.uint8):
            return ""
        return f"takes classes of int64 or uint8, and its target is {describe_tensor(target)}"
    if node.target is _aten.embedding.default:
        # From torch 2.13 on fake tensors reject them too.
        indices = _value(arguments(node)["indices"])
        allowed = indices.dtype in _INDICES
        return "" if allowed else f"takes int64 or int32, not {describe_tensor(indices)}"
    operands = {
        name: value
        for name in _ALIKE.get(node.target, ())
        if (value := _value(arguments(node).get(name))) is not None
    }
    # Norms of half precision may have float32 weights, which their kernels take.
    kinds = {value.dtype for value in operands.values()}
    if node.target in _NORMS and operands["input"].dtype in _HALVES:
        kinds = kinds - {operands["input"].dtype} - {torch.float32} | {torch.float32}
    if len(kinds) < 2:
        return ""
    return "takes one dtype, and gets " + ", ".join(
        f"{name} {describe_tensor(value)}" for name, value in operands.items()
    )


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else None
