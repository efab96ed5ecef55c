"""From a sharded region to the class that runs it."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compiler.codegen import CompiledRegion, emit
from sp_compiler.joint import JointGraph, trace_joint
from sp_compiler.passes.partition import partition
from sp_compiler.passes.peephole import simplify
from sp_compiler.passes.recompute import Policy, tag_recompute
from sp_compiler.program import Region


def compile_region(
    region: Region,
    *,
    recompute: Policy,
    paths: Sequence[str] = (),
    loss_output: int | None = None,
) -> CompiledRegion:
    """Differentiate, simplify, tag, cut and print ``region``.

    ``recompute`` decides what backward keeps; ``paths`` are the layers of the model that use the
    region, for the docstring; ``loss_output`` is the output that is the model's loss. Whether
    dropout masks are kept is in the region's graph already.
    """
    joint = differentiate(region)
    tag_recompute(joint, recompute)
    return emit(region, joint, partition(joint, loss_output), paths)


def differentiate(region: Region) -> JointGraph:
    """The joint graph of ``region``, simplified, without tags."""
    joint = trace_joint(region)
    simplify(joint.graph)
    joint.module.recompile()
    return joint
