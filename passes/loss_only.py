"""Keep only the loss of a model that also returns other values.

::

    return (loss, logits, hidden)    ->    return (loss, None, None)

A step of a pipeline returns only its loss. Without this pass the last stage would keep the logits
of each microbatch in flight as outputs, and could not compute the loss head in chunks.
"""

from __future__ import annotations

from torch.fx import Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.program import loss_position
from sp_compiler.ir.rewriting import erase_dead


def loss_only(captured: Captured) -> None:
    """Replace the outputs of ``captured`` other than its loss by ``None``, in place.

    Values that forward stores in attributes are dropped too; buffers are still written. A model
    without a loss stays as it is.
    """
    kept = loss_position(captured.out_spec, _scalars(captured))
    if kept is None:
        return
    output = captured.module.graph.output_node()
    returned = list(output.args[0])
    others = [
        position
        for position, leaf in enumerate(captured.outputs)
        if isinstance(leaf, Node) and position != kept
    ]
    for position in others:
        returned[position] = None
    output.args = (tuple(returned),)
    report_of(Pass.LOSS_ONLY).rewrote(len(others), kind="output that no step returns")
    erase_dead(captured.module.graph)
    captured.drop_unused_placeholders()


def _scalars(captured: Captured) -> list[int]:
    leaves = captured.outputs[: captured.out_spec.num_leaves]
    return [
        position
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, Node) and leaf.meta["val"].dim() == 0 and leaf.meta["requires_grad"]
    ]
