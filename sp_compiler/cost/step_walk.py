"""Walk through one training step: allocations and frees of storages, in order.

Parameters, their gradients, buffers, constants and the user's inputs are not activations and do not
count. The model's outputs do, and so do temporary gradients: a part of the gradient of a parameter
that several calls use, until it is added to the others, and gradients of replicated parameters,
until they are reduced together. So do copies of parameters with their padding, while a call runs,
and of buffers that forward writes, which live on if backward reads them. What a call sends to the
host leaves the device when the next call has run, and is fetched when the backward of the next call
begins: it is copied during that time (:mod:`sp_compiler.ops.gpu.host_memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.storage import Storage, is_dense
from sp_compiler.cost.memory import owned_bytes
from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.ir.forward_backward import Partitioned, step_backwards
from sp_compiler.ir.op_traits import base, is_handed
from sp_compiler.ir.program import Call, Program, Ref

SEED_BYTES = 8
"""Bytes of the seed of one call, an int64."""

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Event:
    """One event of a step.

    Attributes:
        kind: a function runs, or storages get or lose a holder.
        phase: phase of the function that runs, or that ran last.
        call: call of that function.
        storages: storages that are held or released, with repetitions.
        saved: whether ``call`` saves them for its backward.
    """

    kind: Literal["run", "hold", "release"]
    phase: Phase
    call: int
    storages: tuple[Storage, ...] = ()
    saved: bool = False


class Holders:
    """Number of holders of each storage; a storage is live as long as it has one."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self._count: Counter[Storage] = Counter()

    def apply(self, event: Event) -> None:
        """Hold or release the storages of ``event``."""
        for storage in event.storages:
            # Counted when the first holder is added and when the last one is removed: an output
            # that is also saved, or saved by several calls, is one storage.
            if event.kind == "hold":
                self.live_bytes += 0 if self._count[storage] else storage.num_bytes
                self._count[storage] += 1
            else:
                self._count[storage] -= 1
                self.live_bytes -= 0 if self._count[storage] else storage.num_bytes

    def live(self) -> frozenset[Storage]:
        """Return the storages that have a holder."""
        return frozenset(storage for storage, count in self._count.items() if count)


@dataclass
class CallStorages:
    """Storages of one call, ``None`` for values that are not activations.

    Attributes:
        saved: on the device, ``None`` also for what is sent to the host.
        sent: storages that go to the host, on the device until sent; otherwise ``None``.
        fetched: their copies in backward.
    """

    outputs: list[Storage | None] = field(default_factory=list)
    saved: list[Storage | None] = field(default_factory=list)
    sent: list[Storage | None] = field(default_factory=list)
    fetched: list[Storage | None] = field(default_factory=list)


class StepWalk:
    """The events of one step of a program.

    Backward starts from the model's loss, or from all outputs if it returns none.

    Args:
        program: sharded.
        partitioned: forward and backward of each region, by name.
        differentiable: by region name, for each output whether a gradient flows through it.
        world_size: number of tensor-parallel ranks.
        accumulates: whether parameters have gradients before the step.
    """

    def __init__(
        self,
        program: Program,
        partitioned: Mapping[str, Partitioned],
        differentiable: Mapping[str, Sequence[bool]],
        world_size: int,
        *,
        accumulates: bool = False,
    ) -> None:
        self.program = program
        self.written_buffers = {
            name: Storage(("forward", -1, name), tensor_bytes(value))
            for name, value in program.copied_buffers().items()
        }
        self.storages: list[CallStorages] = []
        self.returned: frozenset[Storage] = frozenset()
        self._partitioned = partitioned
        self._differentiable = differentiable
        self._world_size = world_size
        self._now: tuple[Phase, int] = ("forward", 0)
        self._grads: dict[tuple[int, int], Storage] = {}
        self._layouts: dict[tuple[int, int], Tensor] = {}  # of those that are not contiguous
        # By call, not by use: a call that takes a parameter twice returns one gradient of it.
        self._parts_to_come = Counter(
            name
            for call in program.calls
            for name in {call.args[k].name for k in partitioned[call.region.name].trained}
        )
        self._adds_in_place = world_size > 1 and not accumulates  # to ``grad`` of a DTensor
        self._partial: dict[str, Storage] = {}
        self._replicated: dict[str, Tensor] = {}
        self._fetched: set[int] = set()  # calls
        self._functions = step_backwards(program, partitioned)
        # For the next call that runs backward: what is recomputed for it or deferred to it, which
        # it owns, and storages of other calls that it reads for what is deferred.
        self._handed: list[Storage | None] = []
        self._lent: list[Storage | None] = []

    def events(self) -> Iterator[Event]:
        """Walk once; fills ``storages`` and ``returned``."""
        calls = self.program.calls
        dead = self.program.last_uses()
        yield self._hold(self.written_buffers.values())
        for index, call in enumerate(calls):
            parts = self._partitioned[call.region.name]
            copies = _padded_copies(index, call, parts, self._world_size)
            yield self._hold(copies)
            yield self._run("forward", index)
            made = self.storages_of(index, parts)
            self.storages.append(made)
            # Two holders: an output that is also saved lives until neither needs it.
            yield self._hold(made.outputs)
            yield self._hold(made.saved, saved=True)
            yield self._hold(made.sent)
            yield self._release(copies)
            if index:
                yield self._release(self.storages[index - 1].sent)
            # After the call: what it read for the last time lived while it ran.
            for done in dead[index]:
                yield self._release(self.storages[done].outputs)
        leaves = [leaf for leaf in self.program.outputs if isinstance(leaf, Ref)]
        yield self._release(self.written_buffers.values())
        # New values of buffers, and other results of the calls that made the model's outputs.
        for index in set(range(len(calls))).difference(*dead):
            left = {ref.output for ref in leaves if ref.kind == "call" and ref.index == index}
            outputs = enumerate(self.storages[index].outputs)
            yield self._release(made for k, made in outputs if k not in left)
        self.returned = frozenset(filter(None, map(self._storage, leaves)))
        flowing = [ref for ref in leaves if ref.kind == "call" and self._flows(ref)]
        loss = self.program.loss
        # A model that returns its loss is trained by the loss alone; without one, all outputs may
        # enter the user's own loss.
        for ref in [loss] if loss is not None and loss in flowing else flowing:
            start = Storage(("backward", -1, str(ref)), tensor_bytes(self._value(ref)))
            yield self._hold([start])  # the caller of backward holds it
            yield from self._accumulate(ref, start)
        for index in reversed(range(len(calls))):
            yield from self._backward(index, calls[index])
        yield from self._reduce()

    def storages_of(self, index: int, parts: Partitioned) -> CallStorages:
        """Return the storages that call ``index`` makes and saves if it is split like ``parts``."""
        call = self.program.calls[index]
        placeholders = parts.forward.find_nodes(op="placeholder")
        arguments = dict(zip(placeholders, map(self._storage, call.args), strict=True))
        for node, ref in zip(placeholders, call.args, strict=True):
            if ref.kind == "seed":  # the runtime makes one per call, distinct
                arguments[node] = Storage(("forward", index, node.name), SEED_BYTES)
        results = parts.forward.output_node().args[0]
        storages = [_resolve(node, arguments, ("forward", index)) for node in results]
        saved = storages[parts.num_outputs :]
        sent = [
            storage if tensor.on_host else None
            for storage, tensor in zip(saved, parts.saved, strict=True)
        ]
        return CallStorages(
            outputs=storages[: parts.num_outputs],
            saved=[None if away else storage for storage, away in zip(saved, sent, strict=True)],
            sent=sent,
            fetched=[
                away and replace(away, owner=("fetched", index, str(away.owner))) for away in sent
            ],
        )

    def _storage(self, ref: Ref) -> Storage | None:
        if ref.kind == "buffer":
            return self.written_buffers.get(ref.name)
        return self.storages[ref.index].outputs[ref.output] if ref.kind == "call" else None

    def _flows(self, ref: Ref) -> bool:
        return self._differentiable[self.program.calls[ref.index].region.name][ref.output]

    def _value(self, ref: Ref) -> Tensor:
        value: Tensor = self.program.node_of(ref).meta["val"]
        return value

    # Backward.

    def _backward(self, index: int, call: Call) -> Iterator[Event]:
        parts, made = self._partitioned[call.region.name], self.storages[index]
        graph = parts.step_backward
        refs = [Ref("call", index=index, output=k) for k in range(parts.num_outputs)]
        refs = [ref for ref in refs if self._flows(ref)]
        if parts.loss is not None:  # a step starts from the loss: no other gradient comes here
            refs = [ref for ref in refs if ref.output == parts.loss.output]
        # Popped: the call that made the value uses up its gradient.
        tangents = [self._grads.pop((ref.index, ref.output), None) for ref in refs]
        straightened = self._contiguous_copies(refs)
        if graph is None or not any(tangents):
            return  # no gradient arrives: what the call saved stays
        for position, ref in enumerate(refs):
            if tangents[position] is None:  # the runtime makes zeros
                zeros = Storage(("backward", index, str(ref)), tensor_bytes(self._value(ref)))
                tangents[position] = zeros
                yield self._hold([zeros])
        yield from self._fetch(index)
        # From here on the function owns them.
        yield self._release(self._handed)
        lent, self._handed, self._lent = self._lent, [], []
        copies = _padded_copies(index, call, parts, self._world_size, in_backward=True)
        if "backward_ahead" in self._functions[index]:  # reads parameters of the call before, too
            copies += _padded_copies(index - 1, call, parts, self._world_size, in_backward=True)
        yield self._hold(copies := [*copies, *straightened])
        yield self._run("backward", index)
        held = [here or back for here, back in zip(made.saved, made.fetched, strict=True)]
        self._hand_over(index, parts, [*held, *tangents])
        yield self._hold([*self._handed, *self._lent])
        known = dict(zip(graph.find_nodes(op="placeholder"), [*held, *tangents], strict=True))
        grads = graph.output_node().args[0]
        placements = call.region.input_placements
        for grad, ref, placement in zip(grads, call.args, placements, strict=True):
            storage = None if grad is None else _resolve(grad, known, ("backward", index))
            if storage is not None and ref.kind in ("call", "input"):
                yield from self._accumulate(ref, storage, grad.meta["val"])
            elif storage is not None and ref.kind == "param":
                if placement.kind == "R" and self._world_size > 1:
                    self._replicated[ref.name] = grad.meta["val"]
                yield from self._collect(ref.name, storage)
        # Only now: during the backward all that it was given is live.
        yield self._release(tangents)
        yield self._release(made.saved, saved=True)
        yield self._release(made.fetched)
        yield self._release([*lent, *copies])

    def _hand_over(self, index: int, parts: Partitioned, given: Sequence[Storage | None]) -> None:
        """Set what call ``index``, whose backward is ``given`` these storages, recomputes for or
        defers to the next one that runs backward."""
        functions = self._functions[index]
        where: tuple[Phase, int] = ("backward", index)
        if "backward_ahead" in functions:
            assert parts.ahead is not None
            values = parts.ahead.recompute.output_node().args[0]
            self._handed = [_resolve(node, {}, where) for node in values]
        split = parts.split
        # If backward_weights runs last, the call's own backward uses them up.
        if split is None or split.both is None or functions[-1] == "backward_weights":
            return
        known = dict(zip(split.inputs.find_nodes(op="placeholder"), given, strict=True))
        takers = split.weights.find_nodes(op="placeholder")
        left = split.inputs.output_node().args[0][-len(takers) :]
        for node, taker in zip(left, takers, strict=True):
            whose = self._handed if is_handed(taker) else self._lent
            whose.append(_resolve(node, known, where))

    def _fetch(self, index: int) -> Iterator[Event]:
        """Hold what call ``index`` sent to the host, and what the call before it sent, which is
        fetched while this one runs."""
        for each in (index, index - 1):
            if each >= 0 and each not in self._fetched:
                self._fetched.add(each)
                yield self._hold(self.storages[each].fetched)

    def _accumulate(
        self, ref: Ref, storage: Storage, value: Tensor | None = None
    ) -> Iterator[Event]:
        """Add a second gradient of one value, which is like ``value``, to the first."""
        key = (ref.index, ref.output if ref.kind == "call" else -1)
        yield self._hold([storage])
        before = self._grads.get(key)
        if before is None:
            if value is not None and not value.is_contiguous():
                self._layouts[key] = value
        else:
            total = Storage(("backward", storage.owner[1], f"sum {ref}"), storage.num_bytes)
            yield self._hold([total])
            yield self._release([before, storage])
            storage = total
            # Autograd adds into the first if that has no gaps; otherwise it makes a new sum.
            if key in self._layouts and not is_dense(self._layouts[key]):
                del self._layouts[key]
        self._grads[key] = storage

    def _contiguous_copies(self, refs: Iterable[Ref]) -> list[Storage]:
        """Return the copies of gradients that generated code makes if these are not contiguous."""
        keys = {ref: (ref.index, ref.output) for ref in refs}
        return [
            Storage(("backward", ref.index, f"contiguous {ref}"), tensor_bytes(self._value(ref)))
            for ref, key in keys.items()
            if self._layouts.pop(key, None) is not None
        ]

    def _collect(self, name: str, part: Storage) -> Iterator[Event]:
        """Add a part of a parameter's gradient; a replicated sum then waits to be reduced."""
        self._parts_to_come[name] -= 1
        if self._adds_in_place and name not in self._replicated:
            return  # what is in ``grad`` is not an activation
        before, is_last = self._partial.pop(name, None), not self._parts_to_come[name]
        if is_last and name in self._replicated:
            yield self._hold([part])
        if before is None and is_last:
            return  # the only part is the gradient itself
        total = Storage(("backward", part.owner[1], f"sum {name}"), part.num_bytes)
        yield self._hold([part])
        if not is_last:
            self._partial[name] = part if before is None else total
            yield self._hold([self._partial[name]])
        yield self._release([before, part])

    def _reduce(self) -> Iterator[Event]:
        """Concatenate gradients of replicated parameters and reduce them, one dtype at a time."""
        sizes_bytes: Counter[torch.dtype] = Counter()
        for grad in self._replicated.values():
            sizes_bytes[grad.dtype] += tensor_bytes(grad)
        # Twice: what is sent and what arrives. One bucket is freed before the next is made.
        num_bytes = 2 * max(sizes_bytes.values(), default=0)
        yield self._hold([Storage(("backward", -1, "bucket"), num_bytes)] if num_bytes else [])

    # Events.

    def _run(self, phase: Phase, index: int) -> Event:
        self._now = (phase, index)
        return Event("run", phase, index)

    def _hold(self, storages: Iterable[Storage | None], *, saved: bool = False) -> Event:
        return Event("hold", *self._now, tuple(filter(None, storages)), saved)

    def _release(self, storages: Iterable[Storage | None], *, saved: bool = False) -> Event:
        return Event("release", *self._now, tuple(filter(None, storages)), saved)


def _padded_copies(
    index: int, call: Call, parts: Partitioned, world_size: int, *, in_backward: bool = False
) -> list[Storage]:
    """Return the copies of parameters, with their padding, that call ``index`` runs with."""
    placeholders = parts.forward.find_nodes(op="placeholder")
    saved = set(parts.forward.output_node().args[0][parts.num_outputs :])
    return [
        Storage(("padded", index, node.name), tensor_bytes(node.meta["val"]))
        for node, ref, placement in zip(
            placeholders, call.args, call.region.input_placements, strict=True
        )
        if ref.kind == "param"
        and placement.is_copied_for_padding(world_size)
        and (node in saved or not in_backward)
    ]


def _resolve(
    node: Node, known: Mapping[Node, Storage | None], where: tuple[Phase, int]
) -> Storage | None:
    """Return the storage of ``node``: an input's, or one that the function allocated."""
    owner = base(node)
    if owner.op == "placeholder":
        return known[owner]
    return Storage((*where, owner.name), owned_bytes(owner))
