"""The schedules of torch.distributed.pipelining, by the user's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType
from torch.torch_version import TorchVersion

from sp_compiler.base.errors import ArgumentError, UnsupportedError, expected_one_of

FORWARD = _ComputationType.FORWARD
FULL_BACKWARD = _ComputationType.FULL_BACKWARD
BACKWARD_WEIGHTS = _ComputationType.BACKWARD_WEIGHT
BACKWARD_INPUTS = _ComputationType.BACKWARD_INPUT


class Action(NamedTuple):
    """One action of a rank: one direction of one stage for one microbatch."""

    kind: _ComputationType
    stage: int
    microbatch: int

    @property
    def starts(self) -> bool:
        """Return whether activations of the microbatch are held from here on."""
        return self.kind is FORWARD

    @property
    def ends(self) -> bool:
        """Return whether no activations of the microbatch are held after it."""
        return self.kind in (FULL_BACKWARD, BACKWARD_WEIGHTS)


@dataclass(frozen=True)
class Schedule:
    """One of the schedules.

    Attributes:
        name: the user's name for it.
        class_name: name of the class in ``torch.distributed.pipelining``.
        stages_per_rank: fixed number of stages per rank; 0 if the user chooses.
        delays_weights: whether weight gradients are separate actions.
        is_single: whether torch's class takes one stage instead of a list.
        is_v: whether the stages go down the ranks and up again.
    """

    name: str
    class_name: str
    stages_per_rank: int
    delays_weights: bool = False
    is_single: bool = False
    is_v: bool = False

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Return the rank that runs ``stage``."""
        lap, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.is_v and lap % 2 else place

    def make(self, stages: Sequence[Any], microbatches: int, loss: Callable[..., Tensor]) -> Any:
        """Return torch's schedule for these stages of this rank."""
        # Gradients are not scaled after the schedule: that would also scale those accumulated
        # before, and a tied parameter's once per stage. Losses are scaled instead.
        return getattr(torch_schedules, self.class_name)(
            stages[0] if self.is_single else list(stages),
            n_microbatches=microbatches,
            loss_fn=loss,
            scale_grads=False,
        )

    def orders(self, num_ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Action]]:
        """Return the actions of each rank, in order."""
        if self.is_single:
            return [self._single_order(rank, num_ranks, microbatches) for rank in range(num_ranks)]
        num_stages = num_ranks * stages_per_rank
        # Torch's own table of actions; it needs stages only to know the place of this rank.
        stubs = [
            SimpleNamespace(
                num_stages=num_stages,
                group_size=num_ranks,
                group_rank=0,
                stage_index=stage,
                submod=None,
            )
            for stage in range(num_stages)
            if self.rank_of(stage, num_ranks) == 0
        ]
        # The sends and gathers of a schedule are not needed here, and take longest to compute.
        without = {"_prepare_schedule_with_comms": lambda *_: None}
        made = type(self.class_name, (getattr(torch_schedules, self.class_name),), without)
        table = made(stubs, microbatches).pipeline_order
        return [
            [
                Action(each.computation_type, each.stage_index, cast(int, each.microbatch_index))
                for each in _flat(table[rank])
            ]
            for rank in range(num_ranks)
        ]

    def _single_order(self, rank: int, num_ranks: int, microbatches: int) -> list[Action]:
        """Return the order of torch's schedules for one stage per rank, which have no table."""
        # 1F1B warms up with one forward per stage that follows; GPipe runs all of them.
        ahead = min(microbatches, microbatches if self.name == "gpipe" else num_ranks - rank)
        order = [Action(FORWARD, rank, number) for number in range(ahead)]
        for number in range(microbatches):
            order.append(Action(FULL_BACKWARD, rank, number))
            if number + ahead < microbatches:
                order.append(Action(FORWARD, rank, number + ahead))
        return order

    def in_flight(self, num_ranks: int, stages_per_rank: int, microbatches: int) -> list[int]:
        """Return for each stage the largest number of microbatches whose activations it holds."""
        orders = self.orders(num_ranks, stages_per_rank, microbatches)
        return most_in_flight(orders, num_ranks * stages_per_rank)


def most_in_flight(orders: Sequence[Sequence[Action]], num_stages: int) -> list[int]:
    """Return for each stage the largest number of microbatches whose activations it holds."""
    most, now = [0] * num_stages, [0] * num_stages
    for order in orders:
        for action in order:
            now[action.stage] += action.starts - action.ends
            most[action.stage] = max(most[action.stage], now[action.stage])
    return most


SCHEDULES = {
    each.name: each
    for each in (
        Schedule("1f1b", "Schedule1F1B", 1, is_single=True),
        Schedule("gpipe", "ScheduleGPipe", 1, is_single=True),
        Schedule("interleaved", "ScheduleInterleaved1F1B", 0),
        Schedule("zero_bubble", "ScheduleInterleavedZeroBubble", 0, delays_weights=True),
        Schedule("dualpipev", "ScheduleDualPipeV", 2, delays_weights=True, is_v=True),
    )
}


def schedule_of(
    name: str, stages_per_rank: int | None, num_ranks: int, microbatches: int
) -> tuple[Schedule, int]:
    """Return the schedule and how many stages each rank has.

    Raises:
        ArgumentError: no such schedule, or numbers that it does not support.
        UnsupportedError: this version of torch cannot run it.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ArgumentError(f"schedule={name!r}: {expected_one_of(name, SCHEDULES, repr)}")
    schedule = SCHEDULES[name]
    if schedule.is_v and torch.__version__ < TorchVersion("2.12"):
        # To connect neighbours, older versions make a rank send to itself, which gloo refuses.
        raise UnsupportedError(
            f"schedule={name!r} needs torch 2.12 or newer, and this is {torch.__version__}"
        )
    default = schedule.stages_per_rank or (2 if name == "interleaved" else 1)
    per_rank = default if stages_per_rank is None else stages_per_rank
    for label, value in (("microbatches", microbatches), ("stages_per_rank", per_rank)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{label}={value!r}: expected a positive int")
    if schedule.stages_per_rank and per_rank != schedule.stages_per_rank:
        raise ArgumentError(
            f"stages_per_rank={per_rank}: schedule={name!r} has {schedule.stages_per_rank} on each "
            'rank; "interleaved" and "zero_bubble" take any number'
        )
    least = num_ranks * per_rank if schedule.is_v else num_ranks
    if microbatches < least and name != "gpipe":
        raise ArgumentError(
            f"microbatches={microbatches}: schedule={name!r} on {num_ranks} pipeline ranks needs "
            f"at least {least}, or ranks would never have work"
        )
    # Rounds as torch's interleaved schedules count them.
    rounds = max(1, microbatches // num_ranks)
    if not schedule.stages_per_rank and microbatches % rounds:
        raise ArgumentError(
            f"microbatches={microbatches}: schedule={name!r} on {num_ranks} pipeline ranks takes "
            f"them in {rounds} rounds of equal size; use a multiple of {num_ranks}"
        )
    return schedule, per_rank


def forward_only(stages: Sequence[Any], rank_of: Callable[[int], int], microbatches: int) -> Any:
    """Return a schedule without backward for these stages of this rank."""
    runtime = torch_schedules._PipelineScheduleRuntime(list(stages), microbatches)
    num_ranks, num_stages = stages[0].group_size, stages[0].num_stages
    table = {
        rank: [
            _Action(stage, FORWARD, number)
            for stage in range(num_stages)
            if rank_of(stage) == rank
            for number in range(microbatches)
        ]
        for rank in range(num_ranks)
    }
    for each in (runtime, *stages):
        each.stage_index_to_group_rank = {stage: rank_of(stage) for stage in range(num_stages)}
    # Not _prepare_schedule_with_comms, which refuses a table without backwards.
    runtime.pipeline_order_with_comms = torch_schedules._add_send_recv(
        table, stage_to_rank=rank_of, num_stages=num_stages
    )
    # From torch 2.15 on, a table also has the waits for sends; before, they are at the end.
    if hasattr(torch_schedules, "_add_wait_send"):
        order = torch_schedules._add_wait_send(runtime.pipeline_order_with_comms)
        runtime.pipeline_order_with_comms = order
    return runtime


def _flat(actions: Sequence[_Action | None]) -> list[_Action]:
    flat: list[_Action] = []
    for action in actions:
        if action is not None:
            flat += action.sub_actions or [action]
    return flat


def numbers(microbatches: int) -> Tensor:
    """Return the input that torch's schedules split into microbatches: their numbers, by which a
    stage finds its inputs, its seed and the weight of its loss."""
    return torch.arange(microbatches, device="cpu")
