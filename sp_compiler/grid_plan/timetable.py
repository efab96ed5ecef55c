"""When each rank of a pipeline runs what, and how much it keeps meanwhile, from the schedule's own
order of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        receive_us: of its activations, from the stage before on another rank.
        receive_gradient_us: of their gradients, from the stage behind.
    """

    forward_us: float
    backward_us: float
    receive_us: float = 0.0
    receive_gradient_us: float = 0.0

    def action_us(self, action: Action) -> float:
        if action.kind is FORWARD:
            return self.forward_us
        # The two products of a linear layer's backward have the same size.
        return self.backward_us if action.kind is FULL_BACKWARD else self.backward_us / 2


def finish_us(orders: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> list[float]:
    """Return when each rank is through with its order.

    A rank starts an action when the one before is done and what it needs has come. Messages travel
    while ranks compute.
    """
    last_stage = len(times) - 1
    # By direction, stage and microbatch. The gradients of inputs are what the stage before waits
    # for, whichever action makes them.
    done_us: dict[tuple[bool, int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    next_action, clock_us = [0] * len(orders), [0.0] * len(orders)
    # Ranks whose next action has what it needs; others are woken by the action that makes it, so
    # that each action is looked at twice at most.
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order = orders[rank]
        while next_action[rank] < len(order):
            action = order[next_action[rank]]
            stage, number = action.stage, action.microbatch
            is_forward = action.kind is FORWARD
            start_us = clock_us[rank]
            neighbour = stage - 1 if is_forward else stage + 1
            if action.kind is not BACKWARD_WEIGHTS and 0 <= neighbour <= last_stage:
                needed = (is_forward, neighbour, number)
                if needed not in done_us:
                    waiting[needed] = rank
                    break
                each = times[stage]
                travel_us = each.receive_us if is_forward else each.receive_gradient_us
                start_us = max(start_us, done_us[needed] + travel_us)
            clock_us[rank] = start_us + times[stage].action_us(action)
            next_action[rank] += 1
            if action.kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUTS):
                made = (is_forward, stage, number)
                done_us[made] = clock_us[rank]
                if made in waiting:
                    runnable.append(waiting.pop(made))
    assert next_action == list(map(len, orders)), "the schedule waits for itself"
    return clock_us


def most_kept(order: Sequence[Action], kept_bytes: Sequence[int]) -> tuple[int, int]:
    """Return the most forwards of a rank in flight, and the most bytes that such forwards keep.

    Args:
        kept_bytes: of one microbatch, by stage.
    """
    count = num_bytes = most = most_bytes = 0
    for action in order:
        # Gradients of weights need the activations too, so a microbatch ends with those.
        change = action.starts - action.ends
        count, num_bytes = count + change, num_bytes + change * kept_bytes[action.stage]
        most, most_bytes = max(most, count), max(most_bytes, num_bytes)
    return most, most_bytes
