"""Do not compute unused rows of a wide matmul.

::

    logits = linear(x, w).float()              logits = linear(x[:, :-1], w).float()
    loss(logits[:, :-1], labels[:, 1:])   ->   loss(logits, labels[:, 1:])

If labels are shifted, the rows of the logits with a label are sliced. Slicing the operand of the
matmul instead avoids a copy of the logits and a padding of their gradient.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, calls, is_call, shape_of, tensor_operands
from sp_compiler.ir.rewriting import insert_call, replace_with
from sp_compiler.ir.symbolic import example_number, same_shape

_aten = torch.ops.aten


def slice_before_products(graph: Graph) -> None:
    """``slice(f(linear(x, w)))`` over rows -> ``f(linear(slice(x), w))`` with pointwise ``f``."""
    for node in calls(graph, _aten.slice.Tensor):
        chain = _chain(node)
        if not chain:
            continue
        value = chain[-1].args[0]
        for call in [node, *reversed(chain)]:
            args = (value, *call.args[1:])
            value = insert_call(node, call.target, args, call.kwargs, origin=Pass.NORMALIZE)
        replace_with(node, value)


def _chain(node: Node) -> list[Node]:
    """Return the calls before the slice ``node`` up to a matmul; empty if they cannot be
    swapped."""
    dim, rank = arguments(node)["dim"], len(shape_of(node))
    chain = [node.args[0]]
    while len(chain[-1].users) == 1 and dim % rank != rank - 1:
        last = chain[-1]
        if is_call(last, _aten.linear.default):
            return chain if _is_wide(last) and last.args[0].op == "call_function" else []
        if not _is_elementwise(last):
            break
        chain.append(last.args[0])
    return []


def _is_elementwise(node: Node) -> bool:
    """Return whether an element depends only on that of the first argument and on values shared by
    all rows."""
    # One result of several is taken by operator.getitem, which is not an OpOverload.
    if not isinstance(node.target, OpOverload) or not isinstance(node.args[0], Node):
        return False
    pointwise = torch.Tag.pointwise in node.target.tags or is_call(node, _aten._to_copy.default)
    # Operands with repetition: in ``x * x`` the second factor would keep all rows.
    rest = tensor_operands(node)[1:]
    # No guard recorded: sizes that are equal in the example by chance may differ in other calls.
    same = same_shape(shape_of(node.args[0]), shape_of(node))
    return pointwise and same and all(len(shape_of(operand)) < 2 for operand in rest)


def _is_wide(product: Node) -> bool:
    """Return whether a matmul has wider rows than its operand; with a vector it has none."""
    x, weight = product.args[:2]
    depth, columns = (example_number(shape_of(each)[-1]) for each in (x, product))
    return len(shape_of(weight)) == 2 and bool(columns > depth)
