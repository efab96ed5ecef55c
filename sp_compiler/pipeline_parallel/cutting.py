"""Where a program is cut: the slowest stage as fast as can be, within each stage's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import bytes_text
from sp_compiler.planning.data import CallPlan, ParameterSize
from sp_compiler.solve.pipeline_cut import fastest_cut, least_largest

_OPTIMIZER_BYTES = 8
"""AdamW's two moments in float32, per parameter."""


def ends_of(
    calls: Sequence[CallPlan],
    sizes: Mapping[str, ParameterSize],
    in_flight: Sequence[int],
    memory_bytes: int | None,
) -> list[int]:
    """Return where each stage ends in ``calls``.

    Args:
        calls: those that are cut, embeddings and loss head among them.
        sizes: of the parameters, on one rank.
        in_flight: for each stage the most microbatches that it keeps activations of.
        memory_bytes: what a stage may take; ``None`` for no limit.

    Raises:
        ArgumentError: fewer layers than stages, or no cut whose stages have room.
    """
    num_stages, layers = len(in_flight), sum(call.path != "" for call in calls)
    if layers < num_stages:
        raise ArgumentError(
            f"the model has {layers} layers, too few for {num_stages} pipeline stages: use fewer "
            "ranks on the axis 'pp', or fewer stages_per_rank"
        )

    def num_bytes(stage: int, start: int, stop: int) -> float:
        part = calls[start:stop]
        used = [sizes[name] for name in {name for call in part for name in call.parameters}]
        if not used:  # an optimizer takes no empty list of parameters
            return math.inf
        state = sum(
            2 * size.num_bytes + _OPTIMIZER_BYTES * size.numel if size.trained else size.num_bytes
            for size in used
        )
        kept = sum(dict(pair for call in part for pair in call.kept).values())
        return state + in_flight[stage] * kept + max(call.working_bytes for call in part)

    def limits(stage: int, start: int, stop: int) -> float:
        room = math.inf if memory_bytes is None else memory_bytes
        needed = num_bytes(stage, start, stop)
        return 0.0 if needed <= room and needed < math.inf else math.inf

    ends = fastest_cut([call.step_us for call in calls], num_stages, limits)
    if ends is None:
        least = least_largest(len(calls), num_stages, num_bytes)
        if memory_bytes is None or least == math.inf:
            raise ArgumentError(
                f"no cut into {num_stages} stages gives each of them a parameter to train: use "
                "fewer stages"
            )
        raise ArgumentError(
            f"no cut into {num_stages} stages leaves each within {bytes_text(memory_bytes)}, the "
            f"least that would do is {bytes_text(math.ceil(least))} per stage: use more ranks, "
            'recompute="full", or smaller microbatches'
        )
    return ends
