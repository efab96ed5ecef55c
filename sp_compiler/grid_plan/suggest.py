"""Search for the fastest grid, schedule and recompute setting that fit a device's memory.

Candidates are planned as by :func:`sp_compiler.plan`, the most promising first. Skipped are those
that no cut fits into memory, by a lower bound, and those whose schedule, even with equal stages, is
not faster than the plans found so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from torch import nn

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import bytes_text, parse_bytes, time_text
from sp_compiler.grid_plan.build import grid_plan
from sp_compiler.grid_plan.chain import Chain
from sp_compiler.grid_plan.data import GridPlan
from sp_compiler.grid_plan.options import GPUS_PER_NODE, GridOptions
from sp_compiler.grid_plan.settings import build_settings
from sp_compiler.grid_plan.sizes import GridSizes
from sp_compiler.grid_plan.stage_plan import (
    STATE_BYTES,
    BytesPerParameter,
    gathered_bytes,
    held_bytes,
    kept_bytes,
    state_bytes,
    used_parameters,
)
from sp_compiler.grid_plan.suggestions import Rejected, Suggestions
from sp_compiler.ir.hints import parameters_of, wishes_of
from sp_compiler.options import RECOMPUTE, CompileOptions, Options, with_options
from sp_compiler.pipeline_parallel.cutting import NoCutError
from sp_compiler.pipeline_parallel.schedules import SCHEDULES
from sp_compiler.planning.plan import Plan
from sp_compiler.trace.arguments import ExampleInputs, checked_inputs

_CHUNKS = (2, 3, 4)  # per rank, for interleaved schedules


@partial(with_options, explained=("tp", "mesh"))
def suggest(  # noqa: PLR0913 - all by keyword, each described below
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    gpus: int,
    memory: int | str,
    microbatches: int,
    schedules: Sequence[str] = ("1f1b", "interleaved", "zero_bubble"),
    bytes_per_parameter: BytesPerParameter = STATE_BYTES,
    gpus_per_node: int = GPUS_PER_NODE,
    top: int = 5,
    **options: Unpack[Options],
) -> Suggestions:
    """Return the fastest grids of ``gpus`` devices on which a model trains within their memory.

    Finds the best schedule and recompute setting for each grid of tensor-parallel ranks inside a
    node, pipeline stages and data-parallel ranks, with or without FSDP2. If the best plans leave
    memory unused, ``recompute_rest`` is tried on them, with ``memory`` for each stage as in their
    :attr:`GridPlan.memory_bytes`. Uses only shapes, in one process, like :func:`plan`.

    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(config).bfloat16()
    >>> inputs = (), {"input_ids": ids, "labels": ids}
    >>> found = sp_compiler.suggest(model, inputs, gpus=64, memory="75GiB", microbatches=256)
    >>> print(found)  # and why the others lose
    >>> print(found[0])  # the plan of the best one

    Args:
        model: in the mode (train or eval, autocast) to plan for.
        example_inputs: (args, kwargs) of one microbatch.
        gpus: number of devices.
        memory: limit for a step on each device, in bytes or as "75GiB". Leave a few GiB of the
            device's memory for its context, libraries and fragmentation.
        microbatches: number of microbatches per step on all devices together: the global batch size
            divided by the example's.
        schedules: schedules to choose from, named as for :func:`pipeline`.
        bytes_per_parameter: as for :func:`plan`.
        gpus_per_node: as for :func:`plan`; no grid has more tensor-parallel ranks.
        top: number of plans to return.

    Raises:
        ArgumentError: an invalid argument. It is not an error if no grid fits: the result is empty,
            and its ``rejected`` says what each grid would need.
        CaptureError: the model has control flow that depends on parameters or activations.
    """
    for name, value in (("gpus", gpus), ("microbatches", microbatches), ("top", top)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name}={value!r}: expected a positive int")
    _check(schedules, options)
    memory_bytes = parse_bytes("memory", memory)
    checked = GridOptions(
        GridSizes(), 1, bytes_per_parameter=bytes_per_parameter, gpus_per_node=gpus_per_node
    )
    args, kwargs = checked_inputs(model, example_inputs)
    # Not "auto", which needs a budget: the memory left for activations depends on the cut.
    every = [name for name in RECOMPUTE if name != "auto"]
    policies = [options["recompute"]] if "recompute" in options else every
    # Divisors of the node size only: a group across two nodes would send over the network.
    widths = [tp for tp in range(1, gpus_per_node + 1) if gpus_per_node % tp == gpus % tp == 0]
    schedules = list(dict.fromkeys(schedules))
    settings = _settings(widths, policies, schedules, options)
    # Raise before the model is captured.
    settings[0].refuse_device_memory("suggest")
    wishes_of(settings[0].hints, parameters_of(model))
    search = _Search(memory_bytes, top, schedules)
    programs = build_settings(model, args, kwargs, settings)
    for compile_options, compiled in zip(settings, programs, strict=True):
        in_stages, plan = compile_options.loss_only, compiled.plan
        try:
            chain = Chain.of(compiled, plan) if in_stages else Chain.uncut(plan)
        except ArgumentError:  # without a loss there are no stages
            continue
        setting = _Setting(plan, chain, compile_options)
        for grid in _grids(gpus, plan.tp, setting.num_layers):
            if in_stages == (grid.pp > 1):
                search.add(setting, grid, microbatches, checked)
    return search.run()


def _settings(
    widths: Sequence[int], policies: Sequence[str], schedules: Sequence[str], options: Options
) -> list[CompileOptions]:
    """Return all options with which a grid may need the model compiled, grouped by ``tp``."""
    splits = {SCHEDULES[name].delays_weights for name in schedules}
    # A single stage has the model's outputs and no schedule, so its backward is one function.
    forms = [(False, False), *((True, split) for split in sorted(splits))]
    return [
        # As pipeline() compiles it, so that values that depend only on inputs are in no stage.
        replace(
            CompileOptions.of(tp, {**options, "recompute": recompute}),
            tables_apart=True,
            loss_only=loss_only,
            split_backward=split_backward,
        )
        for tp in widths
        for loss_only, split_backward in forms
        for recompute in policies
    ]


def _check(schedules: Sequence[str], options: Options) -> None:
    """Raise an error for unknown schedules, and for options that the search does not support."""
    known = [*SCHEDULES]  # a list, so that unhashable values are unknown too
    listed = isinstance(schedules, Sequence) and not isinstance(schedules, str)
    # Without schedules only grids without stages would be left, the others not even rejected.
    if not listed or not schedules or any(name not in known for name in schedules):
        raise ArgumentError(f"schedules={schedules!r}: expected a list of {', '.join(known)}")
    if taken := sorted({"tp", "mesh"} & options.keys()):
        raise ArgumentError(f"{taken[0]}={options[taken[0]]!r}: suggest finds it; leave it out")  # type: ignore[literal-required]
    if options.get("strict"):
        raise ArgumentError(
            "strict=True: parts that are replicated on one grid may be sharded on another, and "
            "suggest compares only times; leave it out, and plan the grid of your choice with it"
        )


def _grids(gpus: int, tp: int, num_layers: int) -> Iterator[GridSizes]:
    """Return grids of this number of devices; the data axis is either ``dp_shard`` or
    ``dp_replicate``."""
    for pp in range(1, num_layers + 1):
        if (gpus // tp) % pp == 0:
            data = gpus // tp // pp
            yield GridSizes(tp, pp, dp_shard=data)
            # Both at once (HSDP) is not tried: it is between the two in memory and in time.
            if data > 1:
                yield GridSizes(tp, pp, dp_replicate=data)


@dataclass(frozen=True)
class _Setting:
    """Data of a compiled program for the search, for a single stage or for several."""

    plan: Plan
    chain: Chain
    options: CompileOptions

    @property
    def num_layers(self) -> int:
        # A model without layers is one stage.
        return max(1, sum(call.path != "" for call in self.chain.calls))

    def with_rest(self, rest: _Setting) -> _Setting:
        """Return the setting of stages that run some microbatches by ``rest``."""
        plan_options = {**self.plan.options, "recompute_rest": rest.options.recompute}
        return replace(
            self,
            plan=replace(self.plan, options=plan_options),
            chain=replace(self.chain, rest=rest.plan, rest_calls=rest.chain.calls),
        )

    def least_bytes(self, options: GridOptions) -> int:
        """Return a lower bound on the bytes of the fullest rank, whatever the cut."""
        grid, chain, per_parameter = options.grid, self.chain, options.bytes_per_parameter
        used = used_parameters(chain.calls, chain.parameters)
        if grid.pp == 1:
            state = sum(state_bytes(size, per_parameter, grid) for size in used)
            gathered = gathered_bytes(chain.calls, chain.parameters, grid)
            # Rounded down, as plans round the state to the nearest integer.
            return math.floor(state + gathered + self.plan.activation_peak_bytes)
        held = sum(held_bytes(size, per_parameter, grid) for size in used)
        kept = kept_bytes(chain.calls)
        # In every schedule the ranks, in some order, have at one time 1, 2, 3, ... microbatches in
        # flight in each of their stages, or all that there are. A rank with n that holds h and
        # keeps k per microbatch needs M >= h + n k. With weights w = max(1, t / n), for any t, the
        # sum over ranks is M sum(w) >= sum(w h) + sum(w n k) >= held + t kept, as w >= 1 and
        # w n >= t. Between two values of n the bound is monotonic in t.
        in_flight = [min(number, options.microbatches) for number in range(1, grid.pp + 1)]
        return math.floor(
            max((held + t * kept) / sum(max(1, t / n) for n in in_flight) for t in in_flight)
        )

    def least_us(self, options: GridOptions) -> float:
        """Return the time of a step with equal stages; see the papers of the schedules."""
        grid, calls = options.grid, self.chain.calls
        microbatch_us = sum(call.step_us for call in calls) / grid.pp
        waits_us = (grid.pp - 1) * microbatch_us / options.stages()[1]
        if options.stages()[0].delays_weights:
            # arXiv 2401.10241, table 2: the bubble is at least the forwards; none in a V schedule.
            forward_us = sum(call.forward_us for call in calls) / grid.pp
            waits_us = 0.0 if options.stages()[0].is_v else (grid.pp - 1) * forward_us
        return options.microbatches * microbatch_us + waits_us


@dataclass(frozen=True)
class _Candidate:
    """A setting on a grid.

    Attributes:
        least_us: lower bound of the time of a step.
        needed: lower bound of the bytes of the fullest rank.
    """

    least_us: float
    needed: int
    setting: _Setting
    options: GridOptions

    def made(self, plan: GridPlan) -> bool:
        """Return whether ``plan`` was made from this candidate."""
        made_with = plan.grid, plan.schedule, plan.stages_per_rank
        own = self.options.grid, self.options.schedule, self.options.stages()[1]
        return own == made_with and plan.microbatch is self.setting.plan

    def differs_in_recompute(self, other: _Candidate) -> bool:
        """Return whether ``other`` differs only in ``recompute``."""
        own, others = self.setting.options, other.setting.options
        return self.options == other.options and own == replace(others, recompute=own.recompute)

    def with_rest(self, rest: _Candidate, memory_bytes: int) -> _Candidate:
        """Return a candidate whose stages run microbatches that do not fit with ``rest``."""
        name = str(rest.setting.options.recompute)
        # The limit is per stage, and all stages of a rank share its memory.
        memory = memory_bytes // self.options.stages()[1]
        return _Candidate(
            self.least_us,
            rest.needed,
            self.setting.with_rest(rest.setting),
            replace(self.options, memory=memory, recompute_rest=name),
        )


class _Search:
    """Candidates, and the best plan of each grid so far."""

    def __init__(self, memory_bytes: int, top: int, schedules: Sequence[str]) -> None:
        self._memory_bytes, self._top = memory_bytes, top
        self._schedules: list[tuple[str, int | None]] = [
            (name, chunks)
            for name in schedules
            for chunks in (_CHUNKS if name == "interleaved" else (None,))
        ]
        self._candidates: list[_Candidate] = []
        self._best: dict[GridSizes, GridPlan] = {}
        # For grids without a plan that fits: the minimum over all settings of the bound of memory,
        # of the memory of a plan, and of the time.
        self._needed_bytes: dict[GridSizes, int] = {}
        self._planned_bytes: dict[GridSizes, int] = {}
        self._least_us: dict[GridSizes, float] = {}
        self._impossible: dict[GridSizes, str] = {}

    def add(self, setting: _Setting, grid: GridSizes, microbatches: int, like: GridOptions) -> None:
        """Add the candidates of ``setting`` on ``grid``, otherwise like ``like``."""
        if microbatches % grid.data:
            self._impossible[grid] = f"{microbatches} microbatches are not divisible by {grid.data}"
            return
        for schedule, per_rank in self._schedules if grid.pp > 1 else [("1f1b", None)]:
            if SCHEDULES[schedule].delays_weights != setting.options.split_backward:
                continue
            try:
                options = replace(
                    like,
                    grid=grid,
                    microbatches=microbatches // grid.data,
                    schedule=schedule,
                    stages_per_rank=per_rank,
                )
            except ArgumentError as error:  # too few microbatches, or some left over
                self._impossible[grid] = str(error)
                continue
            # Silently: the grid may still work with fewer stages per rank.
            if grid.pp * options.stages()[1] > setting.num_layers and grid.pp > 1:
                continue
            needed, least_us = setting.least_bytes(options), setting.least_us(options)
            self._candidates.append(_Candidate(least_us, needed, setting, options))
            if needed > self._memory_bytes:
                self._needed_bytes[grid] = min(needed, self._needed_bytes.get(grid, needed))

    def run(self) -> Suggestions:
        """Plan candidates until no remaining one can be among the best."""
        self._plan_all(each for each in self._candidates if each.needed <= self._memory_bytes)
        self._plan_all([*self._mixed()])  # a list, as planning changes the best plans
        kept = self._fastest()
        return Suggestions(tuple(kept), tuple(self._rejected(kept)), self._memory_bytes)

    def _plan_all(self, candidates: Iterable[_Candidate]) -> None:
        for candidate in sorted(candidates, key=lambda each: each.least_us):
            grid, least_us = candidate.options.grid, candidate.least_us
            limit_us = self._limit_us()
            before = self._best.get(grid)
            if least_us >= (limit_us if before is None else min(limit_us, before.step_us)):
                if before is None:
                    self._least_us[grid] = min(least_us, self._least_us.get(grid, least_us))
                continue
            planned = self._planned(candidate.setting, candidate.options)
            if planned is not None and (before is None or planned.step_us < before.step_us):
                self._best[grid] = planned

    def _mixed(self) -> Iterator[_Candidate]:
        """Return candidates that use the memory which the best plans leave.

        Their stages run as many microbatches as fit with less recomputation. Other plans are not
        tried with two settings: how many microbatches fit is known only after the cut, so there is
        no lower bound of the time that would exclude many of them.
        """
        for plan in self._fastest():
            (rest,) = (each for each in self._candidates if each.made(plan))
            for most in self._candidates if plan.grid.pp > 1 else ():
                if most.differs_in_recompute(rest) and most.least_us < rest.least_us:
                    yield most.with_rest(rest, self._memory_bytes)

    def _fastest(self) -> list[GridPlan]:
        """Return the plans that would be returned now."""
        return sorted(self._best.values(), key=lambda plan: plan.step_us)[: self._top]

    def _limit_us(self) -> float:
        """Return the time of the last plan that would be returned now."""
        fastest = self._fastest()
        return fastest[-1].step_us if len(fastest) == self._top else float("inf")

    def _planned(self, setting: _Setting, options: GridOptions) -> GridPlan | None:
        """Return the plan if it fits, with a cut that respects memory if necessary."""
        # First without a limit, because that cut is shared by all sizes of the data axes.
        limits = [None, self._memory_bytes] if options.grid.pp > 1 else [None]
        for memory in limits if options.memory is None else [options.memory]:
            try:
                plan = grid_plan(setting.plan, setting.chain, replace(options, memory=memory))
            except NoCutError:
                continue
            if plan.total_bytes <= self._memory_bytes:
                return plan
            known = self._planned_bytes.get(options.grid, plan.total_bytes)
            self._planned_bytes[options.grid] = min(plan.total_bytes, known)
        return None

    def _rejected(self, kept: Sequence[GridPlan]) -> Iterator[Rejected]:
        """Return grids that are not among ``kept``, the closest first."""
        shown = {plan.grid for plan in kept}
        # A grid may have a lower bound from one setting and a plan from another: show the plan.
        known_us = {grid: plan.step_us for grid, plan in self._best.items()}
        times_us = {**self._least_us, **known_us}
        for grid, step_us in sorted(times_us.items(), key=lambda each: each[1]):
            if grid not in shown:
                at_least = "" if grid in known_us else "at least "
                yield Rejected(grid, f"a step takes {at_least}{time_text(step_us)}")
        needed_bytes = {**self._needed_bytes, **self._planned_bytes}
        for grid, num_bytes in sorted(needed_bytes.items(), key=lambda each: each[1]):
            if grid not in times_us:
                # No bound: another cut may need less than the fastest, though too much as well.
                planned = grid in self._planned_bytes
                needs = "no cut found that fits; the fastest needs" if planned else "needs at least"
                yield Rejected(grid, f"{needs} {bytes_text(num_bytes)} per device")
        for grid, reason in self._impossible.items():
            if grid not in times_us and grid not in needed_bytes:
                yield Rejected(grid, reason)
