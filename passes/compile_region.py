"""From a sharded region to the class that runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from sp_compiler.codegen.module_text import CompiledRegion, emit
from sp_compiler.ir.forward_backward import SavedTensor
from sp_compiler.ir.op_traits import base
from sp_compiler.ir.program import Region
from sp_compiler.passes.memory.cut import Cut, cut
from sp_compiler.passes.memory.tag import Policy, tag_recompute
from sp_compiler.passes.simplify import simplify
from sp_compiler.trace.joint import JointGraph, trace_joint


def compile_region(
    region: Region,
    *,
    recompute: Policy,
    joint: JointGraph | None = None,
    how: Cut | None = None,
    paths: Sequence[str] = (),
    runs_last: bool = False,
) -> CompiledRegion:
    """Differentiate, simplify, tag, cut and print ``region``.

    ``recompute`` decides what backward keeps; ``joint`` is what :func:`differentiate` made of the
    region, if it was called before, and left as it is; ``paths`` are the layers of the model that
    use the region, for the docstring. Whether dropout masks are kept is in the region's graph.

    Backward starts with the region that ``runs_last``: what a loss head forgets is computed again
    at once. So ``"full"`` is ``"selective"`` there, if what that keeps would exist all at the same
    time anyway, as the results of several heads would not.
    """
    how = how or Cut()
    joint = differentiate(region) if joint is None else joint.copy()
    tag_recompute(joint, recompute)
    parts = cut(joint, how)
    if runs_last and recompute == "full":
        tag_recompute(joint, "selective")
        keeping = cut(joint, how)
        if _meet(keeping.saved, parts.step_backward):
            parts = keeping
        else:
            tag_recompute(joint, recompute)
    return emit(region, joint, parts, paths)


def _meet(saved: Sequence[SavedTensor], backward: Graph | None) -> bool:
    """Whether those of ``saved`` that ``backward`` computes again exist all at the same time."""
    if backward is None:
        return True
    nodes = list(backward.nodes)
    made, used = {node: position for position, node in enumerate(nodes)}, dict[Node, int]()
    for position, node in enumerate(nodes):
        used.update((base(source), position) for source in node.all_input_nodes)
    names = {tensor.name for tensor in saved}
    again = [node for node in used if node.meta.get("recomputed") and node.name in names]
    return not again or max(map(made.__getitem__, again)) < min(map(used.__getitem__, again))


def differentiate(region: Region) -> JointGraph:
    """The joint graph of ``region``, simplified, without tags."""
    joint = trace_joint(region)
    simplify(joint.graph)
    return joint
