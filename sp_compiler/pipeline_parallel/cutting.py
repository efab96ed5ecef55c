"""Choice of the cut: the slowest stage as fast as possible, within each stage's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import bytes_text
from sp_compiler.cost.model_state import ADAMW_MOMENTS
from sp_compiler.pipeline_parallel.stage_memory import StageMemory
from sp_compiler.planning.data import CallPlan, ParameterSize
from sp_compiler.solve.pipeline_cut import fastest_cut, least_largest


def adamw_bytes(size: ParameterSize) -> float:
    """Return the bytes of a parameter, its gradient and AdamW's moments, all in the parameter's
    dtype."""
    return (2 + ADAMW_MOMENTS) * size.num_bytes if size.trained else size.num_bytes


def gathered_adamw_bytes(size: ParameterSize, num_shards: int) -> float:
    """Return the bytes during a step of a parameter that FSDP2 shards between steps.

    The parameter and its gradient are unsharded, in addition to this rank's shard of parameter,
    gradient and optimizer state.
    """
    return size.num_bytes * (1 + size.trained) + adamw_bytes(size) / num_shards


def ends_of(
    calls: Sequence[CallPlan],
    sizes: Mapping[str, ParameterSize],
    in_flight: Sequence[int],
    memory_bytes: int | None,
    state_bytes: Callable[[ParameterSize], float] = adamw_bytes,
) -> list[int]:
    """Return where each stage ends in ``calls``.

    Args:
        calls: calls to divide into stages, including embeddings and loss head.
        sizes: sizes of the parameters on one rank.
        in_flight: for each stage, the largest number of microbatches whose activations it holds.
        memory_bytes: limit for a stage; ``None`` for no limit.
        state_bytes: returns the bytes of a parameter with its gradient and optimizer state.

    Raises:
        ArgumentError: fewer layers than stages, or no cut within the limit.
    """
    num_stages, layers = len(in_flight), sum(call.path != "" for call in calls)
    # Layers, not calls: a stage with nothing but an embedding would wait for all the others.
    if layers < num_stages:
        raise ArgumentError(
            f"the model has {layers} layers, too few for {num_stages} pipeline stages: use fewer "
            "ranks on the axis 'pp', or fewer stages_per_rank"
        )

    # Of each part, whichever stage it is: the search asks for it once per stage.
    @cache
    def part_bytes(start: int, stop: int) -> tuple[float, StageMemory] | None:
        part = calls[start:stop]
        used = [sizes[name] for name in {name for call in part for name in call.parameters}]
        if not used:  # an optimizer takes no empty list of parameters
            return None
        return sum(map(state_bytes, used)), StageMemory.of(part)

    def num_bytes(stage: int, start: int, stop: int) -> float:
        parts = part_bytes(start, stop)
        return math.inf if parts is None else parts[0] + parts[1].peak_of(in_flight[stage])

    def limits(stage: int, start: int, stop: int) -> float:
        room = math.inf if memory_bytes is None else memory_bytes
        needed = num_bytes(stage, start, stop)
        return 0.0 if needed <= room and needed < math.inf else math.inf

    # Times first, and of cuts that fit: a slow stage is waited for by all others, a full one does
    # not run.
    ends = fastest_cut([call.step_us for call in calls], num_stages, limits)
    if ends is None:
        # Solved anew for the message alone: which limit would do is what the user needs next.
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
