"""Memory of each stage of a pipeline: parameters, optimizer, activations in flight.

Schedules are 1F1B and its interleaved form, as in Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473, sections 2.2.1 and 2.2.2). What
is in flight is counted on the schedule itself; for equal layers it comes to L (1 + (p - 1) / (p m))
layers of one microbatch on the first of p stages with m chunks each (Korthikanti et al., arXiv
2205.05198, section 4.2.3).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import bytes_text
from sp_compiler.planning.data import CallPlan, ParameterSize
from sp_compiler.planning.table_text import table

STATE_BYTES = 18.0
"""A parameter in mixed precision with Adam: a 16-bit value, the sum of its gradient, a master copy
and two moments in 32 bits."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage, on one rank.

    Attributes:
        chunks: the layers of each of its chunks.
        parameters: number of elements that it holds; one that several stages use is on each.
        state_bytes: of parameters, gradients and optimizer.
        in_flight: most forwards of a chunk whose backward has not run.
        activation_bytes: the most that those keep.
        working_bytes: the most that one call makes beside them.
        microbatch_us: estimated time of all its chunks, forward and backward of one microbatch.
    """

    chunks: tuple[tuple[str, ...], ...]
    parameters: int
    state_bytes: int
    in_flight: int
    activation_bytes: int
    working_bytes: int
    microbatch_us: float

    @property
    def total_bytes(self) -> int:
        """At most what the stage needs."""
        return self.state_bytes + self.activation_bytes + self.working_bytes


@dataclass(frozen=True)
class PipelinePlan:
    """Stages of a pipeline; ``print`` gives a table.

    Attributes:
        microbatches: of one step.
        bubble: idle part of the time that the stages compute, (p - 1) / (v m) for p equal stages
            with v chunks and m microbatches.
    """

    stages: tuple[StagePlan, ...]
    microbatches: int
    chunks: int
    bubble: float

    @property
    def step_us(self) -> float:
        """Estimated time of a step: the slowest stage's microbatches and the bubble."""
        slowest = max(stage.microbatch_us for stage in self.stages)
        return self.microbatches * slowest * (1 + self.bubble)

    @property
    def total_bytes(self) -> int:
        """Of the stage that needs most."""
        return max(stage.total_bytes for stage in self.stages)

    def to_dict(self) -> dict[str, object]:
        """Plain data, with what the properties derive."""
        stages = [{**asdict(stage), "total_bytes": stage.total_bytes} for stage in self.stages]
        derived = {"step_us": self.step_us, "total_bytes": self.total_bytes}
        return {**asdict(self), "stages": stages, **derived}

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        head = ("stage", "layers", "in flight", "state", "activations", "working", "total", "ms")
        rows = [
            (
                str(number),
                str(sum(path != "" for chunk in stage.chunks for path in chunk)),
                str(stage.in_flight),
                bytes_text(stage.state_bytes),
                bytes_text(stage.activation_bytes),
                bytes_text(stage.working_bytes),
                bytes_text(stage.total_bytes),
                f"{stage.microbatch_us / 1e3:.2f}",
            )
            for number, stage in enumerate(self.stages)
        ]
        return (
            f"{len(self.stages)} pipeline stages of {self.chunks} chunk{'s' * (self.chunks > 1)}, "
            f"{self.microbatches} microbatches; bubble {100 * self.bubble:.1f} %, estimated step "
            f"{self.step_us / 1e6:.3f} s\n" + table([head, *rows])
        )


def pipeline(
    calls: Sequence[CallPlan],
    sizes: Mapping[str, ParameterSize],
    stages: int,
    microbatches: int,
    *,
    chunks: int = 1,
    bytes_per_parameter: float = STATE_BYTES,
) -> PipelinePlan:
    """See :meth:`sp_compiler.Plan.pipeline`."""
    _check(calls, stages, microbatches, chunks, bytes_per_parameter)
    parts = _split(calls, stages * chunks)
    plans = []
    for stage in range(stages):
        # Chunks are dealt in turn, as Megatron's interleaving does: stage i has i, i + p, i + 2 p.
        own_chunks = parts[stage::stages]
        in_flight, activation_bytes = _most_in_flight(own_chunks, stage, stages, microbatches)
        # A set: a tied weight inside one stage is stored once; on two stages it is stored on both.
        used = {name for part in own_chunks for call in part for name in call.parameters}
        numel = sum(sizes[name].numel for name in used)
        # Frozen parameters have neither gradient nor optimizer state, only their own bytes.
        trained = sum(sizes[name].numel for name in used if sizes[name].trained)
        frozen_bytes = sum(sizes[name].num_bytes for name in used if not sizes[name].trained)
        plans.append(
            StagePlan(
                chunks=tuple(tuple(call.path for call in part) for part in own_chunks),
                parameters=numel,
                state_bytes=round(trained * bytes_per_parameter) + frozen_bytes,
                in_flight=in_flight,
                activation_bytes=activation_bytes,
                # One call runs at a time: the largest, not the sum.
                working_bytes=max(call.working_bytes for part in own_chunks for call in part),
                microbatch_us=sum(call.step_us for part in own_chunks for call in part),
            )
        )
    # arXiv 2104.04473, section 2.2.2: interleaving divides the bubble by the number of chunks.
    bubble = (stages - 1) / (chunks * microbatches)
    return PipelinePlan(tuple(plans), microbatches, chunks, bubble)


def _check(
    calls: Sequence[CallPlan],
    stages: int,
    microbatches: int,
    chunks: int,
    bytes_per_parameter: float,
) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        # True is an int in Python, and would be one stage.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name}={value!r}: expected a positive integer")
    # Written so that NaN is refused, too.
    if not bytes_per_parameter > 0:
        raise ArgumentError(f"bytes_per_parameter={bytes_per_parameter!r}: expected more than 0")
    layers = sum(call.path != "" for call in calls)
    if stages * chunks > max(1, layers):
        raise ArgumentError(
            f"stages={stages} with chunks={chunks} need {stages * chunks} layers, and the model "
            f"has {layers}: use fewer"
        )
    if chunks > 1 and microbatches % stages:
        raise ArgumentError(
            f"microbatches={microbatches}: the interleaved schedule (chunks={chunks}) takes a "
            f"multiple of stages={stages}"
        )


def _split(calls: Sequence[CallPlan], count: int) -> list[list[CallPlan]]:
    """Runs of layers whose lengths differ by one at most, the first of them a short one; what is
    outside of layers goes with the layer before it, at the start with the first."""
    layers = sum(call.path != "" for call in calls)
    parts: list[list[CallPlan]] = [[] for _ in range(count)]
    seen = 0
    for call in calls:
        seen += call.path != ""
        # Layer n of L goes to part (n p - 1) // L, n counted from 1; what has no path does not
        # count, so that an embedding does not displace a layer.
        parts[(max(1, seen) * count - 1) // max(1, layers)].append(call)
    return parts


def _most_in_flight(
    chunks: Sequence[Sequence[CallPlan]], stage: int, stages: int, microbatches: int
) -> tuple[int, int]:
    """Most forwards in flight, and the most bytes that such forwards keep."""
    # A dict by storage: what several calls of a chunk keep alike exists once.
    kept = [sum(dict(pair for call in chunk for pair in call.kept).values()) for chunk in chunks]
    total = microbatches * len(chunks)
    ahead = stages - 1 - stage
    # As torch's schedules do: interleaved ones start twice as far ahead, and one round per chunk.
    warmup = ahead if len(chunks) == 1 else 2 * ahead + (len(chunks) - 1) * stages
    started = _order(len(chunks), stages, microbatches)
    finished = _order(len(chunks), stages, microbatches)
    count = num_bytes = most = most_bytes = 0
    for number in range(total):
        count, num_bytes = count + 1, num_bytes + kept[next(started)]
        most, most_bytes = max(most, count), max(most_bytes, num_bytes)
        # After the warmup each forward is followed by a backward (1F1B), so that no more is in
        # flight.
        if number >= min(warmup, total):
            # Backwards take the chunks in the opposite order.
            count, num_bytes = count - 1, num_bytes - kept[-1 - next(finished)]
    return most, most_bytes


def _order(chunks: int, stages: int, microbatches: int) -> Iterator[int]:
    """The chunk of each forward of a stage: a group of microbatches passes one after the other."""
    for first in range(0, microbatches, stages):
        for chunk in range(chunks):
            for _ in range(first, min(first + stages, microbatches)):
                yield chunk
