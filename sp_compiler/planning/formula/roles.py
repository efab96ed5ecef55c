"""Roles of the unknowns of a program, derived from their use, never from names or values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import prod

import torch
from torch.fx import Graph, Node

from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.fx import operands, placements_of, reach, tensor_operands, users
from sp_compiler.ir.op_traits import FUSED_ATTENTION, is_copy, is_view, matmul_factors
from sp_compiler.ir.program import Region
from sp_compiler.ops.gpu.checked_ids import CHECKED_IDS
from sp_compiler.ops.vocabulary import VOCAB_EMBEDDING, VOCAB_NLL
from sp_compiler.planning.formula.shapes import Shape, Shapes
from sp_compiler.planning.formula.sizes import (
    Atom,
    Dim,
    Share,
    resolved,
    size_of,
    uncut,
    unknowns,
)

aten = torch.ops.aten
_SOFTMAX = (aten._softmax.default, aten._safe_softmax.default)
_LOSS = (aten._log_softmax.default, VOCAB_NLL.overload)
_LOOKUPS = (aten.embedding.default, VOCAB_EMBEDDING.overload)

MEANINGS = {
    "s": "sequence: rows of attention, or of an input of tokens",
    "b": "batch: first dim of the inputs that is not s",
    "h": "hidden: width of the values passed between layers",
    "k": "heads of keys and values",
    "a": "attention heads",
    "d": "width of a head",
    "v": "vocabulary, or classes of the loss",
    "e": "experts",
    "c": "experts chosen for a token",
    "f": "feed-forward width: made by one linear and read by another",
}
"""Letters of the roles, in the order in which they are assigned."""


@dataclass(frozen=True)
class Role:
    """A dim that has a role in the model; ``letter``: a key of :data:`MEANINGS`."""

    letter: str
    dim: Dim


def find_roles(compiled: CompiledProgram, shapes: Shapes) -> list[Role]:
    """Return the dims of the model that have a role, in the order of :data:`MEANINGS`."""
    # By use, not by position: models take and return batch, sequence and width in any order.
    roles = [Role("h", dim) for dim in _handed_on(compiled, shapes)]
    linears = _Linears()
    for region in compiled.program.regions:
        roles += _of_region(compiled, region, shapes, linears)
    roles += [Role("f", dim) for dim in linears.between()]
    if not any(role.letter == "s" for role in roles):
        roles += [Role("s", dim) for dim in _of_tokens(compiled, shapes, linears)]
    sequences = {resolved(role.dim) for role in roles if role.letter == "s"}
    batches = [shape[0] for shape in shapes.inputs.values() if shape]
    roles += [Role("b", dim) for dim in batches if resolved(dim) not in sequences][:1]
    # The largest feed-forward width is the first f, and the others are f2, f3.
    order = {letter: position for position, letter in enumerate(MEANINGS)}
    roles = [Role(role.letter, on_all_ranks(role.dim)) for role in roles]
    return sorted(roles, key=lambda r: (order[r.letter], -size_of(r.dim) * (r.letter == "f")))


def on_all_ranks(dim: Dim) -> Dim:
    """Return ``dim`` on all ranks together."""
    first, *rest = resolved(dim) or (None,)
    if first is not None and isinstance(first.meaning, Share):
        return (*resolved(first.meaning.full), *rest)
    return resolved(dim)


def _handed_on(compiled: CompiledProgram, shapes: Shapes) -> Iterator[Dim]:
    """Return the last dim of most values passed between layers."""
    dims: Counter[Dim] = Counter()
    for call in compiled.program.calls:
        forward = compiled.regions[call.region.name].partitioned.forward
        nodes = zip(forward.find_nodes(op="placeholder"), call.region.placeholders, strict=True)
        for ref, (node, source) in zip(call.args, nodes, strict=True):
            shape = shapes.of(call.region.name, node.name)
            if ref.kind == "call" and source.meta.get("requires_grad") and len(shape) > 1:
                # Weighted by elements, as masks and position biases are also passed between layers.
                dims[resolved(shape[-1])] += prod(map(size_of, shape))
    return iter([dim for dim, _ in dims.most_common(1)])


@dataclass
class _Linears:
    """Widths of the results and operands of a model's linear layers.

    Attributes:
        made: unknowns in their results.
        read: widths of their operands.
    """

    made: set[Atom] = field(default_factory=set)
    read: list[Dim] = field(default_factory=list)

    def between(self) -> Iterator[Dim]:
        """Return the widths between two linear layers, possibly in different regions."""
        widths = dict.fromkeys(map(on_all_ranks, self.read))
        return (dim for dim in widths if self.made.issuperset(unknowns(dim)))


def _of_tokens(compiled: CompiledProgram, shapes: Shapes, linears: _Linears) -> Iterator[Dim]:
    """Return the sequence dim of an input of tokens: ids (b, s) of a lookup, or values (b, s, h)
    that a linear layer reads."""
    widths = set(map(on_all_ranks, linears.read))
    for shape, node in _inputs(compiled, shapes):
        looked_up = any(user.target in _LOOKUPS for user in reach([node], _readers))
        if (len(shape) == 2 and looked_up) or (
            len(shape) == 3 and on_all_ranks(shape[-1]) in widths
        ):
            yield shape[1]
            return


def _readers(ids: Node) -> Iterable[Node]:
    """Return the users of ids that are inputs of the model, or views, casts or checks of them."""
    is_same = ids.op == "placeholder" or is_view(ids) or is_copy(ids)
    return ids.users if is_same or ids.target is CHECKED_IDS.overload else ()


def _inputs(compiled: CompiledProgram, shapes: Shapes) -> Iterator[tuple[Shape, Node]]:
    """Return the dims of the user's inputs, and the placeholders that take them."""
    for call in compiled.program.calls:
        forward = compiled.regions[call.region.name].partitioned.forward
        pairs = zip(forward.find_nodes(op="placeholder"), call.args, strict=True)
        yield from ((shapes.inputs[ref.index], n) for n, ref in pairs if ref.kind == "input")


def _of_region(
    compiled: CompiledProgram, region: Region, shapes: Shapes, linears: _Linears
) -> Iterator[Role]:
    """Return the roles that operators of ``region`` show, and add its linears to ``linears``."""
    graph = compiled.regions[region.name].partitioned.forward
    values, params = shapes.values[region.name], _params(graph, region)

    def shape(node: Node) -> Shape:
        return values[node.name][0]

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operands = list(map(shape, tensor_operands(node)))
        factors = matmul_factors(node)
        if node.target in FUSED_ATTENTION:
            yield from _attention(*operands[:3])
        elif node.target in _SOFTMAX:
            yield from _of_softmax(node, params, shape)
        elif node.target in _LOSS:
            yield Role("v", operands[0][-1])
        elif node.target is aten.topk.default:
            yield Role("e", operands[0][-1])
            yield Role("c", shape(node)[-1])
        elif factors and factors[1] in params:
            feature = 1 if node.target is aten.convolution.default else -1
            # Both widths: a linear layer may also read the hidden width, which no linear made.
            linears.read.append(shape(factors[0])[feature])
            linears.made.update(*(unknowns(made[feature]) for made in values[node.name]))


def _of_softmax(softmax: Node, params: set[Node], shape: Callable[[Node], Shape]) -> Iterator[Role]:
    """Return the roles in attention that is written out, if the softmax is one of scores."""
    found = _queries(softmax, params, shape)
    if found is None:
        return
    queries, is_mixed = found
    attended = _attended(softmax, params)
    (scores,) = map(shape, tensor_operands(softmax))
    rows, width = shape(queries)[-2:]
    # If the rows are a chunk of queries, the role belongs to all queries. Other slices, such as a
    # slice of a position table, are the sequence themselves.
    rows = uncut(rows) if softmax.meta.get("chunk") == "part" else rows
    yield from _core(_heads(scores), rows, width)
    # If weights mix the heads, the heads of queries and of values are separate dims.
    mixed = (queries, attended) if is_mixed else ()
    yield from (Role("a", _heads(shape(each))) for each in mixed if each is not None)
    if attended is not None:
        yield Role("d", shape(attended)[-1])


def _params(graph: Graph, region: Region) -> set[Node]:
    """Parameters, seen through views, casts and conversions."""
    kinds = zip(graph.find_nodes(op="placeholder"), region.input_kinds, strict=True)
    params = {node for node, kind in kinds if kind == "param"}
    for node in graph.nodes:
        # A weight that is transposed, cast or gathered before its matmul is still a weight.
        passes_on = is_view(node) or is_copy(node) or placements_of(node) is not None
        if passes_on and node.args[0] in params:
            params.add(node)
    return params


def _attention(query: Shape, key: Shape, value: Shape) -> Iterator[Role]:
    if size_of(key[1]) != size_of(query[1]):
        yield Role("k", key[1])
    yield from _core(query[1], query[2], query[3])
    yield Role("d", value[3])


def _core(heads: Dim, rows: Dim, width: Dim) -> Iterator[Role]:
    factors = on_all_ranks(heads)
    yield Role("s", rows)
    if len(factors) > 1:  # keys and values are repeated for the queries of a group
        yield Role("k", factors[:1])
    yield Role("a", heads)
    yield Role("d", width)


def _attended(softmax: Node, params: set[Node]) -> Node | None:
    """Return the factor that ``softmax`` is multiplied with: the values."""
    for node in reach(softmax.users, users):
        factors = matmul_factors(node)
        # A matmul with a weight mixes heads, or comes after the context.
        if factors and params.isdisjoint(factors):
            return factors[1]
    return None


def _queries(
    softmax: Node, params: set[Node], shape: Callable[[Node], Shape]
) -> tuple[Node, bool] | None:
    """Return the first factor of the product of two activations to which ``softmax`` is applied,
    and whether weights mix the heads in between."""
    is_mixed = False
    for node in reach([softmax.args[0]], operands):
        factors = matmul_factors(node)
        if factors is None:
            continue
        if params.isdisjoint(factors):
            # A router computes its scores from a context, whose columns are a width, not keys.
            same_keys = resolved(shape(node)[-1]) == resolved(shape(softmax)[-1])
            return (factors[0], is_mixed) if same_keys or not is_mixed else None
        is_mixed = True
    return None


def _heads(shape: Shape) -> Dim:
    """Return the dims between batch and rows as one."""
    # In decomposed attention with batched matmuls, heads and batch share one dim.
    heads = shape[1:-2] if len(shape) > 3 else (resolved(shape[0])[1:],)
    return tuple(chain.from_iterable(heads))
