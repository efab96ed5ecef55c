"""A virtual clock, advanced by operators and collectives."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from sp_compiler.cost.hardware import Hardware

Compute = Literal["modelled", "measured"]
PHASES = ("forward", "backward")


def current_phase() -> str:
    """Return the phase that this thread is in: autograd runs backward, everything else forward."""
    # The engine of autograd sets the id while it runs a backward; elsewhere it is -1.
    return PHASES[torch._C._current_graph_task_id() != -1]


class Arrival(NamedTuple):
    """When a transfer is through: the time, and after how many resets of the clock it was told."""

    end_us: float
    num_resets: int


@dataclass
class VirtualClock:
    """Time of one rank and of its link, in microseconds.

    Nothing sleeps: a collective that starts now ends at max(now, end of the previous one) plus its
    time on the link; waiting for it before that moves the clock there.

    Attributes:
        hardware: whose times they are.
        world_size: number of ranks.
        compute: "modelled": operators advance the clock; "measured": this thread's CPU time does.
        computed_us: by phase, of operators.
        busy_us: by phase, of the link.
        exposed_us: by phase, in which the rank did nothing but wait for the link.
    """

    hardware: Hardware
    world_size: int
    compute: Compute
    computed_us: dict[str, float] = field(default_factory=dict)
    busy_us: dict[str, float] = field(default_factory=dict)
    exposed_us: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_resets = 0
        self.reset()

    def reset(self) -> None:
        """Begin again at 0; collectives on their way have arrived."""
        self._num_resets += 1
        self._now_us = self._link_free_us = 0.0
        # CPU time of the thread: another process on the machine must not lengthen the step.
        self._read_s = time.thread_time()
        # In place, for a user may hold them.
        for times_us in (self.computed_us, self.busy_us, self.exposed_us):
            times_us.update(dict.fromkeys(PHASES, 0.0))

    def now_us(self) -> float:
        """Return the time, with what was computed since the last look."""
        if self.compute == "measured":
            self.advance((time.thread_time() - self._read_s) * 1e6)
            self._read_s = time.thread_time()
        return self._now_us

    def advance(self, time_us: float) -> None:
        """Compute for ``time_us``."""
        self._now_us += time_us
        self.computed_us[current_phase()] += time_us

    def start(self, time_us: float) -> Arrival:
        """Start a transfer that takes ``time_us``; return when it will be through."""
        self._link_free_us = max(self.now_us(), self._link_free_us) + time_us
        self.busy_us[current_phase()] += time_us
        return Arrival(self._link_free_us, self._num_resets)

    def wait_until(self, arrival: Arrival) -> None:
        """Do nothing until ``arrival``, if that is still to come."""
        if arrival.num_resets != self._num_resets:
            return  # a time that was counted from another beginning
        missing_us = arrival.end_us - self.now_us()
        if missing_us > 0:
            self._now_us += missing_us
            self.exposed_us[current_phase()] += missing_us

    def forget_since_look(self) -> None:
        """Leave out what was computed since the last look: copies that emulate the link."""
        self._read_s = time.thread_time()
