"""The dims of all values of a compiled program as products of unknowns.

The sharding rules say which dims of an operator's operands and results are equal; here they are
used only for that, on the forward that one rank runs.

The dim roles of the sharding pass are not enough: they only distinguish tokens from features, on
the model's own operators. Of the 872 tensors that 13 models save on 2 and 4 ranks, 561 are inputs
or values of that graph in the same shape; the others (parts of decomposed norms and losses, casts,
flattened rows) exist only in the traced forward. So the traced forward is used, once per distinct
block, in under 0.2 s per model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.op_traits import RESHAPES
from sp_compiler.ir.program import Ref
from sp_compiler.planning.formula.operators import (
    Shape,
    one_ranks_part,
    results_of,
    unsharded,
)
from sp_compiler.planning.formula.sizes import (
    Atom,
    resolved,
    size_of,
    unify,
    unknown,
)
from sp_compiler.rules.registry import result_values


@dataclass
class Shapes:
    """Dims of the values of ``compiled``, one rank's part.

    Attributes:
        values: region name to node name to the dims of each result of the forward's node.
        inputs: index of the user's input to its dims.
    """

    values: dict[str, dict[str, list[Shape]]] = field(default_factory=dict)
    inputs: dict[int, Shape] = field(default_factory=dict)

    @property
    def has_batch_of_one(self) -> bool:
        return any(atom.value == 1 for shape in self.inputs.values() for (atom,) in shape)

    def of(self, region: str, node: str) -> Shape:
        """Dims of a node with one result."""
        (shape,) = self.values[region][node]
        return shape


def follow_shapes(compiled: CompiledProgram) -> Shapes:
    """Walk every distinct forward once, then connect the calls."""
    shapes = Shapes()
    # All inputs first: dims that a graph creates are in doubt if any input has a batch of one.
    for node, ref in _inputs(compiled):
        # A dim of 1 could be larger for another input, in contrast to one of a parameter.
        sizes = tuple((Atom(size),) for size in node.meta["val"].shape)
        shapes.inputs.setdefault(ref.index, sizes)
    stored: dict[tuple[str, str], Shape] = {}
    for call in compiled.program.calls:
        forward = compiled.regions[call.region.name].partitioned.forward
        taken = forward.find_nodes(op="placeholder")
        given = [
            _given(compiled, ref, node, shapes, stored)
            for ref, node in zip(call.args, taken, strict=True)
        ]
        # Later calls run the same graph, so their arguments have the same sizes as those of the
        # first call, wherever they come from.
        if call.region.name not in shapes.values:
            shapes.values[call.region.name] = _follow(forward, given, shapes.has_batch_of_one)
            continue
        for ref, shape, node in zip(call.args, given, taken, strict=True):
            first_call = shapes.of(call.region.name, node.name)
            full_shapes = (
                unsharded(local, compiled.placement(ref), compiled.world_size)
                for local in (shape, first_call)
            )
            for left, right in zip(*full_shapes, strict=True):
                unify(left, right)
    return shapes


def _inputs(compiled: CompiledProgram) -> Iterator[tuple[Node, Ref]]:
    for call in compiled.program.calls:
        forward = compiled.regions[call.region.name].partitioned.forward
        taken = forward.find_nodes(op="placeholder")
        yield from (
            (node, ref) for node, ref in zip(taken, call.args, strict=True) if ref.kind == "input"
        )


def _given(
    compiled: CompiledProgram,
    ref: Ref,
    node: Node,
    shapes: Shapes,
    stored: dict[tuple[str, str], Shape],
) -> Shape:
    """Dims of a call's argument for the placeholder ``node``."""
    if ref.kind == "call":
        region = compiled.program.calls[ref.index].region.name
        results = compiled.regions[region].partitioned.forward.output_node().args[0]
        return shapes.of(region, results[ref.output].name)
    if ref.kind == "input":
        return shapes.inputs[ref.index]
    name = compiled.param_name(ref.name) if ref.kind == "param" else ref.name
    placement = compiled.placement(ref)
    full = unsharded(_fresh(node.meta["val"]), placement, compiled.world_size)
    # By name: with a tied weight the embedding's rows and the head's classes are one size.
    full = stored.setdefault((ref.kind, name), full)
    return one_ranks_part(full, placement, compiled.world_size)


# One graph.


def _follow(graph: Graph, given: Sequence[Shape], has_batch_of_one: bool) -> dict[str, list[Shape]]:
    taken = graph.find_nodes(op="placeholder")
    known = {node.name: [shape] for node, shape in zip(taken, given, strict=True)}
    for node in graph.nodes:
        if node.op == "call_function":
            results = results_of(node, known)
            if node.target in RESHAPES and has_batch_of_one:
                results = [_doubted(shape, known[node.args[0].name][0]) for shape in results]
            known[node.name] = _checked(node, results, has_batch_of_one)
    _find_counted(graph, known)
    return known


def _find_counted(graph: Graph, known: Mapping[str, Sequence[Shape]]) -> None:
    """Mark the dims from which the model selects each element by a constant index."""
    picked: dict[Atom, set[int]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.select.int):
        source, dim, index = node.args
        factors = resolved(known[source.name][0][dim])
        if len(factors) == 1:
            picked.setdefault(factors[0], set()).add(index % factors[0].value)
    for atom, indices in picked.items():
        atom.is_counted = len(indices) == atom.value > 1


def _doubted(result: Shape, source: Shape) -> Shape:
    """Mark new dims of size 1 in a view as in doubt: they may be part of a size without factors."""
    if result.count(()) <= source.count(()):
        return result
    return tuple(dim or (Atom(1, in_doubt=True),) for dim in result)


def _fresh(value: Any, has_batch_of_one: bool = False) -> Shape:
    if not isinstance(value, Tensor):
        return ()
    one = (Atom(1, in_doubt=True),) if has_batch_of_one else ()
    return tuple(unknown(size) if size != 1 else one for size in value.shape)


def _checked(node: Node, derived: Sequence[Shape], has_batch_of_one: bool) -> list[Shape]:
    """Return the derived dims, with unknowns for dims whose size differs from the value's."""
    results = []
    for position, value in enumerate(result_values(node)):
        fresh = _fresh(value, has_batch_of_one)
        shape = derived[position] if position < len(derived) else fresh
        # An unknown is better than a wrong name; the sum of all bytes is checked at the end.
        if len(shape) != len(fresh):
            shape = fresh
        pairs = zip(shape, fresh, strict=True)
        results.append(tuple(a if size_of(a) == size_of(b) else b for a, b in pairs))
    return results
