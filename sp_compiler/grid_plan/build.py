"""The plan of a step on a grid, made from the plan of one microbatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from sp_compiler.cost.node_cost import collectives_us
from sp_compiler.cost.step_timeline import FunctionRun, StepTimeline, duration_us
from sp_compiler.grid_plan.chain import Chain
from sp_compiler.grid_plan.data import AxisTraffic, GridPlan
from sp_compiler.grid_plan.options import GridOptions
from sp_compiler.grid_plan.sizes import AxisLink, GridSizes, link_of
from sp_compiler.grid_plan.stage_plan import (
    StagePlan,
    gathered_bytes,
    held_bytes,
    state_bytes,
    used_parameters,
)
from sp_compiler.grid_plan.timeline import Functions, GridTimeline
from sp_compiler.grid_plan.timetable import StageTimes, finish_us
from sp_compiler.grid_plan.traffic import traffic_of
from sp_compiler.pipeline_parallel.cutting import Rest, ends_of
from sp_compiler.pipeline_parallel.microbatch_recompute import (
    Parts,
    Places,
    cut,
    saving_microbatches,
)
from sp_compiler.pipeline_parallel.schedules import (
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    FULL_BACKWARD,
    Action,
    Schedule,
    most_in_flight,
)
from sp_compiler.pipeline_parallel.stage_memory import RankActivations, StageMemory
from sp_compiler.planning.data import CallPlan
from sp_compiler.planning.plan import Plan


def grid_plan(plan: Plan, chain: Chain, options: GridOptions) -> GridPlan:
    """Plan a step on a grid; see :func:`sp_compiler.plan`.

    Args:
        plan: plan of one microbatch on the ranks of "tp".
        chain: the calls of ``plan`` to divide into stages.

    Raises:
        ArgumentError: fewer layers than stages, or no cut within the memory.
    """
    grid, microbatches, rank_of = options.grid, options.microbatches, options.rank_of
    schedule, per_rank = options.stages()
    # Torch's own order of actions, from which the microbatches in flight follow for any schedule.
    of_schedule = schedule, grid.pp, per_rank, microbatches
    orders = _orders(*of_schedule)
    places = _places(*of_schedule) if chain.rest else ()
    # The same search that a pipeline makes, so that the plan has the cut that will run.
    ends = _ends(chain, orders, places, options)
    link = link_of(grid, "pp", options.gpus_per_node, plan.hardware)
    most = _Program.of(chain.calls, plan, chain, ends, rank_of, link)
    rest = chain.rest and _Program.of(chain.rest_calls, chain.rest, chain, ends, rank_of, link)
    times = _times_of_both(most, rest, places, chain, options) if rest else most.times

    def memory_of(action: Action) -> StageMemory:
        recomputes = rest is not None and times[action.stage].recomputes(action.microbatch)
        return (rest if rest and recomputes else most).memories[action.stage]

    own: list[list[int]] = [[] for _ in range(grid.pp)]
    for stage in range(len(ends)):
        own[rank_of(stage)].append(stage)
    parts = [[most.parts[stage] for stage in each] for each in own]
    calls = [list(itertools.chain.from_iterable(each)) for each in parts]
    activations = [RankActivations.of(order, memory_of) for order in orders]
    own_times = [[times[stage] for stage in each] for each in own]
    stages = [
        _stage(chain, *each, options) for each in zip(parts, activations, own_times, strict=True)
    ]
    # The sum over calls is an upper bound; for a single stage the plan knows the exact peak.
    if grid.pp == 1:
        stages = [_exact(plan, stages[0])]
    traffic = traffic_of(plan, chain, calls, stages, ends, options)
    finish = finish_us(orders, times)
    reduction_us = _reduction_us(plan, grid)
    # Traffic over "tp" is included in the times of calls, traffic over "pp" in the timetable.
    others = ("tp", "pp")
    exposed = [sum(a.exposed_us for a in axes if a.axis not in others) for axes in traffic]
    # Relative to the rank that computes most, which no pipeline can beat.
    busiest_us = microbatches * max(stage.microbatch_us for stage in stages)
    functions = most.functions, exposed, reduction_us, rest.functions if rest else ()
    return GridPlan(
        microbatch=plan,
        grid=grid,
        schedule=options.schedule,
        stages_per_rank=per_rank,
        microbatches=microbatches,
        bytes_per_parameter=options.bytes_per_parameter,
        stages=tuple(stages),
        traffic=tuple(_largest(traffic)),
        step_us=max(map(sum, zip(finish, exposed, strict=True))) + reduction_us,
        # A model of only views takes no time.
        bubble=max(finish) / busiest_us - 1 if busiest_us else 0.0,
        timeline_maker=partial(GridTimeline, orders, times, *functions),
        rest=chain.rest,
        memory_bytes=options.memory_bytes,
    )


def _reduction_us(plan: Plan, grid: GridSizes) -> float:
    """Return the time to sum gradients of replicated parameters over "tp", once per step."""
    # After FSDP2's own reduction, and so over this rank's shards.
    shards = grid.shards(divided=False)
    sums = [replace(each, num_bytes=each.num_bytes // shards) for each in plan.gradient_reduction]
    # As if each stage had the same share, because every layer has norms and biases.
    return collectives_us(sums, grid.tp, plan.hardware) / grid.pp


# Shared by all settings of a search with the same schedule; a large one takes a second to make.
@lru_cache(maxsize=48)
def _orders(
    schedule: Schedule, num_ranks: int, per_rank: int, microbatches: int
) -> list[list[Action]]:
    return schedule.orders(num_ranks, per_rank, microbatches)


@lru_cache(maxsize=48)
def _places(
    schedule: Schedule, num_ranks: int, per_rank: int, microbatches: int
) -> Sequence[Places]:
    orders = _orders(schedule, num_ranks, per_rank, microbatches)
    return Places.of(orders, num_ranks * per_rank)


def _ends(
    chain: Chain,
    orders: Sequence[Sequence[Action]],
    places: Sequence[Places],
    options: GridOptions,
) -> list[int]:
    grid, memory_bytes = options.grid, options.memory_bytes
    num_stages = grid.pp * options.stages()[1]
    # Without a limit cuts depend only on the chain, which keeps them for the next plan.
    if memory_bytes is None or num_stages == 1:
        return chain.ends(num_stages)
    return ends_of(
        chain.calls,
        chain.parameters,
        most_in_flight(orders, num_stages),
        memory_bytes,
        lambda size: held_bytes(size, options.bytes_per_parameter, grid),
        Rest(chain.rest_calls, places) if chain.rest else None,
    )


@dataclass(frozen=True)
class _Program:
    """One of the two programs that stages run, cut into stages."""

    parts: Parts
    memories: Sequence[StageMemory]
    functions: Sequence[Functions]
    times: Sequence[StageTimes]

    @classmethod
    def of(
        cls,
        calls: Sequence[CallPlan],
        plan: Plan,
        chain: Chain,
        ends: Sequence[int],
        rank_of: Callable[[int], int],
        link: AxisLink,
    ) -> _Program:
        parts = cut(calls, ends)
        functions = [_functions(part, plan.schedule) for part in parts]
        times = _times(chain, ends, parts, functions, rank_of, link)
        return cls(parts, [StageMemory.of(part) for part in parts], functions, times)


def _times_of_both(
    most: _Program,
    rest: _Program,
    places: Sequence[Places],
    chain: Chain,
    options: GridOptions,
) -> list[StageTimes]:
    """Return the times of stages that run some microbatches with ``rest``."""
    assert options.memory_bytes is not None
    saving = saving_microbatches(
        places,
        most.parts,
        rest.parts,
        chain.parameters,
        options.memory_bytes,
        lambda size: held_bytes(size, options.bytes_per_parameter, options.grid),
    )
    return [
        replace(own, rest=other, saving=chosen)
        for own, other, chosen in zip(most.times, rest.times, saving, strict=True)
    ]


def _stage(
    chain: Chain,
    parts: Sequence[Sequence[CallPlan]],
    activations: RankActivations,
    times: Sequence[StageTimes],
    options: GridOptions,
) -> StagePlan:
    calls = [call for part in parts for call in part]
    used = used_parameters(calls, chain.parameters)
    per_parameter, grid = options.bytes_per_parameter, options.grid
    means_us = [each.mean_us(options.microbatches) for each in times]
    return StagePlan(
        chunks=tuple(tuple(call.path for call in part) for part in parts),
        parameters=sum(size.numel for size in used),
        state_bytes=round(sum(state_bytes(size, per_parameter, grid) for size in used)),
        gathered_bytes=gathered_bytes(calls, chain.parameters, grid),
        in_flight=activations.in_flight,
        activation_bytes=activations.kept_bytes,
        working_bytes=activations.peak_bytes - activations.kept_bytes,
        forward_us=sum(forward_us for forward_us, _ in means_us),
        backward_us=sum(backward_us for _, backward_us in means_us),
        saving=tuple(len(each.saving) if each.rest else options.microbatches for each in times),
    )


def _exact(plan: Plan, stage: StagePlan) -> StagePlan:
    """Return the only stage with the exact peak of the full step."""
    kept = plan.activation_bytes
    working_bytes = plan.activation_peak_bytes - kept
    return replace(stage, activation_bytes=kept, working_bytes=working_bytes)


def _times(
    chain: Chain,
    ends: Sequence[int],
    parts: Sequence[Sequence[CallPlan]],
    functions: Sequence[Functions],
    rank_of: Callable[[int], int],
    link: AxisLink,
) -> list[StageTimes]:
    times: list[StageTimes] = []
    for stage, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        # Two stages of one rank pass values in its memory.
        has_before = stage > 0 and rank_of(stage - 1) != rank_of(stage)
        has_behind = stage < len(ends) - 1 and rank_of(stage + 1) != rank_of(stage)
        forward_us = sum(call.forward_us for call in parts[stage])
        inputs, weights = map(functions[stage].get, (BACKWARD_INPUTS, BACKWARD_WEIGHTS))
        times.append(
            StageTimes(
                forward_us,
                # As a difference: a call has the times of its step and its forward, both with
                # collectives.
                sum(call.step_us for call in parts[stage]) - forward_us,
                link.send_us(chain.activation_bytes[start]) if has_before else 0.0,
                link.send_us(chain.gradient_bytes[end]) if has_behind else 0.0,
                # Two times if the backward is split; a schedule may run the parts far apart.
                (inputs.step_us, weights.step_us) if inputs and weights else None,
            )
        )
    return times


_PHASES = {
    FORWARD: "forward",
    FULL_BACKWARD: "backward",
    BACKWARD_INPUTS: "backward_inputs",
    BACKWARD_WEIGHTS: "backward_weights",
}


def _functions(part: Sequence[CallPlan], schedule: StepTimeline) -> Functions:
    """Return the functions of each kind of action in a stage of these calls."""
    of_kind: dict[Any, StepTimeline] = {}
    for kind, phase in _PHASES.items():
        runs: list[FunctionRun] = []
        now_us = 0.0
        # Backward runs the calls of a stage from the last to the first.
        for call in part if kind is FORWARD else reversed(part):
            # A call without gradients has no backward.
            spans = schedule.functions.get((call.block, phase))
            if spans is not None:
                runs.append(FunctionRun(call.block, call.path, phase, now_us, spans))
                now_us += duration_us(spans)
        if runs:
            of_kind[kind] = StepTimeline(tuple(runs))
    return of_kind


def _largest(traffic: Sequence[Sequence[AxisTraffic]]) -> Iterator[AxisTraffic]:
    """Return for each axis the traffic of the rank that sends most."""
    for axes in zip(*traffic, strict=True):
        yield max(axes, key=lambda each: each.sent_bytes)
