"""Steps of a pipeline that recomputes in its bubbles, like MindSpeed's, and ours in its memory.

    python -m benchmarks.overlap_mindspeed [--models GPT Llama Mixtral]

MindSpeed's pipeline (RiPipe, mindspeed/core/pipeline_parallel/ripipe_schedules.py of
Ascend/MindSpeed) makes the recomputation of a microbatch a separate action, which waits for no
gradient. *In advance*: every stage recomputes its forward before the gradient arrives, except for
the last layer of the model. *In bubble*: a rank that would hold more microbatches than the pipeline
has stages recomputes those in excess; the others keep everything. In its layers every collective is
exposed or, in the second column of times, overlaps as in our schedule: then the only difference is
what is recomputed, and when.

Ours is the fastest plan that takes no more memory: any policy or ``recompute="auto"`` at several
budgets; some microbatches may use one of them and the others another, as with ``recompute_rest=``;
layers work alone, as in every pipeline. All steps are computed by the same simulator: the layers of
:mod:`benchmarks.overlap` on its links, four ranks with two stages of four layers each, 16
microbatches; embeddings and head are left out, and messages take no time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    FORWARD,
    FULL_BACKWARD,
    Action,
    most_in_flight,
    schedule_of,
)
from sp_compiler.planning.planned_program import PlannedProgram

PIPELINE, PER_RANK, MICROBATCHES = 4, 2, 16
STAGES = PIPELINE * PER_RANK
# In the simulator, the action that needs nothing of another stage is a backward for weights.
RECOMPUTATION = BACKWARD_WEIGHTS
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


def in_advance(rank: int) -> list[Action]:
    """Return the order of ``rank`` with a recomputation before every backward."""
    return with_recomputations(orders()[rank], backwards(orders()[rank]))


def in_bubble(rank: int) -> list[Action]:
    """Return the order of ``rank`` with the recomputations of *in bubble*.

    A microbatch whose backward alternates with forwards is recomputed just before it. Those whose
    backward comes later are recomputed early, while the rank waits for gradients: one before the
    first of these backwards, then one after each backward.
    """
    order, recomputed = orders()[rank], recomputed_in_bubble(rank)
    last_forward = max(place for place, action in enumerate(order) if action.kind is FORWARD)
    alternating, draining = order[: last_forward + 2], order[last_forward + 2 :]
    found = with_recomputations(alternating, recomputed)
    early = [action._replace(kind=RECOMPUTATION) for action in draining if action in recomputed]
    for place, action in enumerate(draining):
        found += [*early[place : place + 1], action]
    return found


def with_recomputations(order: list[Action], recomputed: Collection[Action]) -> list[Action]:
    """Return ``order`` with a recomputation just before each of these backwards."""
    found: list[Action] = []
    for action in order:
        if action in recomputed:
            found.append(action._replace(kind=RECOMPUTATION))
        found.append(action)
    return found


def backwards(order: list[Action]) -> set[Action]:
    return {action for action in order if action.kind is FULL_BACKWARD}


def recomputed_in_bubble(rank: int) -> set[Action]:
    """Return the backwards of ``rank`` that need a recomputation.

    Forwards come in groups: a round of microbatches through the first stage of the rank, then
    through the next. The first group keeps everything. Of the second, as many recompute as would be
    in flight beyond one group. After that only the first stage does: those microbatches of a round
    that are in flight together with the next round, and the very last one.
    """
    forwards = [action for action in orders()[rank] if action.kind is FORWARD]
    group = PIPELINE * PER_RANK
    excess = in_flight(rank) - group
    if excess <= 0:
        return set()
    last_round = len(forwards) // group - 1
    # MindSpeed treats three rounds and fewer apart.
    assert last_round > 2
    recomputed = forwards[group : group + excess]
    for number in range(2, last_round + 1):
        first_stage = forwards[number * group : number * group + PIPELINE]
        recomputed += first_stage[1 + 2 * rank :] if number < last_round else first_stage[-1:]
    return {action._replace(kind=FULL_BACKWARD) for action in recomputed}


def in_flight(rank: int) -> int:
    """Return the most microbatches that ``rank`` holds, of its stages together."""
    (most,) = most_in_flight([[each._replace(stage=0) for each in orders()[rank]]], 1)
    return most


def step_us(stage: Stage, rest: Stage, saving: Collection[int]) -> float:
    """Return the time of a step, of which the microbatches ``saving`` run by ``stage`` and the
    others by ``rest``."""
    others = StageTimes(rest.forward_us, rest.backward_us)
    times = StageTimes(stage.forward_us, stage.backward_us, rest=others, saving=frozenset(saving))
    return max(finish_us(orders(), [times] * STAGES))


def bytes_of(stage: Stage, rest: Stage, saving: Collection[int]) -> int:
    """Return the most that the first rank holds, which has most microbatches in flight."""
    kept_bytes = {
        action: (stage if action.microbatch in saving else rest).kept_bytes
        for action in orders()[0]
    }
    return most_bytes(orders()[0], kept_bytes) + max(stage.working_bytes, rest.working_bytes)


def mindspeed_bytes(
    stage: Stage, input_bytes: int, with_recomputation: Sequence[Sequence[Action]]
) -> int:
    """Return the most that any rank keeps; microbatches are whole again once recomputed."""
    most = 0
    for order in with_recomputation:
        kept_bytes = dict.fromkeys(order, stage.kept_bytes)
        for action in order:
            if action.kind is RECOMPUTATION:
                kept_bytes[action._replace(kind=FORWARD)] = input_bytes
        most = max(most, most_bytes(order, kept_bytes))
    return most


def most_bytes(order: Sequence[Action], kept_bytes: Mapping[Action, int]) -> int:
    """Return the most that a rank holds after any of its actions, which keep ``kept_bytes``."""
    held_bytes: dict[tuple[int, int], int] = {}
    most = 0
    for action in order:
        held_bytes[action.stage, action.microbatch] = kept_bytes[action]
        most = max(most, sum(held_bytes.values()))
        if action.kind is FULL_BACKWARD:
            del held_bytes[action.stage, action.microbatch]
    return most


def mindspeed_us(stage: Stage, with_recomputation: Sequence[Sequence[Action]]) -> float:
    """Return the time of a step whose orders have recomputations of a stage's forward; the last
    layer of the model never needs one."""
    again_us = [stage.forward_us] * (STAGES - 1) + [stage.forward_us * (LAYERS - 1) / LAYERS]
    times = [StageTimes(stage.forward_us, stage.backward_us, split_us=(0, us)) for us in again_us]
    return max(finish_us(with_recomputation, times))


def ours(name: str, device: Hardware, limits_bytes: Sequence[int]) -> list[Stage]:
    """Return our layers with several amounts of saved memory; with some of them, the microbatches
    in flight have equal parts of ``limits_bytes``."""
    wishes: dict[str, Any] = {"hardware": device, "tables_apart": True}
    programs = {each: compiled(name, recompute=each, **wishes) for each in POLICIES}
    least, most = (step_memory(programs[each]) for each in ("full", "none"))
    found = [Stage.of(program) for program in programs.values()]
    more_bytes = [round(part * (most.kept_bytes - least.kept_bytes)) for part in BUDGETS]
    more_bytes += [limit // in_flight(0) - least.kept_bytes for limit in limits_bytes]
    for more in more_bytes:
        budget = least.peak_bytes + max(0, more)
        program = compiled(name, recompute="auto", memory_budget=budget, **wishes)
        found.append(Stage.of(program))
    return found


def rows(name: str, device: Hardware) -> Iterator[Row]:
    """Simulate both policies on one link."""
    wishes: dict[str, Any] = {"hardware": device, "tables_apart": True, "recompute": "none"}
    waiting, overlapped = (Stage.of(compiled(name, overlap=on, **wishes)) for on in (False, True))
    # What layers keep that recompute everything but their input.
    inputs = compiled(name, **(wishes | {"recompute": "full"}))
    input_bytes = Stage.of(inputs).kept_bytes
    policies = {
        policy: [order_of(rank) for rank in range(PIPELINE)]
        for policy, order_of in (("in advance", in_advance), ("in bubble", in_bubble))
    }
    kept_bytes = {
        policy: mindspeed_bytes(waiting, input_bytes, found) for policy, found in policies.items()
    }
    stages = ours(name, device, list(kept_bytes.values()))
    for policy, with_recomputation in policies.items():
        num_bytes = kept_bytes[policy] + waiting.working_bytes
        fitting = [
            (step_us(stage, rest, saving), our_bytes)
            for stage, rest in itertools.product(stages, repeat=2)
            for count in range(1, PIPELINE + 1)
            for saving in [[n for n in range(MICROBATCHES) if n % PIPELINE < count]]
            if (our_bytes := bytes_of(stage, rest, saving)) <= num_bytes
        ]
        waiting_us, overlapped_us = (
            mindspeed_us(each, with_recomputation) for each in (waiting, overlapped)
        )
        yield Row(policy, num_bytes, waiting_us, overlapped_us, *min(fitting))


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
