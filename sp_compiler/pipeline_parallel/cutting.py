"""Choice of the cut: the slowest stage as fast as possible, within each stage's memory."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.provenance import ModuleCall, is_layer
from sp_compiler.base.units import bytes_text
from sp_compiler.cost.model_state import ADAMW_MOMENTS
from sp_compiler.passes.outline.unlisted import count_possible_layers
from sp_compiler.pipeline_parallel.microbatch_recompute import Places
from sp_compiler.pipeline_parallel.stage_memory import StageMemory
from sp_compiler.planning.data import CallPlan, ParameterSize
from sp_compiler.solve.pipeline_cut import fastest_cut, least_largest
from sp_compiler.trace.attributes.changes import watched_state
from sp_compiler.trace.environment import export_context


def adamw_bytes(size: ParameterSize) -> float:
    """Return the bytes of a parameter, its gradient and AdamW's moments, all in the parameter's
    dtype."""
    return (2 + ADAMW_MOMENTS) * size.num_bytes if size.trained else size.num_bytes


def gathered_adamw_bytes(size: ParameterSize, num_shards: int) -> float:
    """Return the bytes during a step of a parameter that FSDP2 shards between steps.

    The parameter and its gradient are unsharded, in addition to this rank's shard of parameter,
    gradient and optimizer state.
    """
    return size.num_bytes * (1 + size.trained) + adamw_bytes(size) / num_shards


def check_layers(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], num_stages: int
) -> None:
    """Raise an error for fewer layers than stages, before the capture, which takes far longer.

    A model may use a layer many times. If it has too few layers, their uses are counted in a
    forward on fake tensors; if that fails (the forward reads a value), :func:`ends_of` raises the
    error.

    Raises:
        ArgumentError: fewer layers than stages.
    """
    paths = {module: path for path, module in model.named_modules()}
    if num_stages == 1 or sum(map(is_layer, paths.values())) >= num_stages:
        return
    mode = FakeTensorMode()

    @cache  # keeps tied tensors tied
    def fake(value: Tensor) -> Tensor:
        return mode.from_tensor(value.detach().to("meta"))

    tensors = {name: fake(value) for name, value in _named_once(model)}
    inputs = pytree.tree_map_only(Tensor, fake, (tuple(args), {**kwargs}))
    running: list[ModuleCall] = []
    stacks: list[Sequence[ModuleCall]] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(ModuleCall(str(len(stacks)), paths[module], type(module).__name__))
        stacks.append(tuple(running))

    def leave(*_: Any) -> None:
        running.pop()

    try:
        # As in a capture: the model's attributes are restored, its own hooks removed for now.
        with ExitStack() as stack:
            for context in (mode, export_context(model), watched_state(model), torch.no_grad()):
                stack.enter_context(context)
            for module in paths:
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            # With tie_weights, it would replace those of a module with two names twice, and at
            # the end restore its own first replacements.
            functional_call(model, tensors, *inputs, tie_weights=False)
    except Exception:  # from the model's own code
        return
    _check_layers(count_possible_layers(stacks), num_stages)


def _named_once(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, tied ones too, each module under one of its names."""
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None:
                    yield f"{path}.{name}" if path else name, value


def _check_layers(layers: int, num_stages: int) -> None:
    if layers >= num_stages:
        return
    if layers:
        advice = "use fewer ranks on the axis 'pp', or fewer stages_per_rank"
    else:
        advice = (
            "stages begin at layers, those of an nn.ModuleList or an nn.Sequential, or modules of "
            "one class side by side; give such a module no other name that comes first"
        )
    raise ArgumentError(
        f"the model has {layers} layers, too few for {num_stages} pipeline stages: {advice}"
    )


class NoCutError(ArgumentError):
    """No cut gives each stage a parameter to train and enough memory.

    Args:
        num_stages: number of stages.
        memory_bytes: limit for a stage, if there is one.
        least: returns the bytes of the fullest stage in the cut that minimizes them. Called only
            for the message: it takes longer than the cut, and a search does not read messages.
    """

    def __init__(
        self, num_stages: int, memory_bytes: int | None, least: Callable[[], float]
    ) -> None:
        super().__init__()
        self._num_stages, self._memory_bytes, self._least = num_stages, memory_bytes, least

    def __str__(self) -> str:
        cut = f"no cut into {self._num_stages} stages"
        least = self._least()
        if self._memory_bytes is None or least == math.inf:
            return f"{cut} gives each of them a parameter to train: use fewer stages"
        return (
            f"{cut} leaves each within {bytes_text(self._memory_bytes)}; the minimum that fits "
            f'is {bytes_text(math.ceil(least))} per stage: use more ranks, recompute="full", or '
            "smaller microbatches"
        )


@dataclass(frozen=True)
class Rest:
    """How stages run the microbatches that do not fit.

    Attributes:
        calls: the calls with ``recompute_rest``.
        places: the places of every stage.
    """

    calls: Sequence[CallPlan]
    places: Sequence[Places]


def ends_of(
    calls: Sequence[CallPlan],
    sizes: Mapping[str, ParameterSize],
    in_flight: Sequence[int],
    memory_bytes: int | None,
    state_bytes: Callable[[ParameterSize], float] = adamw_bytes,
    rest: Rest | None = None,
) -> list[int]:
    """Return where each stage ends in ``calls``.

    Args:
        calls: calls to divide into stages, including embeddings and loss head.
        sizes: sizes of the parameters on one rank.
        in_flight: for each stage, the largest number of microbatches whose activations it holds.
        memory_bytes: limit for a stage; ``None`` for no limit.
        state_bytes: returns the bytes of a parameter with its gradient and optimizer state.
        rest: given if stages run only as many microbatches as fit with ``calls``. The time of a
            stage is then the mean over all microbatches.

    Raises:
        ArgumentError: fewer layers than stages, or no cut within the limit.
    """
    num_stages = len(in_flight)
    # Layers, not calls: a stage with nothing but an embedding would wait for all the others.
    _check_layers(sum(call.path != "" for call in calls), num_stages)
    parts = _Parts(calls, sizes, state_bytes)
    room = math.inf if memory_bytes is None else memory_bytes
    if rest is None:
        stages: _Alike | _Mixed = _Alike(parts, in_flight, room)
    else:
        stages = _Mixed(parts, _Parts(rest.calls, sizes, state_bytes), rest.places, room)
    # The fastest cut among those that fit: all other stages wait for a slow one, and a stage that
    # exceeds its memory does not run.
    ends = fastest_cut(stages.times_us, num_stages, stages.added_us)
    if ends is None:
        largest = partial(least_largest, len(calls), num_stages, stages.num_bytes)
        raise NoCutError(num_stages, memory_bytes, largest)
    return ends


class _Parts:
    """Bytes of every part of a chain of calls, whichever stage runs it.

    Args:
        calls, sizes, state_bytes: as for :func:`ends_of`.
    """

    def __init__(
        self,
        calls: Sequence[CallPlan],
        sizes: Mapping[str, ParameterSize],
        state_bytes: Callable[[ParameterSize], float],
    ) -> None:
        self.calls = calls
        self._bytes_of = {name: state_bytes(size) for name, size in sizes.items()}
        # A search asks for each part once per stage.
        self.held_bytes = cache(self._held_bytes)
        self.memory = cache(self._memory)

    def _held_bytes(self, start: int, stop: int) -> float:
        # A dict, not a set: its order, and so the rounding of the sum, is the same on all ranks.
        used = dict.fromkeys(name for call in self.calls[start:stop] for name in call.parameters)
        # An optimizer does not accept an empty list of parameters.
        return sum(map(self._bytes_of.__getitem__, used)) if used else math.inf

    def _memory(self, start: int, stop: int) -> StageMemory:
        return StageMemory.of(self.calls[start:stop])


class _Alike:
    """Costs of stages that run all microbatches in the same way.

    Args:
        room_bytes: limit for a stage.
    """

    def __init__(self, parts: _Parts, in_flight: Sequence[int], room_bytes: float) -> None:
        self._parts, self._in_flight, self._room_bytes = parts, in_flight, room_bytes
        self.times_us = [call.step_us for call in parts.calls]

    def num_bytes(self, stage: int, start: int, stop: int) -> float:
        held = self._parts.held_bytes(start, stop)
        if held == math.inf:
            return held
        return held + self._parts.memory(start, stop).peak_of(self._in_flight[stage])

    def added_us(self, stage: int, start: int, stop: int) -> float:
        # Most parts that do not fit exceed the limit by their parameters alone.
        held = self._parts.held_bytes(start, stop)
        needed = held if held > self._room_bytes else self.num_bytes(stage, start, stop)
        return 0.0 if needed <= self._room_bytes and needed < math.inf else math.inf


class _Mixed:
    """Costs of stages that recompute more of the microbatches for which they have no room.

    Args:
        most: calls of a microbatch that keeps most.
        rest: calls of the other microbatches.
        places: the places of every stage.
        room_bytes: limit for a stage.
    """

    def __init__(
        self, most: _Parts, rest: _Parts, places: Sequence[Places], room_bytes: float
    ) -> None:
        self._most, self._rest, self._places, self._room_bytes = most, rest, places, room_bytes
        of_both = [
            [call.step_us for call in most.calls],
            [call.step_us for call in rest.calls],
        ]
        self.times_us = [min(pair) for pair in zip(*of_both, strict=True)]
        self._longer_us = [
            [0.0, *itertools.accumulate(map(operator.sub, own, self.times_us))] for own in of_both
        ]
        # The search asks twice: for the slowest stage, and for the balance of the others.
        self.added_us = cache(self._added_us)

    def num_bytes(self, stage: int, start: int, stop: int) -> float:
        held = self._most.held_bytes(start, stop)
        if held == math.inf:
            return held
        memories = self._most.memory(start, stop), self._rest.memory(start, stop)
        return held + min(self._places[stage].peaks_bytes(*memories))

    def _added_us(self, stage: int, start: int, stop: int) -> float:
        held = self._most.held_bytes(start, stop)
        if held > self._room_bytes or held == math.inf:
            return math.inf
        memories = self._most.memory(start, stop), self._rest.memory(start, stop)
        places = self._places[stage]
        chosen = places.most_that_fit(*memories, self._room_bytes - held)
        if chosen is None:
            return math.inf
        share = len(chosen) / places.num_microbatches
        most_us, rest_us = (until[stop] - until[start] for until in self._longer_us)
        # Differences of prefix sums of non-negative values may round below 0.
        return max(0.0, share * most_us + (1 - share) * rest_us)
