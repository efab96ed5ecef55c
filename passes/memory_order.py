"""Insert copies before kernels that require contiguous operands, if an operand may have other
strides.

::

    y = native_group_norm(x, ...)  -->  y = native_group_norm(clone(x, contiguous_format), ...)

Some kernels assume that the elements of an operand are contiguous and ignore its strides: with
other strides they compute with wrong elements, or read out of bounds. Eager operators make operands
contiguous before they call them; a trace has no copy for this, because its inputs are contiguous.
But a region's arguments may have any strides: a permuted result of the region before it, or a
tensor or a parameter of the user's. A convolution returns channels last if an operand is, and an
elementwise operator keeps the memory format of its first. A custom operator may require contiguous
memory, too: a ``contiguous()`` before it was removed along with all copies.

Values that have the strides of the trace for any inputs stay as they are: matmuls, norms over rows,
and what is computed from them. The copy is printed as ``contiguous()``, which does nothing for most
inputs.

Mutates the graph. Reads ``meta["val"]``; new nodes take the meta of the nodes that they copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.op_traits import FUSED_ATTENTION, MATMULS, collective_of, is_tagged_pointwise
from sp_compiler.ir.rewriting import make_like
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.trace.joint import JointGraph

_aten = torch.ops.aten
_READ_IN_ORDER = {
    # operator -> positions of the operands; attention, and a view as another dtype, need only the
    # last dim contiguous
    _aten.view_as_complex.default: (0,),
    _aten.view.dtype: (0,),
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten.adaptive_max_pool3d_backward.default: (0, 1, 2),
    **dict.fromkeys(FUSED_ATTENTION, (0, 1, 2)),
    # the gradient, the operands of forward and its result
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 1, 2, 3, 4),
    _aten._scaled_dot_product_flash_attention_backward.default: (0, 1, 2, 3, 4),
    _aten._scaled_dot_product_cudnn_attention_backward.default: (0, 1, 2, 3, 4),
    _aten._scaled_dot_product_efficient_attention_backward.default: (0, 1, 2, 3),
}
_KNOWN_LIBRARIES = ("aten", "prims", "_c10d_functional", "sp_compiler")
# Their results are contiguous whatever their operands are.
_IN_ORDER = {
    *(product for product in MATMULS if product is not _aten.convolution.default),
    _aten.native_layer_norm.default, _aten.embedding.default, _aten._softmax.default,
}  # fmt: skip


def order_memory(joint: JointGraph) -> None:
    """Insert the copies.

    Args:
        joint: of one region, whose inputs may have any strides at run time.
    """
    known = dict.fromkeys(joint.inputs, False)
    # The runtime passes contiguous tangents.
    known.update(dict.fromkeys(joint.tangents, True))
    copies: dict[Node, Node] = {}
    for node in list(joint.graph.nodes):
        if node.op != "call_function":
            continue
        for operand in _read_in_order(node):
            if not known[operand]:
                if operand not in copies:
                    copies[operand] = _copied(operand, node)
                    known[copies[operand]] = True
                node.replace_input_with(operand, copies[operand])
        known[node] = _is_known(node, known)
    if copies:
        joint.graph.lint()


def _read_in_order(node: Node) -> list[Node]:
    """Return the operands whose strides the kernel of ``node`` may ignore."""
    if node.target in _READ_IN_ORDER:
        operands = [node.args[position] for position in _READ_IN_ORDER[node.target]]
        return [operand for operand in operands if isinstance(operand, Node)]
    if not isinstance(node.target, OpOverload) or node.target.namespace in _KNOWN_LIBRARIES:
        return []
    # An operand that is not contiguous in the trace was not made contiguous by the model.
    values = [(operand, operand.meta["val"]) for operand in node.all_input_nodes]
    return [each for each, val in values if isinstance(val, Tensor) and val.is_contiguous()]


def _is_known(node: Node, known: dict[Node, bool]) -> bool:
    """Return whether the result has the strides of the trace, whatever the inputs have."""
    in_order = node.kwargs.get("memory_format") is torch.contiguous_format
    if node.target in _IN_ORDER or in_order or collective_of(node) is not None:
        return True
    for operand in node.all_input_nodes:
        if not known[operand]:
            return False
        # The first operand that has all dims determines the order of dims in memory.
        if is_tagged_pointwise(node) and _has_all_dims(operand, node):
            return True
    return True


def _has_all_dims(operand: Node, node: Node) -> bool:
    value = operand.meta["val"]
    result = pytree.tree_leaves(node.meta["val"])[0]  # several have one shape
    return (
        isinstance(value, Tensor)
        and same_shape(value.shape, result.shape)
        # An expanded dim has stride 0 and no position in memory: the next operand decides.
        and 0 not in value.stride()
    )


def _copied(operand: Node, reader: Node) -> Node:
    graph = reader.graph
    with graph.inserting_before(reader):  # the first of them
        copy = make_like(
            graph, _aten.clone.default, (operand,), {"memory_format": torch.contiguous_format},
            like=operand, origin=Pass.SIMPLIFY, val=operand.meta["val"].contiguous(),
        )  # fmt: skip
    report_of(Pass.SIMPLIFY).rewrote(kind="copy for a kernel that needs contiguous memory")
    return copy
