"""Memory that overlap may use."""

from __future__ import annotations

from collections.abc import Mapping

from sp_compiler.cost.step_memory import functions_room_bytes
from sp_compiler.cost.step_walk import Phase
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.options import CompileOptions
from sp_compiler.passes.memory.tag_program import TaggedProgram


def overlap_room_bytes(
    tagged: TaggedProgram, split: Mapping[str, Partitioned], options: CompileOptions
) -> dict[str, dict[Phase, int]]:
    """Return the peak that each region's functions may have with overlap, if it may be higher than
    without.

    In a pipeline it may not: the bytes around a call depend on the schedule of the microbatches.
    """
    if options.tables_apart or not options.overlap or options.tp == 1:
        return {}
    example = Concretizer(tagged.program.sizes)
    return functions_room_bytes(
        example.program(tagged.program),
        {name: example.partitioned(parts) for name, parts in split.items()},
        {name: joint.differentiable for name, joint in tagged.joints.items()},
        options.tp,
        options.budget_bytes,
    )
