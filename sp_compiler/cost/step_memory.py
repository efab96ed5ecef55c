"""Memory of one training step: live bytes during each call, and saved storages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from sp_compiler.base.storage import Storage
from sp_compiler.cost.memory import backward_peak_bytes, function_peak_bytes
from sp_compiler.cost.step_walk import Holders, Phase, StepWalk
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import Partitioned, step_backwards
from sp_compiler.ir.program import Program


@dataclass(frozen=True)
class Kept:
    """A storage saved for backward; ``position`` is its position in the call's
    ``Partitioned.saved``."""

    call: int
    position: int
    storage: Storage


@dataclass(frozen=True)
class Moment:
    """Bytes of all calls at the peak of one call's forward or backward.

    Attributes:
        around_bytes: bytes of these that exist before the function runs.
    """

    phase: Phase
    call: int
    num_bytes: int
    around_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Memory of one training step on one rank.

    Attributes:
        kept: every (call, saved tensor) whose storage a call allocates, in order of the calls.
        sent: the same for those that are sent to the host.
        returned: storages of the model's outputs.
        timeline: bytes during each call, in the order of the step.
    """

    kept: tuple[Kept, ...]
    sent: tuple[Kept, ...]
    returned: frozenset[Storage]
    timeline: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes."""
        return max((moment.num_bytes for moment in self.timeline), default=0)

    @property
    def kept_bytes(self) -> int:
        """Bytes live between forward and backward: each storage once, without returned ones."""
        storages = {item.storage for item in self.kept} - self.returned
        return sum(storage.num_bytes for storage in storages)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory between forward and backward."""
        return sum(item.storage.num_bytes for item in self.sent)


def step_memory(compiled: CompiledProgram, *, accumulates: bool = False) -> StepMemory:
    """Follow every storage through the forward and the backward of ``compiled``.

    Args:
        accumulates: whether gradients of parameters exist before the step: then those that a call
            computes are temporary, until they are added to these.
    """
    partitioned = {name: region.partitioned for name, region in compiled.regions.items()}
    return memory_of_split(
        compiled.program,
        partitioned,
        compiled.differentiable,
        compiled.world_size,
        accumulates=accumulates,
    )


def memory_of_split(
    program: Program,
    partitioned: Mapping[str, Partitioned],
    differentiable: Mapping[str, Sequence[bool]],
    world_size: int,
    *,
    accumulates: bool = False,
) -> StepMemory:
    """Return :func:`step_memory` of a program without generated code.

    The other arguments are those of :class:`~sp_compiler.cost.step_walk.StepWalk`.
    """
    walk = StepWalk(program, partitioned, differentiable, world_size, accumulates=accumulates)
    in_place = program.gradients_in_place(world_size)
    if accumulates:
        in_place = [frozenset()] * len(in_place)

    backwards = step_backwards(program, partitioned)

    @cache
    def peak_bytes(name: str, function: str, counted_as_gradients: frozenset[int]) -> int:
        """Return the peak of one function; calls of a region share the result, so depth costs
        nothing."""
        graph = partitioned[name].functions[function]
        if function in ("forward", "recompute"):
            return function_peak_bytes(graph)
        return backward_peak_bytes(graph, counted_as_gradients)

    holders = Holders()
    timeline: list[Moment] = []
    for event in walk.events():
        if event.kind == "run":
            name, around_bytes = program.calls[event.call].region.name, holders.live_bytes
            functions = ("forward",) if event.phase == "forward" else backwards[event.call]
            own = in_place[event.call]
            num_bytes = around_bytes + max(peak_bytes(name, each, own) for each in functions)
            timeline.append(Moment(event.phase, event.call, num_bytes, around_bytes))
            continue
        holders.apply(event)
        # More may be live after a function than while it ran.
        if event.kind == "hold" and timeline:
            last = timeline[-1]
            timeline[-1] = replace(last, num_bytes=max(last.num_bytes, holders.live_bytes))
    kept, sent = (
        tuple(
            Kept(index, position, storage)
            for index, storages in enumerate(calls)
            for position, storage in enumerate(storages)
            if storage is not None
        )
        for calls in ([c.saved for c in walk.storages], [c.sent for c in walk.storages])
    )
    return StepMemory(kept, sent, walk.returned, tuple(timeline))


@dataclass(frozen=True)
class Room:
    """Limits for the peaks of a region's functions, without their arguments.

    Attributes:
        forward_bytes: of forward, so that the step stays below its limit.
        backward_bytes: the same for backward.
        most_bytes: for backward, if more memory than that hides more communication.
        behind_bytes: the same if it also computes weight gradients that the call before it in
            backward has deferred to it.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    most_bytes: int = 0
    behind_bytes: int = 0


def functions_room(
    program: Program,
    partitioned: Mapping[str, Partitioned],
    differentiable: Mapping[str, Sequence[bool]],
    world_size: int,
    budget_bytes: int | None,
    device_bytes: int | None,
) -> dict[str, Room]:
    """Return the peaks that the functions of each region may have so that the step fits.

    The step must fit ``budget_bytes``, or its own peak if there is no budget: the peak is often at
    the loss, so that the functions of blocks may take more. A region's function serves all its
    calls, so the call with most bytes around it counts. Without a budget, the backward of a layer
    may exceed this limit by as much as it takes itself, because what runs early belongs to at most
    one more layer, and by twice as much if another layer defers gradients to it. With many layers
    this is little compared with what they all save.

    Args:
        budget_bytes: limit for the activations of a step.
        device_bytes: the same, for programs that may exceed ``budget_bytes``.
        program: as for :func:`memory_of_split`, like the arguments between.
    """
    memory = memory_of_split(program, partitioned, differentiable, world_size)
    # Not the larger of both: a budget may rely on an order whose peak is below that of this one.
    limit_bytes = memory.peak_bytes if budget_bytes is None else budget_bytes
    beyond_bytes = limit_bytes if device_bytes is None else max(0, device_bytes - limit_bytes)
    layers = Counter(call.region.name for call in program.calls)
    left_bytes: dict[tuple[str, Phase], int] = {}
    own_bytes: Counter[str] = Counter()
    for moment in memory.timeline:
        name = program.calls[moment.call].region.name
        left = limit_bytes - moment.around_bytes
        left_bytes[name, moment.phase] = min(left, left_bytes.get((name, moment.phase), left))
        if moment.phase == "backward" and layers[name] > 1 and budget_bytes is None:
            own_bytes[name] = max(own_bytes[name], moment.num_bytes - moment.around_bytes)
    return {
        name: Room(
            left_bytes[name, "forward"],
            backward_bytes := left_bytes.get((name, "backward"), 0),
            backward_bytes + min(own_bytes[name], beyond_bytes),
            backward_bytes + min(2 * own_bytes[name], beyond_bytes),
        )
        for name in layers
    }
