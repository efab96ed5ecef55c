"""Options of a step on a grid."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import parse_bytes
from sp_compiler.grid_plan.sizes import GridSizes
from sp_compiler.grid_plan.stage_plan import STATE_BYTES, BytesPerParameter
from sp_compiler.pipeline_parallel.microbatch_recompute import require_memory
from sp_compiler.pipeline_parallel.schedules import Schedule, schedule_of

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class GridOptions:
    """Arguments of :func:`sp_compiler.plan` for a grid, validated.

    Attributes:
        memory: limit for each stage, as ``memory`` of :func:`sp_compiler.pipeline`; ``None``
            for no limit.

    Raises:
        ArgumentError: numbers that are not positive, or as for :func:`sp_compiler.pipeline`.
    """

    grid: GridSizes
    microbatches: int
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    bytes_per_parameter: BytesPerParameter = STATE_BYTES
    gpus_per_node: int = GPUS_PER_NODE
    memory: int | str | None = None
    recompute_rest: str | None = None

    def __post_init__(self) -> None:
        require_memory(self.recompute_rest, self.memory)
        per_parameter = self.bytes_per_parameter
        is_number = isinstance(per_parameter, (int, float)) and not isinstance(per_parameter, bool)
        # This form of the condition also rejects NaN.
        if per_parameter != "adamw" and (not is_number or not 0 < per_parameter < math.inf):
            raise ArgumentError(
                f"bytes_per_parameter={per_parameter!r}: expected a finite number of bytes, more "
                'than 0, for example 18, or "adamw"'
            )
        # bool is a subclass of int: True would mean one GPU per node.
        per_node = self.gpus_per_node
        if isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 1:
            raise ArgumentError(f"gpus_per_node={per_node!r}: expected a positive int")
        if self.memory is not None:
            parse_bytes("memory", self.memory)  # raises, as the next line may
        self.stages()

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` as a number."""
        return None if self.memory is None else parse_bytes("memory", self.memory)

    def stages(self) -> tuple[Schedule, int]:
        """Return the schedule and the number of stages per rank of the pipeline."""
        return schedule_of(self.schedule, self.stages_per_rank, self.grid.pp, self.microbatches)

    def rank_of(self, stage: int) -> int:
        """Return the rank of the pipeline that runs ``stage``."""
        return self.stages()[0].rank_of(stage, self.grid.pp)


def refuse_without_grid(**given: Any) -> None:
    """Raise ``ArgumentError`` for arguments that need a grid when there is none.

    Args:
        given: arguments by name, as in :class:`GridOptions`; its defaults are allowed.
    """
    defaults = {each.name: each.default for each in fields(GridOptions)}
    for name, value in given.items():
        # An argument that a grid requires (microbatches) is ``None`` without one.
        default = None if defaults[name] is MISSING else defaults[name]
        # Refused, not ignored: the user expects the argument to have an effect.
        if value != default:
            others = "; without a grid use memory_budget= or device_memory="
            raise ArgumentError(
                f'{name}={value!r} without mesh=: give sizes by axis, such as "8x4x2"'
                f"{others if name == 'memory' else ''}"
            )
