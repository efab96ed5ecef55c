"""Facts of a program for overlap: the memory that it may use, and consecutive calls."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from sp_compiler.cost.step_memory import Room, functions_room
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.options import CompileOptions
from sp_compiler.passes.memory.tag_program import TaggedProgram


def overlap_room(
    tagged: TaggedProgram,
    split: Mapping[str, Partitioned],
    options: CompileOptions,
    state_bytes: int,
) -> dict[str, Room]:
    """Return the peaks that each region's functions may have with overlap, if they may be higher
    than without.

    In a pipeline they may not: the bytes around a call depend on the schedule of the microbatches.

    Args:
        state_bytes: part of ``device_memory`` that is not for activations.
    """
    if options.tables_apart or not options.overlap or options.tp == 1:
        return {}
    example = Concretizer(tagged.program.sizes)
    device_bytes = options.device_bytes
    return functions_room(
        example.program(tagged.program),
        {name: example.partitioned(parts) for name, parts in split.items()},
        {name: joint.differentiable for name, joint in tagged.joints.items()},
        options.tp,
        options.budget_bytes,
        None if device_bytes is None else device_bytes - state_bytes,
    )


def regions_in_a_row(tagged: TaggedProgram, options: CompileOptions) -> frozenset[str]:
    """Return names of the regions with two consecutive calls, so that the backward of one may
    recompute for the other."""
    # Not in a pipeline, for the reason above. Nor with offload or FSDP2: a tensor on the host or
    # gathered by FSDP2 is available only to its own call.
    if options.tables_apart or options.offload or options.layers_apart:
        return frozenset()
    calls = pairwise(tagged.program.calls)
    return frozenset(call.region.name for before, call in calls if call.region is before.region)
