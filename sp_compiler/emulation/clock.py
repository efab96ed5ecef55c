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
    """Return this thread's phase: "backward" while autograd runs, else "forward"."""
    # The engine of autograd sets the id while it runs a backward; elsewhere it is -1.
    return PHASES[torch._C._current_graph_task_id() != -1]


class Arrival(NamedTuple):
    """End of a transfer: its time, and the number of resets of the clock before it."""

    end_us: float
    num_resets: int


@dataclass
class VirtualClock:
    """Virtual time of one rank and of its link, in microseconds.

    Nothing sleeps. A collective that is issued now ends at max(now, end of the previous one) plus
    its time on the link; a wait before that advances the clock to its end.

    Attributes:
        hardware: profile that the times come from.
        world_size: number of ranks.
        compute: "modelled": estimated times of operators advance the clock; "measured": this
            thread's CPU time does.
        computed_us: time of operators, by phase.
        busy_us: time during which the link was busy, by phase.
        exposed_us: time during which the rank only waited for the link, by phase.
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
        """Reset the clock to 0; collectives in flight count as complete."""
        self._num_resets += 1
        self._now_us = self._link_free_us = 0.0
        # CPU time of the thread: another process on the machine must not lengthen the step.
        self._read_s = time.thread_time()
        # In place, because a user may hold them.
        for times_us in (self.computed_us, self.busy_us, self.exposed_us):
            times_us.update(dict.fromkeys(PHASES, 0.0))

    def now_us(self) -> float:
        """Return the current time, including computation since the last call."""
        if self.compute == "measured":
            self.advance((time.thread_time() - self._read_s) * 1e6)
            self._read_s = time.thread_time()
        return self._now_us

    def advance(self, time_us: float) -> None:
        """Advance the clock by ``time_us`` of computation."""
        self._now_us += time_us
        self.computed_us[current_phase()] += time_us

    def start(self, time_us: float) -> Arrival:
        """Start a transfer that takes ``time_us``; return its end."""
        self._link_free_us = max(self.now_us(), self._link_free_us) + time_us
        self.busy_us[current_phase()] += time_us
        return Arrival(self._link_free_us, self._num_resets)

    def wait_until(self, arrival: Arrival) -> None:
        """Advance the clock to ``arrival``, if that is in the future."""
        if arrival.num_resets != self._num_resets:
            return  # a time from before a reset
        missing_us = arrival.end_us - self.now_us()
        if missing_us > 0:
            self._now_us += missing_us
            self.exposed_us[current_phase()] += missing_us

    def forget_since_look(self) -> None:
        """Do not count computation since the last call: copies that emulate the link."""
        self._read_s = time.thread_time()
