"""From a sharded region to the class that runs it."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.ir.program import Region
from sp_compiler.passes.memory.partition import SplitOptions, split_by_policy
from sp_compiler.passes.simplify import simplify
from sp_compiler.trace.joint import JointGraph, trace_joint


def compile_region(
    region: Region,
    *,
    recompute: str,
    joint: JointGraph | None = None,
    options: SplitOptions | None = None,
    paths: Sequence[str] = (),
) -> CompiledRegion:
    """Differentiate, simplify, tag, cut and print ``region``.

    ``recompute`` is the policy of what backward keeps; ``joint`` is what :func:`differentiate` made
    of the region, if it was called before, and left as it is; ``paths`` are the layers of the model
    that use the region, for the docstring. Whether dropout masks are kept is in the region's graph.
    """
    joint = differentiate(region) if joint is None else joint.copy()
    parts = split_by_policy(joint, recompute, options or SplitOptions())
    return CompiledRegion(region, joint, parts, tuple(paths))


def differentiate(region: Region) -> JointGraph:
    """The joint graph of ``region``, simplified, without tags."""
    joint = trace_joint(region)
    simplify(joint.graph)
    return joint
