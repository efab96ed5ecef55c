"""Activation memory of one pipeline stage: saved bytes per microbatch, and the peak while one runs.

::

    rank 0 of 1F1B    F0 F1 B0 F2 B1 ...
    kept              1  2  1  2  1     microbatches, each until its backward
    at B0             microbatch 1 kept, and the peak of the backward of microbatch 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sp_compiler.pipeline_parallel.schedules import (
    BACKWARD_INPUTS,
    BACKWARD_WEIGHTS,
    FORWARD,
    FULL_BACKWARD,
    Action,
)
from sp_compiler.planning.data import CallPlan


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one microbatch in one stage.

    Attributes:
        kept_bytes: bytes saved from forward to backward, each storage once.
        handed_bytes: bytes passed from the backward for inputs to the one for parameters, if there
            are two.
        peak_bytes: peak of the microbatch's bytes during each kind of action.
    """

    kept_bytes: int
    handed_bytes: int
    peak_bytes: Mapping[Any, int]

    @classmethod
    def of(cls, calls: Sequence[CallPlan]) -> StageMemory:
        """Return the memory of a stage of ``calls``."""
        forward = backward = inputs = 0
        # A dict, because a storage that several calls save (a mask, rotary tables) exists once.
        kept: dict[int, int] = {}
        kept_bytes = 0
        left_bytes = handed_bytes = sum(call.memory.handed_bytes for call in calls)
        # The gradient that another stage sent is held to the end of this stage's backward.
        received_bytes = calls[-1].memory.tangents_bytes if calls else 0
        for call in calls:
            memory = call.memory
            forward = max(forward, kept_bytes + memory.forward_bytes)
            for storage, num_bytes in call.kept:
                kept_bytes += num_bytes - kept.get(storage, 0)
                kept[storage] = num_bytes
            around_bytes = kept_bytes + (received_bytes if call is not calls[-1] else 0)
            backward = max(backward, around_bytes + memory.backward_bytes)
            left_bytes -= memory.handed_bytes
            inputs = max(inputs, around_bytes + left_bytes + memory.inputs_bytes)
        # They run in the order of the backward, the last call first; each frees what it was handed.
        weights = left_bytes = 0
        for call in calls:
            left_bytes += call.memory.handed_bytes
            weights = max(weights, left_bytes + call.memory.weights_bytes)
        if handed_bytes:
            # A backward in two functions has no third one: both run, one after the other.
            backward = max(inputs, weights)
        return cls(
            kept_bytes,
            handed_bytes,
            {
                FORWARD: max(forward, kept_bytes),
                FULL_BACKWARD: backward,
                BACKWARD_INPUTS: inputs,
                BACKWARD_WEIGHTS: weights,
            },
        )

    def peak_of(self, in_flight: int) -> int:
        """Return the peak with ``in_flight`` microbatches, one of them running."""
        peak_bytes = max(self.peak_bytes[FORWARD], self.peak_bytes[FULL_BACKWARD])
        # What a microbatch keeps while others run.
        return (in_flight - 1) * max(self.kept_bytes, self.handed_bytes) + peak_bytes


@dataclass(frozen=True)
class RankActivations:
    """Peak of the activations on one rank of a pipeline in a step.

    Attributes:
        in_flight: largest number of forwards whose backward has not finished.
        kept_bytes: largest number of bytes that these forwards save.
        peak_bytes: bytes including those of the running action.
    """

    in_flight: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0

    @classmethod
    def of(
        cls, order: Sequence[Action], memory_of: Callable[[Action], StageMemory]
    ) -> RankActivations:
        """Simulate the ``order`` of a rank; ``memory_of`` returns that of an action's stage."""
        count = now_bytes = 0
        most = most_bytes = peak_bytes = 0
        for action in order:
            memory, kind = memory_of(action), action.kind
            before = after = 0
            if kind is FORWARD:
                after = memory.kept_bytes
            elif kind is FULL_BACKWARD:
                before = memory.kept_bytes
            elif kind is BACKWARD_INPUTS:
                before, after = memory.kept_bytes, memory.handed_bytes
            else:
                assert kind is BACKWARD_WEIGHTS, kind
                before = memory.handed_bytes
            others_bytes = now_bytes - before
            peak_bytes = max(peak_bytes, others_bytes + memory.peak_bytes[kind])
            now_bytes = others_bytes + after
            count += action.starts - action.ends
            most, most_bytes = max(most, count), max(most_bytes, now_bytes)
        return cls(most, most_bytes, peak_bytes)
