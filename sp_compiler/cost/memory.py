"""Which storages exist when: inside one generated function, and over a whole training step.

Storages are those that the generated code makes and its ``del`` statements free, what dropout needs
to draw its masks and what collectives copy; what other operators need inside is not seen.
Parameters, their gradients, buffers, constants and the user's inputs are not activations and do not
count. What the model returns does, and so does what becomes a gradient: a part of the gradient of a
parameter that several calls use, until it is added to the others, and gradients of replicated
parameters, until they are reduced together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.base.storage import Storage
from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import placements_of
from sp_compiler.ir.op_traits import base, collective_of, is_part, is_wait
from sp_compiler.ir.program import Call, Ref
from sp_compiler.ops.dropout_counter import scratch_bytes

_sp = torch.ops.sp_compiler
SEED_BYTES = 8
Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Kept:
    """What a call keeps until its backward; ``position`` is that in its ``Partitioned.saved``."""

    call: int
    position: int
    storage: Storage


@dataclass(frozen=True)
class Moment:
    """The most that exists while one call runs its forward or its backward, of all calls."""

    phase: Phase
    call: int
    num_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Memory of one training step on one rank.

    Attributes:
        timeline: what exists while each call runs, in the order of the step.
        kept: every (call, saved tensor) whose storage some call made, in order of the calls.
        returned: storages of the model's outputs.
    """

    kept: tuple[Kept, ...]
    returned: frozenset[Storage]
    timeline: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that exists at once."""
        return max((moment.num_bytes for moment in self.timeline), default=0)

    @property
    def kept_bytes(self) -> int:
        """Bytes alive between forward and backward: each storage once, without what is returned."""
        storages = {item.storage for item in self.kept} - self.returned
        return sum(storage.num_bytes for storage in storages)


def function_peak_bytes(graph: Graph) -> int:
    """The most that one generated function holds beside its arguments."""
    return _function_peak(graph, _calls(graph))[0]


def backward_peak_bytes(graph: Graph, own_parameters: Collection[int]) -> int:
    """The same of a backward, without the gradients of ``own_parameters``.

    Args:
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
    """
    return _function_peak(graph, _calls(graph), _own_grads(graph, own_parameters))[0]


def peak_in_order(
    graph: Graph,
    own_parameters: Collection[int],
    order: Sequence[Node],
    waits: Mapping[Node, Sequence[Node]],
) -> tuple[int, Node | None]:
    """As :func:`backward_peak_bytes` if the calls of ``graph`` ran in another ``order``.

    Args:
        waits: by call the collectives that are waited for just before it.

    Returns:
        The bytes, and the call that runs when they are reached first.
    """
    return _function_peak(graph, order, _own_grads(graph, own_parameters), waits)


def _calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _own_grads(graph: Graph, own_parameters: Collection[int]) -> list[Node]:
    grads = graph.output_node().args[0]
    return [grad for index in own_parameters if (grad := grads[index]) is not None]


def _function_peak(
    graph: Graph,
    order: Sequence[Node],
    ignored: Iterable[Node] = (),
    waits: Mapping[Node, Sequence[Node]] | None = None,
) -> tuple[int, Node | None]:
    """Storages in ``ignored`` do not count."""
    skipped = {base(node) for node in ignored}
    kept = {base(node) for node in graph.output_node().all_input_nodes}
    last: dict[Node, int] = {}
    for position, node in enumerate(order):
        # Until it is waited for, a collective holds what it sends.
        arrived = [node.all_input_nodes[0]] if is_wait(node) else (waits or {}).get(node, ())
        for started in arrived:
            last[base(started.all_input_nodes[0])] = position if is_wait(node) else position - 1
        last.update((base(used), position) for used in (node, *node.all_input_nodes))
    dying: dict[int, list[Node]] = {}
    for storage, position in last.items():
        if storage.op != "placeholder" and storage not in kept and storage not in skipped:
            dying.setdefault(position, []).append(storage)
    live = peak = 0
    moment: Node | None = None
    for position, node in enumerate(order):
        if base(node) is node and not is_part(node):
            parts = [user for user in node.users if is_part(user)]
            left_out = sum(tensor_bytes(r.meta["val"]) for r in (node, *parts) if r in skipped)
            now = live + tensor_bytes(node.meta["val"]) - left_out + _scratch_bytes(node)
            if now > peak:
                peak, moment = now, node
            live += sum(_owned_bytes(made) for made in _made(node) if made not in skipped)
        live -= sum(_owned_bytes(storage) for storage in dying.get(position, ()))
    return peak, moment


def _scratch_bytes(node: Node) -> int:
    """What the operator makes inside itself, beside its result."""
    if node.target is _sp.convert.default:
        return _copied_bytes(node)
    if node.target not in (_sp.dropout.default, _sp.dropout_mask.default):
        return 0
    x = node.args[0]
    assert isinstance(x, Node)
    return scratch_bytes(x.meta["val"], mask=node.target is _sp.dropout_mask.default)


def _copied_bytes(node: Node) -> int:
    """What a collective copies to bring each rank's part together on dim 0, or back."""
    kind, x = collective_of(node), node.all_input_nodes[0].meta["val"]
    placements = placements_of(node)
    assert placements is not None
    source, target = placements
    if kind == "all_gather" and (source.dim or len(source.segments) > 1):
        return tensor_bytes(node.meta["val"])
    if kind == "reduce_scatter":
        copies = bool(target.dim) + (len(target.segments) > 1)
        return copies * tensor_bytes(x)
    return 0


def _made(node: Node) -> list[Node]:
    """The storages that outlive the statement of ``node``: of several results those with a name."""
    if not isinstance(node.meta["val"], (list, tuple)):
        return [node]
    return [user for user in node.users if base(user) is user]


def _owned_bytes(node: Node) -> int:
    return 0 if isinstance(node.meta["val"], (list, tuple)) else tensor_bytes(node.meta["val"])


def step_memory(compiled: CompiledProgram) -> StepMemory:
    """Follow every storage through the forward and the backward of ``compiled``.

    Backward starts from the first output that is a single number, else from all outputs.
    """
    return Step(compiled).run()


@dataclass
class Frame:
    """Storages of one call, ``None`` where the value is no activation."""

    outputs: list[Storage | None] = field(default_factory=list)
    saved: list[Storage | None] = field(default_factory=list)


class Step:
    """Walk through one training step; :mod:`sp_compiler.cost.step_walk` reads what is live."""

    def __init__(self, compiled: CompiledProgram) -> None:
        self.compiled = compiled
        self.program = compiled.program
        self.frames: list[Frame] = []
        self.holders: Counter[Storage] = Counter()
        self.live_bytes = 0
        self.timeline: list[Moment] = []
        self.grads: dict[tuple[int, int], Storage] = {}
        self.parts_to_come = Counter(
            ref.name for call in self.program.calls for ref in set(call.args) if ref.kind == "param"
        )
        self.partial: dict[str, Storage] = {}
        self.replicated: dict[str, Tensor] = {}
        self.own_parameters = self.program.own_parameters(compiled.world_size)
        self.peaks: dict[tuple[str, str, frozenset[int]], int] = {}

    def run(self) -> StepMemory:
        dead = self.program.last_uses()
        for index, call in enumerate(self.program.calls):
            self._forward(index, call)
            for done in dead[index]:
                self._release(self.frames[done].outputs)
        returned = frozenset(filter(None, map(self._storage, self._returned())))
        self._start_backward()
        for index in reversed(range(len(self.program.calls))):
            self._backward(index, self.program.calls[index])
        self._reduce()
        kept = tuple(
            Kept(index, position, storage)
            for index, frame in enumerate(self.frames)
            for position, storage in enumerate(frame.saved)
            if storage is not None
        )
        return StepMemory(kept, returned, tuple(self.timeline))

    # Forward.

    def _forward(self, index: int, call: Call) -> None:
        parts = self._parts(call)
        self._enter(index, "forward", self._peak(index, "forward", parts))
        frame = self._frame(index, parts)
        self.frames.append(frame)
        self._hold(frame.outputs)
        self._keep(index, frame)

    def _frame(self, index: int, parts: Partitioned) -> Frame:
        """What call ``index`` makes and keeps, split like ``parts``."""
        call = self.program.calls[index]
        results = parts.forward.output_node().args[0]
        names = parts.forward.find_nodes(op="placeholder")
        arguments = dict(zip(names, map(self._storage, call.args), strict=True))
        seeds = {
            node: Storage(("forward", index, node.name), SEED_BYTES)
            for node, ref in zip(names, call.args, strict=True)
            if ref.kind == "seed"
        }
        found = [_resolve(node, arguments | seeds, ("forward", index)) for node in results]
        return Frame(found[: parts.num_outputs], found[parts.num_outputs :])

    def _storage(self, ref: Ref) -> Storage | None:
        return self.frames[ref.index].outputs[ref.output] if ref.kind == "call" else None

    def _returned(self) -> list[Ref]:
        return [leaf for leaf in self.program.outputs if isinstance(leaf, Ref)]

    # Backward.

    def _start_backward(self) -> None:
        flowing = [ref for ref in self._returned() if ref.kind == "call" and self._flows(ref)]
        numbers = [ref for ref in flowing if self._value(ref).dim() == 0]
        for ref in numbers[:1] or flowing:
            start = Storage(("backward", -1, str(ref)), tensor_bytes(self._value(ref)))
            self._hold([start])  # whoever called backward holds it
            self._accumulate(ref, start)

    def _flows(self, ref: Ref) -> bool:
        name = self.program.calls[ref.index].region.name
        return self.compiled.differentiable[name][ref.output]

    def _value(self, ref: Ref) -> Tensor:
        value: Tensor = self.program.calls[ref.index].region.outputs[ref.output].meta["val"]
        return value

    def _backward(self, index: int, call: Call) -> None:
        parts, frame = self._parts(call), self.frames[index]
        graph = parts.step_backward
        refs = [Ref("call", index=index, output=k) for k in range(parts.num_outputs)]
        refs = [ref for ref in refs if self._flows(ref)]
        if parts.loss is not None:  # a step starts from the loss: no other gradient comes here
            refs = [ref for ref in refs if ref.output == parts.loss.output]
        tangents = [self.grads.pop((ref.index, ref.output), None) for ref in refs]
        if graph is None or not any(tangents):
            return  # no gradient arrives: what the call kept stays
        for position, ref in enumerate(refs):
            if tangents[position] is None:  # the runtime makes zeros
                zeros = Storage(("backward", index, str(ref)), tensor_bytes(self._value(ref)))
                tangents[position] = zeros
                self._hold([zeros])
        grads = graph.output_node().args[0]
        self._enter(index, "backward", self._peak(index, "backward", parts))
        names = graph.find_nodes(op="placeholder")
        known = dict(zip(names, [*frame.saved, *tangents], strict=True))
        placements = call.region.input_placements
        for grad, ref, placement in zip(grads, call.args, placements, strict=True):
            storage = None if grad is None else _resolve(grad, known, ("backward", index))
            if storage is not None and ref.kind in ("call", "input"):
                self._accumulate(ref, storage)
            elif storage is not None and ref.kind == "param":
                if placement.kind == "R" and self.compiled.world_size > 1:
                    self._hold([storage])  # until all of them are reduced, at the end of backward
                    self.replicated[ref.name] = grad.meta["val"]
                self._collect(ref.name, storage)
        self._release(tangents)
        self._drop(index, frame)

    def _accumulate(self, ref: Ref, storage: Storage) -> None:
        """A second gradient of one value is added to the first."""
        key = (ref.index, ref.output if ref.kind == "call" else -1)
        self._hold([storage])
        before = self.grads.get(key)
        if before is not None:
            total = Storage(("backward", storage.owner[1], f"sum {ref}"), storage.num_bytes)
            self._hold([total])
            self._release([before, storage])
            storage = total
        self.grads[key] = storage

    def _collect(self, name: str, part: Storage) -> None:
        """A part of the gradient of a parameter; the last sum is the gradient itself."""
        self.parts_to_come[name] -= 1
        before, is_last = self.partial.pop(name, None), not self.parts_to_come[name]
        if before is None and is_last:
            return
        self._hold([part])
        if before is None:
            self.partial[name] = part
            return
        if not is_last:
            self.partial[name] = Storage(("backward", part.owner[1], f"sum {name}"), part.num_bytes)
            self._hold([self.partial[name]])
        self._release([before, part])

    def _reduce(self) -> None:
        """Gradients of replicated parameters are put together and reduced, one dtype at a time."""
        sizes: Counter[torch.dtype] = Counter()
        for grad in self.replicated.values():
            sizes[grad.dtype] += tensor_bytes(grad)
        if sizes:
            # What is sent, and what arrives.
            self._hold([Storage(("backward", -1, "bucket"), 2 * max(sizes.values()))])

    # Books.

    def _parts(self, call: Call) -> Partitioned:
        parts = self.compiled.regions[call.region.name].partitioned
        assert isinstance(parts, Partitioned)
        return parts

    def _peak(self, index: int, kind: Phase, parts: Partitioned) -> int:
        call = self.program.calls[index]
        own = self.own_parameters[index]
        key = (call.region.name, kind, own)
        if key not in self.peaks:
            if kind == "forward":
                self.peaks[key] = function_peak_bytes(parts.forward)
            else:
                assert parts.step_backward is not None
                self.peaks[key] = backward_peak_bytes(parts.step_backward, own)
        return self.peaks[key]

    def _enter(self, index: int, kind: Phase, extra_bytes: int) -> None:
        """A function of call ``index`` runs and holds ``extra_bytes`` beside its arguments."""
        self.timeline.append(Moment(kind, index, self.live_bytes + extra_bytes))

    def _keep(self, index: int, frame: Frame) -> None:
        self._hold(frame.saved)

    def _drop(self, index: int, frame: Frame) -> None:
        self._release(frame.saved)

    def _hold(self, storages: Iterable[Storage | None]) -> None:
        for storage in storages:
            if storage is None:
                continue
            if not self.holders[storage]:
                self.live_bytes += storage.num_bytes
            self.holders[storage] += 1
        if self.timeline:
            self._reach()

    def _release(self, storages: Iterable[Storage | None]) -> None:
        for storage in storages:
            if storage is None:
                continue
            self.holders[storage] -= 1
            if not self.holders[storage]:
                self.live_bytes -= storage.num_bytes

    def _reach(self) -> None:
        """More is held after the function that ran last."""
        last = self.timeline[-1]
        self.timeline[-1] = replace(last, num_bytes=max(last.num_bytes, self.live_bytes))


def _resolve(
    node: Node, known: dict[Node, Storage | None], where: tuple[str, int]
) -> Storage | None:
    """The storage behind ``node``: one that came in, or one that the function made."""
    owner = base(node)
    if owner.op == "placeholder":
        return known[owner]
    return Storage((*where, owner.name), _owned_bytes(owner))
