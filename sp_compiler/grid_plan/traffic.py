"""Traffic of a grid in one step, per axis."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compiler.grid_plan.chain import Chain
from sp_compiler.grid_plan.data import AxisTraffic
from sp_compiler.grid_plan.options import GridOptions
from sp_compiler.grid_plan.sizes import AxisLink, GridSizes, link_of
from sp_compiler.grid_plan.stage_plan import StagePlan, used_parameters
from sp_compiler.ops.convert import LINK_CROSSINGS
from sp_compiler.ops.expert_rows import ALL_TO_ALL
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
        for axis in ("tp", "pp", "ep", *_DATA)
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
        if grid.ep > 1:
            axes.append(_rows(plan, own, grid.ep, microbatches, links["ep"]))
        axes += _data(chain, own, stages[rank], grid, microbatches, links)
        traffic.append(axes)
    return traffic


_DATA = ("dp_shard", "dp_replicate")


def _tensor(
    plan: Plan, calls: Sequence[CallPlan], tp: int, microbatches: int, link: AxisLink
) -> AxisTraffic:
    blocks = [plan.block(call.block) for call in calls]
    crossed_bytes = sum(
        item.num_bytes * LINK_CROSSINGS.get(item.kind, 0)
        for block in blocks
        for item in (*block.forward, *block.backward)
    )
    time_us = sum(block.work.communication_us for block in blocks)
    # Communication that the block's own kernels hide does not lengthen the step.
    hidden_us = sum(block.work.hidden_us for block in blocks)
    return AxisTraffic(
        "tp",
        link.name,
        # A ring: every rank sends all parts except its own.
        microbatches * crossed_bytes * (tp - 1) // tp,
        microbatches * time_us,
        microbatches * (time_us - hidden_us),
    )


def _rows(
    plan: Plan, calls: Sequence[CallPlan], ep: int, microbatches: int, link: AxisLink
) -> AxisTraffic:
    """Rows of tokens sent to their experts and back, if all experts get the same number."""
    blocks = [plan.block(call.block) for call in calls]
    sent = [
        item
        for block in blocks
        for item in (*block.forward, *block.backward)
        if item.kind == ALL_TO_ALL
    ]
    num_bytes = sum(item.num_bytes for item in sent) * (ep - 1) // ep
    time_us = sum(item.count for item in sent) * link.latency_us + num_bytes / link.bytes_per_us
    # The next operator needs the rows.
    return AxisTraffic(
        "ep", link.name, microbatches * num_bytes, microbatches * time_us, microbatches * time_us
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
    links: dict[str, AxisLink],
) -> list[AxisTraffic]:
    """Return the traffic of gathering parameters and reducing gradients.

    See :func:`~sp_compiler.grid_plan.stage_plan.gathered_bytes`.
    """
    used = used_parameters(calls, chain.parameters)
    # In the parameters' own dtype: the dtype of a mixed precision policy is not known here.
    sharded = [
        (
            grid.shards(divided=divided),
            sum(size.num_bytes for size in used if size.divided is divided),
            sum(size.num_bytes for size in used if size.divided is divided and size.trained),
        )
        for divided in sorted({size.divided for size in used})
    ]
    axes: list[AxisTraffic] = []
    # A pipeline gathers before its schedule and reduces after it, once per step, while nothing else
    # runs. Otherwise every microbatch gathers and reduces, and gathers again in backward; only the
    # first of a group of transfers has nothing to hide under.
    times = 1 if grid.pp > 1 else microbatches
    hiding_us, hiding_backward_us = (
        (0.0, 0.0) if grid.pp > 1 else (stage.microbatch_us, stage.backward_us)
    )
    if grid.shards(divided=False) > 1:
        names, gathers = _shard_axes(grid), 1 if grid.pp > 1 else 2
        link = links[names[0]]
        each_us = sum(
            gathers * link.ring_us(weight_bytes, shard) + link.ring_us(gradient_bytes, shard)
            for shard, weight_bytes, gradient_bytes in sharded
        )
        sent_bytes = sum(
            (gathers * weight_bytes + gradient_bytes) * (shard - 1) // shard
            for shard, weight_bytes, gradient_bytes in sharded
        )
        exposed_us = max(0.0, each_us - hiding_us)
        axes.append(
            AxisTraffic(
                " x ".join(names),
                link.name,
                times * sent_bytes,
                times * each_us,
                times * exposed_us,
            )
        )
    if (replicate := grid.dp_replicate) > 1:
        # Over the shard that the reduce-scatter leaves; an all-reduce is two rings.
        link = links["dp_replicate"]
        num_bytes = sum(gradient_bytes // shard for shard, _, gradient_bytes in sharded)
        each_us = 2 * link.ring_us(num_bytes, replicate)
        sent_bytes = 2 * num_bytes * (replicate - 1) // replicate
        exposed_us = max(0.0, each_us - hiding_backward_us)
        axes.append(
            AxisTraffic(
                "dp_replicate", link.name, times * sent_bytes, times * each_us, times * exposed_us
            )
        )
    return axes


def _shard_axes(grid: GridSizes) -> tuple[str, ...]:
    """Return the axes over which FSDP2 shards, the one with the slowest link first."""
    if grid.ep == 1:
        return ("dp_shard",)
    # Not only "ep", which names the traffic of rows.
    return ("dp_shard", "ep") if grid.dp_shard > 1 else ("ep", "dp_shard")
