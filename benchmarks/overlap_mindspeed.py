"""Steps of a pipeline that recomputes in its bubbles, like MindSpeed's, and ours in its memory.

    python -m benchmarks.overlap_mindspeed [--models GPT Llama Mixtral]

MindSpeed's pipeline (RiPipe, docs/features/ripipe.md of Ascend/MindSpeed) makes the recomputation
of a microbatch a separate action, which waits for no gradient. *In advance*: every stage except the
end of the model recomputes its forward before the gradient arrives. *In bubble*: as many
microbatches as there are stages keep everything, and the others recompute in bubbles; here that
takes no time at all, its best case. In its layers every collective is exposed or, in the second
column of times, overlaps as in our schedule: then the only difference is what is recomputed, and
when.

Ours is the fastest plan that takes no more memory: any policy or ``recompute="auto"`` at several
budgets; some microbatches may use one of them and the others another, as with ``recompute_rest=``;
layers work alone, as in every pipeline. All steps are computed by the same simulator: the layers of
:mod:`benchmarks.overlap` on its links, four ranks with two stages of four layers each, 16
microbatches; embeddings and head are left out, and messages take no time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.overlap import (
    LAYERS,
    MODELS,
    POLICIES,
    SHARES,
    block_of,
    compiled,
    with_communication,
)
from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.grid_plan.timetable import StageTimes, finish_us
from sp_compiler.pipeline_parallel.schedules import (
    BACKWARD_WEIGHTS,
    FULL_BACKWARD,
    Action,
    most_in_flight,
    schedule_of,
)
from sp_compiler.planning.planned_program import PlannedProgram

PIPELINE, PER_RANK, MICROBATCHES = 4, 2, 16
STAGES = PIPELINE * PER_RANK
# Fractions of the additional bytes that "none" keeps over "full", for the budgets that ours tries.
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class Stage:
    """Layers of one stage, for one microbatch.

    Attributes:
        kept_bytes: saved between forward and backward.
        working_bytes: most that the backward of one layer takes besides.
    """

    forward_us: float
    backward_us: float
    kept_bytes: int
    working_bytes: int

    @classmethod
    def of(cls, program: PlannedProgram) -> Stage:
        """Return the layers of ``program``."""
        calls = [call for call in program.plan.calls if call.path]
        forward_us = sum(call.forward_us for call in calls)
        return cls(
            forward_us,
            sum(call.step_us for call in calls) - forward_us,
            sum(dict(item for call in calls for item in call.kept).values()),
            max(call.memory.backward_bytes for call in calls),
        )


@dataclass(frozen=True)
class Row:
    """A policy of MindSpeed, and ours in its memory.

    Attributes:
        waiting_us: its step, with collectives that are waited for.
        overlapped_us: its step, with collectives in the order of our schedule.
    """

    policy: str
    num_bytes: int
    waiting_us: float
    overlapped_us: float
    ours_us: float
    our_bytes: int


@cache
def orders() -> list[list[Action]]:
    """Return the actions of each rank under interleaved 1F1B."""
    schedule, per_rank = schedule_of("interleaved", PER_RANK, PIPELINE, MICROBATCHES)
    return schedule.orders(PIPELINE, per_rank, MICROBATCHES)


def in_flight() -> int:
    """Return the most microbatches that the first rank holds, of its stages together."""
    (most,) = most_in_flight([[each._replace(stage=0) for each in orders()[0]]], 1)
    return most


def step_us(stage: Stage, rest: Stage | None = None, saving: Collection[int] = ()) -> float:
    """Return the time of a step, of which the microbatches ``saving`` run by ``stage`` and the
    others by ``rest``, if that is given."""
    times = StageTimes(stage.forward_us, stage.backward_us)
    if rest is not None:
        others = StageTimes(rest.forward_us, rest.backward_us)
        times = replace(times, rest=others, saving=frozenset(saving))
    return max(finish_us(orders(), [times] * STAGES))


def most_bytes(stage: Stage, rest: Stage, saving: Collection[int]) -> int:
    """Return the most that the first rank holds, which has most microbatches in flight."""
    now_bytes = most = 0
    for action in orders()[0]:
        own = stage if action.microbatch in saving else rest
        now_bytes += own.kept_bytes * (action.starts - action.ends)
        most = max(most, now_bytes)
    return most + max(stage.working_bytes, rest.working_bytes)


def step_in_advance_us(stage: Stage) -> float:
    """Return the time of a step whose stages run their forward again before the gradient is there;
    the last layer of the model does not."""
    again_us = [stage.forward_us] * (STAGES - 1) + [stage.forward_us * (LAYERS - 1) / LAYERS]
    # In the simulator, what needs nothing of another stage is a backward for weights.
    times = [StageTimes(stage.forward_us, stage.backward_us, split_us=(0, us)) for us in again_us]
    with_recomputation: list[list[Action]] = []
    for order in orders():
        with_recomputation.append([])
        for action in order:
            if action.kind is FULL_BACKWARD:
                with_recomputation[-1].append(action._replace(kind=BACKWARD_WEIGHTS))
            with_recomputation[-1].append(action)
    return max(finish_us(with_recomputation, times))


def ours(name: str, device: Hardware) -> list[Stage]:
    """Return our layers with several amounts of saved memory."""
    wishes: dict[str, Any] = {"hardware": device, "tables_apart": True}
    programs = {each: compiled(name, recompute=each, **wishes) for each in POLICIES}
    least, most = (step_memory(programs[each]) for each in ("full", "none"))
    found = [Stage.of(program) for program in programs.values()]
    for part in BUDGETS:
        budget = round(least.peak_bytes + part * (most.kept_bytes - least.kept_bytes))
        program = compiled(name, recompute="auto", memory_budget=budget, **wishes)
        found.append(Stage.of(program))
    return found


def rows(name: str, device: Hardware) -> Iterator[Row]:
    """Simulate both policies on one link."""
    number = in_flight()
    wishes: dict[str, Any] = {"hardware": device, "tables_apart": True, "recompute": "none"}
    waiting, overlapped = (Stage.of(compiled(name, overlap=on, **wishes)) for on in (False, True))
    stages = ours(name, device)
    # What a layer with nothing but its input keeps.
    input_bytes = min(stage.kept_bytes for stage in stages)
    whole = min(number, STAGES)
    bytes_of = {
        "in advance": number * input_bytes + waiting.kept_bytes,
        "in bubble": whole * waiting.kept_bytes + (number - whole) * input_bytes,
    }
    times_of = {"in advance": step_in_advance_us, "in bubble": step_us}
    for policy, time_us in times_of.items():
        num_bytes = bytes_of[policy] + waiting.working_bytes
        fitting = [
            (step_us(stage, rest, saving), our_bytes)
            for stage, rest in itertools.product(stages, repeat=2)
            for count in range(1, PIPELINE + 1)
            for saving in [[n for n in range(MICROBATCHES) if n % PIPELINE < count]]
            if (our_bytes := most_bytes(stage, rest, saving)) <= num_bytes
        ]
        yield Row(policy, num_bytes, time_us(waiting), time_us(overlapped), *min(fitting))


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    print("| model | communication | policy | memory | waiting | overlapped | ours | memory |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.models:
        parts = block_of(compiled(name, recompute="none", overlap=False)).partitioned
        assert parts.backward is not None
        for share in SHARES:
            for row in rows(name, with_communication(share, [parts.forward, parts.backward])):
                times = (row.waiting_us, row.overlapped_us, row.ours_us)
                print(
                    f"| {name} | {share:.0%} | {row.policy} | {bytes_text(row.num_bytes)} "
                    f"| {' | '.join(map(time_text, times))} | {bytes_text(row.our_bytes)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
