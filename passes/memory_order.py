"""Copies in front of kernels that read memory in order, where an operand may lie otherwise.

::

    y = native_group_norm(x, ...)  -->  y = native_group_norm(clone(x, contiguous_format), ...)

Some kernels take the elements of an operand to be in order and do not look at its strides: they
compute with others, or read beyond the last. Eager operators make operands contiguous before they
call them; a trace has no copy for this, as its inputs are contiguous. But a region may be given
anything: a permuted result of the region before it, or a tensor of the user's. A convolution
returns channels last if its operand is, and an elementwise operator keeps the order of its first.

Whatever has the strides of the trace stays as it is: products, norms over rows, and what is
computed from them. The copy is printed as ``contiguous()``, which does nothing for most inputs.

Mutates the graph. Reads ``meta["val"]``; new nodes take the meta of what they copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.op_traits import FUSED_ATTENTION, MATMULS, collective_of
from sp_compiler.ir.rewriting import make_like
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.trace.joint import JointGraph

_aten = torch.ops.aten
_READ_IN_ORDER = {
    # operator -> positions of the operands, of which attention needs only the last dim in order
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    **dict.fromkeys(FUSED_ATTENTION, (0, 1, 2)),
    # the gradient, the operands of forward and its result
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 1, 2, 3, 4),
    _aten._scaled_dot_product_flash_attention_backward.default: (0, 1, 2, 3, 4),
    _aten._scaled_dot_product_cudnn_attention_backward.default: (0, 1, 2, 3, 4),
    _aten._scaled_dot_product_efficient_attention_backward.default: (0, 1, 2, 3),
}
# Their results are in order whatever their operands are.
_IN_ORDER = {
    *(product for product in MATMULS if product is not _aten.convolution.default),
    _aten.native_layer_norm.default, _aten.embedding.default, _aten._softmax.default,
}  # fmt: skip


def order_memory(joint: JointGraph) -> None:
    """Insert the copies.

    Args:
        joint: of one region, whose inputs may have any strides at run time.
    """
    if not any(node.target in _READ_IN_ORDER for node in joint.graph.nodes):
        return
    known: dict[Node, bool] = {}
    copies: dict[Node, Node] = {}
    for placeholder, kind in zip(joint.inputs, joint.input_kinds, strict=True):
        known[placeholder] = kind == "param"  # a rank's part of it is contiguous
    known.update(dict.fromkeys(joint.tangents, True))  # and so is what a region is given of these
    for node in list(joint.graph.nodes):
        if node.op != "call_function":
            continue
        for position in _READ_IN_ORDER.get(node.target, ()):
            operand = node.args[position]
            if isinstance(operand, Node) and not known[operand]:
                if operand not in copies:
                    copies[operand] = _copied(operand, node)
                    known[copies[operand]] = True
                node.update_arg(position, copies[operand])
        known[node] = _is_known(node, known)
    joint.graph.lint()


def _is_known(node: Node, known: dict[Node, bool]) -> bool:
    """Return whether the result has the strides of the trace, whatever the inputs have."""
    in_order = node.kwargs.get("memory_format") is torch.contiguous_format
    if node.target in _IN_ORDER or in_order or collective_of(node) is not None:
        return True
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    for operand in node.all_input_nodes:
        if not known[operand]:
            return False
        # The first operand that has all dims decides in which order they lie.
        value = operand.meta["val"]
        if (
            pointwise
            and isinstance(value, Tensor)
            and same_shape(value.shape, node.meta["val"].shape)
        ):
            return True
    return True


def _copied(operand: Node, reader: Node) -> Node:
    graph = reader.graph
    with graph.inserting_before(reader):  # the first of them
        copy = make_like(
            graph, _aten.clone.default, (operand,), {"memory_format": torch.contiguous_format},
            like=operand, origin=Pass.SIMPLIFY, val=operand.meta["val"].contiguous(),
        )  # fmt: skip
    report_of(Pass.SIMPLIFY).rewrote(kind="copy for a kernel that reads in order")
    return copy
