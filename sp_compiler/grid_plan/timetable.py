"""Times of the actions of each rank of a pipeline, from the schedule's own order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sp_compiler.pipeline_parallel.schedules import (
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    FULL_BACKWARD,
    Action,
)


@dataclass(frozen=True)
class StageTimes:
    """Time of one microbatch in one stage.

    Attributes:
        receive_us: time to receive its activations from the previous stage, if on another rank.
        receive_gradient_us: time to receive their gradients from the next stage.
        split_us: times of the backward's two functions, for inputs and for weights, if the program
            has them; else each counts as half of the backward.
        rest: times of the microbatches that are not in ``saving``, if these recompute more.
        saving: numbers of microbatches.
    """

    forward_us: float
    backward_us: float
    receive_us: float = 0.0
    receive_gradient_us: float = 0.0
    split_us: tuple[float, float] | None = None
    rest: StageTimes | None = None
    saving: frozenset[int] = frozenset()

    def recomputes(self, microbatch: int) -> bool:
        """Return whether ``microbatch`` takes the time of ``rest``."""
        return self.rest is not None and microbatch not in self.saving

    def mean_us(self, microbatches: int) -> tuple[float, float]:
        """Return the times of forward and backward, the mean over ``microbatches``."""
        if self.rest is None:
            return self.forward_us, self.backward_us
        part = len(self.saving) / microbatches
        return (
            part * self.forward_us + (1 - part) * self.rest.forward_us,
            part * self.backward_us + (1 - part) * self.rest.backward_us,
        )

    def action_us(self, action: Action) -> float:
        if self.rest is not None and self.recomputes(action.microbatch):
            return self.rest.action_us(action)
        if action.kind is FORWARD:
            return self.forward_us
        if action.kind is FULL_BACKWARD:
            return self.backward_us
        # The two products of a linear layer's backward have the same size.
        halves = self.split_us or (self.backward_us / 2, self.backward_us / 2)
        return halves[action.kind is BACKWARD_WEIGHTS]


class ActionRun(NamedTuple):
    """One action of a rank in a step.

    Attributes:
        free_us: time when the rank's previous action ended.
        sent_us: time when the neighbouring stage had computed its input; 0 if it needs none.
        begin_us: time when that input had also arrived.
    """

    action: Action
    free_us: float
    sent_us: float
    begin_us: float
    end_us: float

    @property
    def bubble_us(self) -> float:
        """Time during which the rank waited for another to compute."""
        return max(0.0, self.sent_us - self.free_us)

    @property
    def message_us(self) -> float:
        """Time during which it waited for a message in flight."""
        return self.begin_us - max(self.free_us, self.sent_us)


def run_orders(
    orders: Sequence[Sequence[Action]], times: Sequence[StageTimes]
) -> list[list[ActionRun]]:
    """Simulate the order of each rank.

    A rank starts an action when the previous one has ended and its input has arrived. Messages
    travel while ranks compute.
    """
    runs: list[list[ActionRun]] = [[] for _ in orders]
    for rank, run in _simulated(orders, times):
        runs[rank].append(run)
    return runs


def finish_us(orders: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> list[float]:
    """Return when each rank has finished its order."""
    finished_us = [0.0] * len(orders)
    # Does not keep the runs: a search simulates many schedules of 100 000 actions, which Python's
    # garbage collector would traverse again and again.
    for rank, run in _simulated(orders, times):
        finished_us[rank] = run.end_us
    return finished_us


def _simulated(
    orders: Sequence[Sequence[Action]], times: Sequence[StageTimes]
) -> Iterator[tuple[int, ActionRun]]:
    """Yield each run with its rank, those of a rank in order."""
    last_stage = len(times) - 1
    # By direction, stage and microbatch. The previous stage waits for the gradients of inputs,
    # whichever action computes them.
    done_us: dict[tuple[bool, int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    places = [0] * len(orders)
    clock_us = [0.0] * len(orders)
    # Ranks whose next action has its input. The others are woken by the action that computes it, so
    # that each action is visited at most twice.
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order = orders[rank]
        while places[rank] < len(order):
            action = order[places[rank]]
            stage, number = action.stage, action.microbatch
            is_forward = action.kind is FORWARD
            begin_us, sent_us = clock_us[rank], 0.0
            neighbour = stage - 1 if is_forward else stage + 1
            if action.kind is not BACKWARD_WEIGHTS and 0 <= neighbour <= last_stage:
                needed = (is_forward, neighbour, number)
                if needed not in done_us:
                    waiting[needed] = rank
                    break
                each, sent_us = times[stage], done_us[needed]
                travel_us = each.receive_us if is_forward else each.receive_gradient_us
                begin_us = max(begin_us, sent_us + travel_us)
            end_us = begin_us + times[stage].action_us(action)
            yield rank, ActionRun(action, clock_us[rank], sent_us, begin_us, end_us)
            places[rank] += 1
            clock_us[rank] = end_us
            if action.kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUTS):
                made = (is_forward, stage, number)
                done_us[made] = end_us
                if made in waiting:
                    runnable.append(waiting.pop(made))
    # With a cycle between ranks, some actions would never be woken.
    assert places == list(map(len, orders)), "the schedule waits for itself"
