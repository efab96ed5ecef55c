"""Memory of the fullest pipeline stage, item by item."""

from __future__ import annotations

from collections.abc import Iterator

from sp_compiler.base.units import bytes_text
from sp_compiler.grid_plan.data import GridPlan
from sp_compiler.grid_plan.sizes import GridSizes
from sp_compiler.grid_plan.stage_plan import STATE_BYTES, StagePlan
from sp_compiler.planning.plan import Plan
from sp_compiler.planning.table_text import table

# Of the 18 bytes that a parameter takes in mixed precision with Adam; see STATE_BYTES.
_STATE = (
    ("weights, 16 bits", 2),
    ("sums of gradients, 32 bits", 4),
    ("master copy, 32 bits", 4),
    ("two moments, 32 bits", 8),
)
_LARGEST = 8


def memory_text(grid_plan: GridPlan) -> str:
    """Return the stages, then the parts of the fullest one, down to the tensors of a layer, as
    text."""
    plan, stages = grid_plan.microbatch, grid_plan.stages
    # The fullest stage decides whether the model fits.
    number, stage = max(enumerate(stages), key=lambda each: each[1].total_bytes)
    alone = (
        f"One microbatch keeps {bytes_text(plan.activation_bytes)} if all layers are on one rank"
    )
    parts = table(_parts(stage, grid_plan.grid))
    title = f"Stage {number}, the fullest: {bytes_text(stage.total_bytes)} per device"
    return "\n\n".join([str(grid_plan), alone, f"{title}\n{parts}", *_blocks(plan, stage)])


def _parts(stage: StagePlan, grid: GridSizes) -> Iterator[tuple[str, str, str]]:
    assert sum(num_bytes for _, num_bytes in _STATE) == STATE_BYTES
    shards = grid.shards(divided=False)
    sharded = f" / {shards}" if shards > 1 else ""
    if grid.ep > 1:
        sharded += f", of experts / {grid.dp_shard}"
    for name, num_bytes in _STATE:
        size = bytes_text(stage.state_bytes * num_bytes / STATE_BYTES)
        yield name, size, f"{num_bytes} B x {stage.parameters:,} parameters{sharded}"
    if stage.gathered_bytes:
        yield "gathered", bytes_text(stage.gathered_bytes), "held unsharded by FSDP2 in addition"
    chunks = "" if len(stage.chunks) == 1 else f" of {len(stage.chunks)} chunks"
    yield (
        "activations",
        bytes_text(stage.activation_bytes),
        f"of {stage.in_flight} microbatches in flight{chunks}",
    )
    yield "working", bytes_text(stage.working_bytes), "the most that a layer allocates in addition"
    yield "total", bytes_text(stage.total_bytes), ""


def _blocks(plan: Plan, stage: StagePlan) -> Iterator[str]:
    """Yield the tensors that one call of each block in ``stage`` saves, the largest first."""
    paths = {path for chunk in stage.chunks for path in chunk}
    # Blocks whose layers are all on other stages are left out.
    for block in plan.blocks:
        count = sum(path in paths for path in block.paths if path)
        # Shared tensors are held once, by the call that made them.
        kept = sorted(
            (tensor for tensor in block.kept if not tensor.shared), key=lambda each: -each.num_bytes
        )
        if not count or not kept:
            continue
        rows = [
            (each.name, bytes_text(each.num_bytes), each.module or each.op, each.reason)
            for each in kept[:_LARGEST]
        ]
        # As one row, so that the rows add up to the total above them.
        rest = sum(each.num_bytes for each in kept[_LARGEST:])
        if rest:
            rows.append((f"{len(kept) - _LARGEST} more", bytes_text(rest), "", ""))
        yield (
            f"A microbatch keeps {bytes_text(block.kept_bytes)} in each of {count} x {block.name}\n"
            + table(rows)
        )
