"""Traffic of a grid in one step, per axis."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compiler.grid_plan.chain import Chain
from sp_compiler.grid_plan.data import AxisTraffic
from sp_compiler.grid_plan.options import GridOptions
from sp_compiler.grid_plan.sizes import GridSizes, Link, link_of
from sp_compiler.grid_plan.stage_plan import StagePlan, used_parameters
from sp_compiler.ops.convert import LINK_CROSSINGS
from sp_compiler.planning.data import CallPlan
from sp_compiler.planning.plan import Plan


def traffic_of(
    plan: Plan,
    chain: Chain,
    calls: Sequence[Sequence[CallPlan]],
    stages: Sequence[StagePlan],
    ends: Sequence[int],
    options: GridOptions,
) -> list[list[AxisTraffic]]:
    """Return the traffic of each rank of the pipeline over the axes of several ranks.

    Args:
        calls: calls of each rank of the pipeline.
        stages: plans of the same ranks.
        ends: ends of all stages in ``chain``.
    """
    grid, microbatches = options.grid, options.microbatches
    links = {
        axis: link_of(grid, axis, options.gpus_per_node, plan.hardware)
        for axis in ("tp", "pp", *_DATA)
    }
    # By rank, not by stage: a rank with several stages sends for all of them.
    crossing = _sent_by_stages(chain, ends, options)
    traffic: list[list[AxisTraffic]] = []
    for rank, own in enumerate(calls):
        axes: list[AxisTraffic] = []
        if grid.tp > 1:
            axes.append(_tensor(plan, own, grid.tp, microbatches, links["tp"]))
        if grid.pp > 1:
            link, sent_bytes = links["pp"], crossing[rank] * microbatches
            axes.append(AxisTraffic("pp", link.name, sent_bytes, link.send_us(sent_bytes), 0.0))
        axes += _data(chain, own, stages[rank], grid, microbatches, links)
        traffic.append(axes)
    return traffic


_DATA = ("dp_shard", "dp_replicate")


def _tensor(
    plan: Plan, calls: Sequence[CallPlan], tp: int, microbatches: int, link: Link
) -> AxisTraffic:
    blocks = [plan.block(call.block) for call in calls]
    crossed_bytes = sum(
        item.num_bytes * LINK_CROSSINGS[item.kind]
        for block in blocks
        for item in (*block.forward, *block.backward)
    )
    time_us = sum(block.work.communication_us for block in blocks)
    # What overlaps with gradients of weights in the block's own backward is no time of the step.
    hidden_us = sum(block.work.hidden_us for block in blocks)
    return AxisTraffic(
        "tp",
        link.name,
        # A ring: every rank sends all parts but its own.
        microbatches * crossed_bytes * (tp - 1) // tp,
        microbatches * time_us,
        microbatches * (time_us - hidden_us),
    )


def _sent_by_stages(chain: Chain, ends: Sequence[int], options: GridOptions) -> list[int]:
    """Return the bytes that each rank sends for one microbatch, activations and gradients."""
    sent = [0] * options.grid.pp
    for stage, end in enumerate(ends[:-1]):
        # Activations go forward; their gradients come back over the same cut.
        before, behind = options.rank_of(stage), options.rank_of(stage + 1)
        # Neighbours on one rank, as at the turn of a V, send nothing.
        if before != behind:
            sent[before] += chain.activation_bytes[end]
            sent[behind] += chain.gradient_bytes[end]
    return sent


def _data(
    chain: Chain,
    calls: Sequence[CallPlan],
    stage: StagePlan,
    grid: GridSizes,
    microbatches: int,
    links: dict[str, Link],
) -> list[AxisTraffic]:
    """Parameters are gathered and gradients reduced; see :func:`stage_plan.gathered_bytes`."""
    used = used_parameters(calls, chain.parameters)
    # In the parameters' own dtype: what a mixed precision policy casts to is not known here.
    weight_bytes = sum(size.num_bytes for size in used)
    gradient_bytes = sum(size.num_bytes for size in used if size.trained)
    shard, replicate = grid.dp_shard, grid.dp_replicate
    axes: list[AxisTraffic] = []
    # A pipeline gathers in front of its schedule and reduces behind it, once in a step, while
    # nothing else runs. Else every microbatch does, and gathers once more in backward; only the
    # first of a group of transfers has nothing to run under.
    times = 1 if grid.pp > 1 else microbatches
    hiding_us, hiding_backward_us = (
        (0.0, 0.0) if grid.pp > 1 else (stage.microbatch_us, stage.backward_us)
    )
    if shard > 1:
        link, gathers = links["dp_shard"], 1 if grid.pp > 1 else 2
        each_us = gathers * link.ring_us(weight_bytes, shard) + link.ring_us(gradient_bytes, shard)
        sent_bytes = (gathers * weight_bytes + gradient_bytes) * (shard - 1) // shard
        exposed_us = max(0.0, each_us - hiding_us)
        axes.append(
            AxisTraffic(
                "dp_shard", link.name, times * sent_bytes, times * each_us, times * exposed_us
            )
        )
    if replicate > 1:
        # Of what the reduce-scatter left; an all-reduce is two rings.
        link, num_bytes = links["dp_replicate"], gradient_bytes // shard
        each_us = 2 * link.ring_us(num_bytes, replicate)
        sent_bytes = 2 * num_bytes * (replicate - 1) // replicate
        exposed_us = max(0.0, each_us - hiding_backward_us)
        axes.append(
            AxisTraffic(
                "dp_replicate", link.name, times * sent_bytes, times * each_us, times * exposed_us
            )
        )
    return axes
