"""Memory and traffic of one pipeline stage on a grid."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sp_compiler.grid_plan.sizes import GridSizes
from sp_compiler.pipeline_parallel.cutting import adamw_bytes
from sp_compiler.planning.data import CallPlan, ParameterSize

BytesPerParameter = float | Literal["adamw"]
"""Bytes of a trained parameter with its gradient and optimizer state; "adamw": as
``torch.optim.AdamW`` keeps them, with gradient and two moments in the parameter's own dtype."""

STATE_BYTES = 18.0
"""A parameter in mixed precision with Adam: a 16-bit value, the sum of its gradient, a master copy
and two moments in 32 bits."""


@dataclass(frozen=True)
class StagePlan:
    """Memory and time of one rank of a pipeline, on one device.

    Attributes:
        chunks: layers of each of its stages; interleaved schedules have several.
        parameters: number of elements before FSDP shards them; a parameter that several ranks of
            the pipeline use counts on each.
        state_bytes: parameters, gradients and optimizer state, sharded by FSDP2.
        gathered_bytes: bytes that FSDP2 holds unsharded in addition.
        in_flight: largest number of forwards of a chunk whose backward has not run yet.
        activation_bytes: peak of the activations that these save.
        working_bytes: bytes that the call at the peak of the step adds to them.
        forward_us: estimated time of the forward of all its chunks for one microbatch.
        backward_us: estimated time of their backward.
        saving: number of microbatches of a step that each of its stages runs with ``recompute``; it
            runs the others with ``recompute_rest``, and times are the mean of both.
    """

    chunks: tuple[tuple[str, ...], ...]
    parameters: int
    state_bytes: int
    gathered_bytes: int
    in_flight: int
    activation_bytes: int
    working_bytes: int
    forward_us: float
    backward_us: float
    saving: tuple[int, ...]

    @property
    def microbatch_us(self) -> float:
        """Time of forward and backward of one microbatch."""
        return self.forward_us + self.backward_us

    @property
    def total_bytes(self) -> int:
        """Upper bound of the bytes that the stage needs."""
        return self.state_bytes + self.gathered_bytes + self.activation_bytes + self.working_bytes


def kept_bytes(calls: Sequence[CallPlan]) -> int:
    """Return the bytes that ``calls`` save for one microbatch."""
    # A dict by storage: a storage that several calls keep exists once.
    return sum(dict(pair for call in calls for pair in call.kept).values())


def used_parameters(
    calls: Sequence[CallPlan], sizes: Mapping[str, ParameterSize]
) -> list[ParameterSize]:
    """Return each parameter of ``calls`` once."""
    return [sizes[name] for name in sorted({name for call in calls for name in call.parameters})]


def state_bytes(
    size: ParameterSize, bytes_per_parameter: BytesPerParameter, grid: GridSizes
) -> float:
    """Return the bytes per device of a parameter with its gradient and optimizer state."""
    # A frozen parameter has neither gradient nor optimizer state, only its own bytes.
    if bytes_per_parameter == "adamw":
        # The rule of plans without a grid, and of the limit of a pipeline's stages.
        num_bytes = adamw_bytes(size)
    else:
        num_bytes = size.numel * bytes_per_parameter if size.trained else size.num_bytes
    return num_bytes / grid.shards(divided=size.divided)


def held_bytes(
    size: ParameterSize, bytes_per_parameter: BytesPerParameter, grid: GridSizes
) -> float:
    """Return the bytes of a parameter in a pipeline: its state, and its unsharded copy under
    FSDP2."""
    # Gradients too: they stay unsharded until they are reduced after the last microbatch.
    gathered = size.num_bytes * (1 + size.trained) if grid.data > 1 else 0
    return state_bytes(size, bytes_per_parameter, grid) + gathered


def gathered_bytes(
    calls: Sequence[CallPlan], sizes: Mapping[str, ParameterSize], grid: GridSizes
) -> int:
    """Return the largest number of bytes that FSDP2 holds unsharded at once.

    In a pipeline these are all parameters and gradients of the stage: torch's schedules gather once
    and reduce with the last microbatch. Otherwise they are the parameters outside of blocks, two
    blocks (one is gathered while the other runs) and the gradients of one. ``replicate``, used for
    ``dp_replicate`` alone, copies instead of gathering, and holds the copy from forward to
    backward.
    """
    if grid.data == 1:
        return 0
    if grid.pp > 1:
        used = used_parameters(calls, sizes)
        return sum(size.num_bytes * (1 + size.trained) for size in used)
    groups: dict[str, list[CallPlan]] = {}
    for call in calls:
        groups.setdefault(call.path, []).append(call)
    outside = sum(size.num_bytes for size in used_parameters(groups.pop("", []), sizes))
    blocks = [
        sum(size.num_bytes for size in used_parameters(group, sizes)) for group in groups.values()
    ]
    if grid.shards(divided=False) == 1:
        # Copies live from forward to backward, so all of them are there at the peak.
        at_once = sum(blocks)
    else:
        # With a zero in front, for a single block has no neighbour.
        pairs = [first + second for first, second in itertools.pairwise([0, *blocks])]
        at_once = max(pairs, default=0)
    return outside + at_once + max(blocks, default=0)
