"""One region through the passes behind sharding, without a program around it."""

from __future__ import annotations

from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.ir.program import Region
from sp_compiler.passes.memory.partition import partition
from sp_compiler.passes.memory.tag import tag_recompute
from sp_compiler.passes.simplify import simplify
from sp_compiler.trace.joint import JointGraph, trace_joint


def compile_region(region: Region, *, recompute: str) -> CompiledRegion:
    """Differentiate, simplify, tag, partition and print ``region``, which is sharded.

    ``recompute`` is the policy.
    """
    joint = differentiate(region)
    tag_recompute(joint, recompute)
    return CompiledRegion(region, partition(joint), joint, ())


def differentiate(region: Region) -> JointGraph:
    """The joint graph of ``region``, simplified, without tags."""
    joint = trace_joint(region)
    simplify(joint.graph)
    return joint
