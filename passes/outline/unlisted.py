"""Layers that are in no list: a block that the model loops over, or blocks with separate names.

What makes them layers is depth: each call of a module, or of the next module of its class, goes on
from what the call before returned, and together they are most of the model. Cells that each read
one token, parallel towers and the wrapped linear maps of one attention are therefore not layers: as
separate calls they would cost more than they save.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.fx import Node

from sp_compiler.base.provenance import (
    ModuleCall,
    is_indexed,
    layer_among,
    mark_as_layers,
    module_calls,
)
from sp_compiler.ir.captured import Captured

_Kind = tuple[str, str]  # path of the parent, class
_OWN = ("param", "buffer", "constant")


def mark_unlisted_layers(captured: Captured) -> None:
    """Make :func:`~sp_compiler.base.provenance.layer_of` treat such modules as layers."""
    nodes = [node for node in captured.module.graph.nodes if node.op == "call_function"]
    stacks = {node: [*module_calls(node)] for node in nodes}
    kinds = _kinds(stacks.values())
    sources = zip(captured.placeholders, captured.refs, strict=True)
    weights = {node for node, ref in sources if ref.kind in _OWN}
    deep = {kind for kind in {*kinds.values()} if _is_deep(_calls(stacks, kinds, kind), weights)}
    layers = {path for path, kind in kinds.items() if kind in deep}
    # A module that is also called inside another layer would be a separate call in only some
    # places, with hooks that run only there.
    layers -= {
        call.path
        for stack in stacks.values()
        if (layer := layer_among(stack, layers)) is not None
        for call in stack[stack.index(layer) + 1 :]
    }
    for node, stack in stacks.items():
        if any(call.path in layers for call in stack):
            mark_as_layers(node, layers)


def count_possible_layers(stacks: Sequence[Sequence[ModuleCall]]) -> int:
    """Return how many calls of layers there may be, judging only by the calls of modules."""
    paths = set(_kinds(stacks))
    found = (layer_among(stack, paths) for stack in stacks)
    return len({layer.key for layer in found if layer is not None})


def _kinds(stacks: Iterable[Sequence[ModuleCall]]) -> dict[str, _Kind]:
    """Return the modules outside of lists that call others and occur several times, by kind.

    Excluded are those that contain layers, which are indexed modules that call others, and those
    whose modules are layers themselves, such as an ``nn.Sequential``.
    """
    calls: dict[_Kind, set[str]] = defaultdict(set)
    kind_of: dict[str, _Kind] = {}
    callers: set[str] = set()
    others = {""}
    for stack in stacks:
        first = next((at for at, call in enumerate(stack) if is_indexed(call.path)), len(stack))
        callers.update(call.path for call in stack[:-1])
        if first < len(stack) - 1:
            others.update(call.path for call in stack[:first])
        elif first < len(stack):
            others.add(stack[first].path.rpartition(".")[0])
        for call in stack[:first]:
            kind = call.path.rpartition(".")[0], call.class_name
            kind_of[call.path] = kind
            calls[kind].add(call.key)
    return {
        path: kind
        for path, kind in kind_of.items()
        if path in callers - others and len(calls[kind]) > 1
    }


def _calls(
    stacks: Mapping[Node, Sequence[ModuleCall]], kinds: Mapping[str, _Kind], kind: _Kind
) -> dict[Node, int]:
    """Return for all nodes of a graph which call of this kind they are in, -1 if in none."""
    numbers: dict[str, int] = {}
    number_of = {}
    for node, stack in stacks.items():
        key = next((call.key for call in stack if kinds.get(call.path) == kind), None)
        number_of[node] = -1 if key is None else numbers.setdefault(key, len(numbers))
    return number_of


def _is_deep(number_of: Mapping[Node, int], weights: set[Node]) -> bool:
    """Return whether the calls are most of the graph, and each goes on from the one before: a value
    that it reads, and the one before did not, comes from that one's results or is in ``weights``.
    """
    given: list[set[Node]] = [set() for _ in range(max(number_of.values()) + 1)]
    latest: dict[Node, int] = {}  # of the calls that a node depends on
    for node, number in number_of.items():
        operands = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
        latest[node] = max([number, *(latest.get(x, -1) for x in node.all_input_nodes)])
        if number >= 0:
            given[number].update(
                x for x in operands if number_of.get(x, -1) != number and x not in weights
            )
    inside = sum(number >= 0 for number in number_of.values())
    return 2 * inside > len(number_of) and all(
        (fresh := now - before) and all(latest.get(x, -1) == number for x in fresh)
        for number, (before, now) in enumerate(itertools.pairwise(given))
    )
