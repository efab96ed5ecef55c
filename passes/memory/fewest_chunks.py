"""Choose into how many chunks of rows a loss head or attention is cut, by the peak of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sp_compiler.cost.budget_problem import budget_problem
from sp_compiler.ir.program import Program
from sp_compiler.passes.memory.candidates import measured
from sp_compiler.passes.memory.partition import PartitionOptions
from sp_compiler.passes.memory.tag import tags_of
from sp_compiler.solve.memory_budget import peak_bytes
from sp_compiler.trace.joint import JointGraph

_WORTH = 0.05
"""Share of the peak that justifies multiplying the logits again, which takes about 2 % of a step;
the scores of attention are recomputed anyway."""
_NEAR = 0.01
"""Share of the peak that does not justify more chunks."""


def fewest_chunks(
    program: Program,
    joints: Mapping[str, Sequence[JointGraph]],
    options: Mapping[str, PartitionOptions],
    world_size: int,
) -> dict[str, JointGraph]:
    """Return for each region the joint graph with the fewest chunks whose peak is close to the
    lowest, among those that lower the peak by a larger share than they lengthen the step.

    Args:
        program: sharded.
        joints: of each region, by name, tagged; the fewest chunks first.
        options: partition options of each region, by name.
        world_size: number of tensor-parallel ranks.
    """
    chosen = dict.fromkeys(joints, 0)
    if any(len(each) > 1 for each in joints.values()):
        ways = {
            name: [measured(joint, tags_of(joint), world_size, options[name]) for joint in each]
            for name, each in joints.items()
        }
        differentiable = {name: each[0].differentiable for name, each in joints.items()}
        calls = budget_problem(program, ways, differentiable, world_size)
        for name, each in ways.items():
            picks = [
                [(chosen | {name: way})[call.region.name] for call in program.calls]
                for way in range(len(each))
            ]
            peaks = [peak_bytes(calls, pick) for pick in picks]
            times = [
                sum(call.splits[way].time_us for call, way in zip(calls, pick, strict=True))
                for pick in picks
            ]
            # Kernels of small chunks take longer to launch than to run: many layers, only one of
            # which is at the peak, would all be slower.
            pays = [
                way
                for way, (peak, time_us) in enumerate(zip(peaks, times, strict=True))
                if 1 - peak / peaks[0] >= time_us / times[0] - 1
            ]
            lowest = min(peaks[way] for way in pays)
            if peaks[0] - lowest >= _WORTH * peaks[0]:
                near = lowest + _NEAR * peaks[0]
                chosen[name] = next(way for way in pays if peaks[way] <= near)
    return {name: joints[name][way] for name, way in chosen.items()}
