"""Derive the placement of every value of a compiled region again, forward and backward.

Types of values: replicated (R and I are the same numbers), ``S(dim)`` and P. In forward they follow
from the inputs by the rule table; in backward from the saved values and the tangents, whose
placements are the duals of the outputs'. Decisions of the sharding pass are not trusted: a
placement that it declared on a node must be derivable.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from sp_compiler.base.errors import PlacementError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import Placement, R, S, as_value
from sp_compiler.check.derive import Results, allowed, derive
from sp_compiler.check.report import CheckReport
from sp_compiler.ir.forward_backward import LookAhead, Partitioned, SplitBackward
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.ir.op_traits import (
    FILLED,
    base,
    is_handed,
    is_started,
    is_wait,
    view_chain,
    writes,
)
from sp_compiler.ir.program import Region
from sp_compiler.ir.symbolic import same_shape

_PASS = Pass.CHECK
_JOINS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
Types = dict[Node, list[Results]]
"""Every derivable placement of each node's results."""


def check_partitioned(
    region: Region, partitioned: Partitioned, tangent_outputs: Sequence[int], world_size: int
) -> CheckReport:
    """Raise an error for a forward or backward that would compute wrong numbers.

    Args:
        region: sharded; its input and output placements are the contract.
        partitioned: the graphs from which code is generated.
        tangent_outputs: index of the region output that each tangent belongs to.
        world_size: number of ranks.

    Raises:
        PlacementError: with the operator, its module and line, the expected and the derived
            placements.
    """
    report = CheckReport()
    placeholders = partitioned.forward.find_nodes(op="placeholder")
    types: Types = {
        node: [(as_value(placement, world_size),)]
        for node, placement in zip(placeholders, region.input_placements, strict=True)
    }
    _walk(partitioned.forward, types, world_size, report)
    results = partitioned.forward.output_node().args[0]
    outputs = results[: partitioned.num_outputs]
    for index, (node, placement) in enumerate(zip(outputs, region.output_placements, strict=True)):
        _require(node, types, placement, f"output {index} of {region.name}", world_size)
    # All possible placements of a saved value are kept: only backward may tell which is right.
    saved = [types[node] for node in results[partitioned.num_outputs :]]
    if partitioned.backward is not None:
        _check_backward(region, partitioned.backward, tangent_outputs, saved, world_size, report)
    if (loss := partitioned.loss) is not None:
        _check_backward(region, loss.backward, [loss.output], saved, world_size, report)
    if partitioned.split is not None:
        tangents = tangent_outputs if loss is None else [loss.output]
        _check_split(region, partitioned.split, tangents, saved, world_size, report)
    if partitioned.ahead is not None:
        _check_ahead(region, partitioned.ahead, tangent_outputs, saved, world_size, report)
    return report


def _check_ahead(
    region: Region,
    ahead: LookAhead,
    tangent_outputs: Sequence[int],
    saved: Sequence[list[Results]],
    world_size: int,
    report: CheckReport,
) -> None:
    placeholders = ahead.recompute.find_nodes(op="placeholder")
    types: Types = dict(zip(placeholders, saved, strict=True))
    _walk(ahead.recompute, types, world_size, report)
    # As for values saved for backward: all possible placements are kept.
    given = [types[node] for node in ahead.recompute.output_node().args[0]]
    of_call = [*saved, *given]
    _check_backward(region, ahead.rest, tangent_outputs, of_call, world_size, report)
    of_both = [*of_call, *saved]
    types = _check_backward(region, ahead.both, tangent_outputs, of_both, world_size, report)
    handed = ahead.both.output_node().args[0][len(region.input_names) :]
    _require_same(types, handed, given, "recomputed ahead")


def _require_same(
    types: Types, handed: Sequence[Node], given: Sequence[list[Results]], what: str
) -> None:
    """Raise an error if a function passes on other placements than the next was checked with."""
    for node, wanted in zip(handed, given, strict=True):
        if types[node] != wanted:
            got, expected = (each[0][0] for each in (types[node], wanted))
            message = f"{node.name}, {what}, must be {expected} but is {got}"
            raise PlacementError(_PASS, message, node)


def _check_split(
    region: Region,
    split: SplitBackward,
    tangent_outputs: Sequence[int],
    saved: Sequence[list[Results]],
    world_size: int,
    report: CheckReport,
) -> None:
    types = _check_backward(region, split.inputs, tangent_outputs, saved, world_size, report)
    handed = split.inputs.output_node().args[0][len(region.input_names) :]
    # As for values saved for backward: all possible placements are kept.
    given = [types[node] for node in handed]
    _check_backward(region, split.weights, [], given, world_size, report)
    if split.both is None:
        return
    of_both = [*saved, *given]
    types = _check_backward(region, split.both, tangent_outputs, of_both, world_size, report)
    again = split.both.output_node().args[0][len(region.input_names) :]
    _require_same(types, again, given, "left to the call before")


def _check_backward(
    region: Region,
    graph: Graph,
    tangent_outputs: Sequence[int],
    saved: Sequence[list[Results]],
    world_size: int,
    report: CheckReport,
) -> Types:
    placeholders = graph.find_nodes(op="placeholder")
    # Not strict: the tangents follow the saved values.
    types: Types = dict(zip(placeholders, saved, strict=False))
    tangents = placeholders[len(saved) :]
    for node, index in zip(tangents, tangent_outputs, strict=True):
        # The gradient of a replicated output is partial; that of a partial output is replicated.
        types[node] = [(as_value(region.output_placements[index].dual, world_size),)]
    _walk(graph, types, world_size, report)
    grads = graph.output_node().args[0]
    # Not strict: a function may also return values that it passes on.
    for name, placement, grad in zip(
        region.input_names, region.input_placements, grads, strict=False
    ):
        if grad is not None:
            what = f"the gradient of {name}, which is {placement},"
            _require(grad, types, placement.dual, what, world_size)
    return types


def _walk(graph: Graph, types: Types, world_size: int, report: CheckReport) -> None:
    written: dict[Node, Node] = {}
    for node in graph.nodes:
        _require_unwritten(node, written)
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            source, index = node.args
            types[node] = list(dict.fromkeys((results[index],) for results in types[source]))
        else:
            types[node] = _derive(node, types, world_size)
        _require_arrival(node)
        _require_claim(node, types, world_size)
        report.checked += 1


def _require_unwritten(node: Node, written: dict[Node, Node]) -> None:
    """Raise an error if ``node`` reads memory that has been overwritten.

    Args:
        written: the last operator that wrote into the storage of each node; ``node`` is added.
    """
    for operand in node.all_input_nodes:
        writer = written.get(base(operand))
        if writer is not None and writer not in view_chain(operand):
            message = f"{node.name} reads {operand.name}, into which {writer.name} has written"
            raise PlacementError(_PASS, message, node)
    if node.op == "call_function" and writes(node):
        owner = base(node)
        if owner.op == "placeholder" and not is_handed(owner):
            raise PlacementError(_PASS, f"{node.name} writes into an argument", node)
        written[owner] = node


def _require_arrival(node: Node) -> None:
    """Raise an error if the result of a started collective is read other than through its one
    ``wait``.

    Placements do not show this: a value in flight has the same type as a complete one.
    """
    if not is_started(node):
        return
    early = [user for user in node.users if not is_wait(user)]
    if early or len(node.users) > 1:
        reader = (early or list(node.users))[-1]
        raise PlacementError(
            _PASS, f"{reader.name} reads {node.name}, which may not be there", node
        )


def _derive(node: Node, types: Types, world_size: int) -> list[Results]:
    """Return all placements of the results, for all possible placements of the operands."""
    operands = tensor_operands(node)
    options = [[results[0] for results in types[operand]] for operand in operands]
    segments = {placement.segments for choices in options for placement in choices}
    for operand, choices in zip(operands, options, strict=True):
        if operand.target in FILLED:  # also a shard in the segments of the other operands
            dims = [placement.dim for placement in choices if placement.is_sharded]
            choices += [S(dim, parts) for dim in dims for parts in sorted(segments - {()})]
    derived: dict[Results, None] = {}
    for placements in _combinations(node, operands, options):
        derived.update(dict.fromkeys(derive(node, placements, world_size)))
    if not derived:
        _refuse(node, operands, [choices[0] for choices in options], world_size)
    return list(derived)


def _combinations(
    node: Node, operands: Sequence[Node], options: Sequence[Sequence[Placement]]
) -> Iterator[tuple[Placement, ...]]:
    """Yield the joint placements that the operands can have, one for each operand."""
    # A node that occurs twice has one placement: ``x * x`` with x read as S(0) and as R at once
    # would be neither.
    choices = dict(zip(operands, options, strict=True))
    joined: list[Node] = []
    if node.target in _JOINS:
        # Without the empty vectors, which ``cat`` ignores.
        joined = [each for each in choices if not same_shape(each.meta["val"].shape, (0,))]
    if not joined:
        # Few nodes have several operands with several possible placements.
        yield from _products(operands, choices)
        return
    # Joined operands have the same placement: other combinations would be rejected, and a loop
    # makes too many of them to try.
    for placement in choices[joined[0]]:
        if all(placement in choices[each] for each in joined):
            alike = {each: [placement] for each in joined}
            yield from _products(operands, {**choices, **alike})


def _products(
    operands: Sequence[Node], choices: Mapping[Node, Sequence[Placement]]
) -> Iterator[tuple[Placement, ...]]:
    for placements in itertools.product(*choices.values()):
        chosen = dict(zip(choices, placements, strict=True))
        yield tuple(chosen[operand] for operand in operands)


def _refuse(
    node: Node, operands: Sequence[Node], placements: Sequence[Placement], world_size: int
) -> None:
    """Raise an error that shows the operands' placements and the possible strategies."""
    got = []
    for operand, placement in zip(operands, placements, strict=True):
        shape = getattr(operand.meta["val"], "shape", None)
        got.append(f"{operand.name} {placement} {'' if shape is None else tuple(shape)}".rstrip())
    ways = [
        f"({', '.join(map(str, way.operands))}) -> {', '.join(map(str, way.results))}"
        for way in allowed(node, placements, world_size)
    ]
    message = f"{node.target} of {', '.join(got) or 'nothing'} would give wrong numbers"
    # A custom operator has no rule until the user registers one.
    if getattr(node.target, "namespace", "aten") not in ("aten", "sp_compiler"):
        name = node.target._schema.name
        message += f"; sp_compiler.rule('{name}', ...) says how it is split and where it is linear"
    raise PlacementError(_PASS, f"{message}; allowed: {'; '.join(ways) or 'nothing'}", node)


def _require_claim(node: Node, types: Types, world_size: int) -> None:
    """Raise an error for a value whose declared placement is not among the derived ones."""
    claim = node.meta.get("placement")
    if claim is None:
        return
    kept = [results for results in types[node] if results[0] == as_value(claim, world_size)]
    if not kept:
        got = " or ".join(str(results[0]) for results in types[node])
        raise PlacementError(_PASS, f"{node.name} is declared {claim} but is {got}", node)
    # The declared placement also decides among the possible ones for later nodes.
    types[node] = kept


def _require(node: Node, types: Types, placement: Placement, what: str, world_size: int) -> None:
    # One that agrees is enough: all of them describe the same values.
    wanted = as_value(placement, world_size)
    if all(results[0] != wanted for results in types[node]):
        got = " or ".join(str(results[0]) for results in types[node])
        expected = "replicated" if wanted == R else str(wanted)
        raise PlacementError(_PASS, f"{what} must be {expected} but {node.name} is {got}", node)
