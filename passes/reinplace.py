"""Let pointwise operators write into an operand that nothing else reads.

::

    scores = matmul(q, k)                        scores = matmul(q, k)
    scaled = mul(scores, scale)           ->     scaled = mul_(scores, scale)
    masked = masked_fill(scaled, mask, -inf)     masked = masked_fill_(scaled, mask, -inf)

Each then touches no new memory, which on a CPU costs more than the arithmetic, and ``masked_fill``
is a fill without the copy before it. The kernels are the same, and so is every number.

For code that runs as it is generated: Inductor fuses such operators into one kernel. The last pass,
behind the checks of placements: the passes before may move a node as long as its operands are there
still, and copy the computation of a value to where it is read. Mutates the graphs; reads
``meta["val"]``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import carries_gradient, in_place_form
from sp_compiler.ir.op_traits import may_be_overwritten, same_layout
from sp_compiler.ir.symbolic import same_shape

aten = torch.ops.aten
# Of these either operand can be written into: a sum of two numbers is one in either order.
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


def reinplace(parts: Partitioned, backend: str) -> Partitioned:
    """Return ``parts``, in whose functions operators write in place where they can.

    Args:
        backend: of which all but "eager" are given ``parts`` as they are.
    """
    for graph in parts.functions.values() if backend == "eager" else ():
        for node in list(graph.nodes):
            if torch.Tag.pointwise in getattr(node.target, "tags", ()):
                _write(node)
        graph.lint()
    return parts


def _write(node: Node) -> None:
    """Let ``node`` write into an operand, where there is one that may be overwritten."""
    operator = in_place_form(node.target)
    if operator is None:
        return
    swaps = node.target in _COMMUTATIVE and len(node.args) == 2 and not node.kwargs
    for index in range(2 if swaps else 1):
        written, *others = node.args[index:] + node.args[:index]
        if isinstance(written, Node) and _may_write(node, written):
            node.target, node.args = operator, (written, *others)
            report_of(Pass.REINPLACE).rewrote(kind="in place")
            return


def _may_write(node: Node, written: Node) -> bool:
    value, old = node.meta["val"], written.meta["val"]
    if not isinstance(old, Tensor) or not carries_gradient(value):
        return False
    # Of a number, or one a row, nothing is gained, and plain arithmetic reads better.
    if not value.dim() or same_shape(value.shape[-1:], [1]):
        return False
    return same_layout(node, written) and may_be_overwritten(written)
