"""Split a backward in two: gradients of inputs, needed at once, and of parameters, which may be
deferred (the B/W split of zero-bubble schedules).

::

    grad_y = ...                           inputs:   grad_y = ...
    grad_w = mm(t(grad_y), x)        ->              grad_x = mm(grad_y, w)
    grad_x = mm(grad_y, w)                           return grad_x, (grad_y, x)
                                           weights:  grad_w = mm(t(grad_y), x)

A pipeline stage runs the second function while it would wait for its neighbours (Qi et al., "Zero
Bubble Pipeline Parallelism", arXiv 2401.10241). A value that both functions need is computed by the
first and passed on: nothing runs twice. Values that only weight gradients need, such as an
activation that is recomputed or gathered again for ``grad_w``, are left to the second.

Nodes keep their meta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.forward_backward import Partitioned, SplitBackward
from sp_compiler.ir.fx import ancestors, is_getitem
from sp_compiler.ir.program import RefKind
from sp_compiler.ir.rewriting import subgraph


def split_backward(parts: Partitioned, input_kinds: Sequence[RefKind]) -> Partitioned:
    """Copy ``parts`` with its :attr:`~sp_compiler.ir.forward_backward.Partitioned.split`.

    Args:
        parts: without overlap, so that a collective and its wait are together.
        input_kinds: of the region's inputs, in order.
    """
    graph = parts.step_backward
    if graph is None:
        return parts
    grads: Sequence[Node | None] = graph.output_node().args[0]
    of_parameters = [kind == "param" for kind in input_kinds]
    for_inputs = [None if own else grad for grad, own in zip(grads, of_parameters, strict=True)]
    for_weights = [grad if own else None for grad, own in zip(grads, of_parameters, strict=True)]
    # Everything that inputs need is in the first function, even if parameters need it too.
    first = ancestors(node for node in for_inputs if node is not None)
    # A tuple cannot be passed on: its parts belong to the function that has the operator.
    first |= {node for node in graph.nodes if is_getitem(node) and node.args[0] in first}
    needed = ancestors([node for node in for_weights if node is not None], first)
    second = [n for n in graph.nodes if n in needed and n not in first and n.op != "placeholder"]
    read = {operand for node in second for operand in node.all_input_nodes}.union(for_weights)
    # In graph order, so that the text is the same on all ranks.
    handed = [node for node in graph.nodes if node in read and node not in second]
    report_of(Pass.SPLIT_BACKWARD).rewrote(len(second), kind="delayed")
    inputs = subgraph(
        graph.find_nodes(op="placeholder"),
        [node for node in graph.nodes if node in first and node.op == "call_function"],
        [*for_inputs, *handed],
    )
    weights = subgraph(handed, second, for_weights)
    return replace(parts, split=SplitBackward(inputs, weights))
