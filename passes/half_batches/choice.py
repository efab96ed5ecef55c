"""Which operators run once per half, and which compute values of the full batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import cast

from torch import Tensor
from torch.fx import Node

from sp_compiler.base.placement import Segmentation
from sp_compiler.base.provenance import OUTSIDE, layer_of
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import (
    ancestors,
    carries_gradient,
    descendants,
    is_call,
    is_getitem,
    shape_of,
    tensor_operands,
)
from sp_compiler.ir.op_traits import DRAWS, FILLED, draws
from sp_compiler.passes.half_batches.rows import BATCH_FIRST, Rows, Split, State
from sp_compiler.passes.half_batches.sorted_rows import on_sorted_rows
from sp_compiler.passes.sharding.dim_roles import Value, results_of, value_of, value_shape
from sp_compiler.rules.factors import Dim, Factor, OpRule
from sp_compiler.rules.strategies import Strategy, shard_factor
from sp_compiler.rules.table import rule_for

HALVES = 2


class RefusedError(Exception):
    """The layers cannot be split because of ``node``."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def calls_to_split(captured: Captured) -> dict[Node, Split]:
    """Return the calls that run once per half, in graph order, each as on one of two ranks.

    Raises:
        RefusedError: a layer mixes the batch.
    """
    states = _batch_of_inputs(captured)
    nodes = [
        node
        for node in captured.module.graph.nodes
        if node.op == "call_function" and not is_getitem(node)
    ]
    in_layers = {node for node in nodes if layer_of(node) is not OUTSIDE}
    before_layers = ancestors(in_layers)
    activations = descendants(_differentiable_inputs(captured))
    splits: dict[Node, Split] = {}
    joined: set[Node] = set()  # operators that read both halves, and all that follow
    for node in nodes:
        operands = [value_of(operand) for operand in tensor_operands(node)]
        sources = {source for source, _ in operands}
        reads_joined = not joined.isdisjoint(sources)
        split = None if reads_joined else _on_halves(node, operands, states)
        # Tables and masks that depend only on inputs are made once, for both halves. So is a matmul
        # with parameters after the layers: otherwise their gradient would be made for each half.
        flows = any(value in states and value[0] in activations for value in operands)
        others = [v for v in operands if v not in states and v[0] in activations]
        is_head = node not in before_layers and any(len(value_shape(v)) > 1 for v in others)
        can_join = split is not None and all(map(_can_be_joined, split.states))
        if split is not None and (node in in_layers or (flows and not is_head and can_join)):
            splits[node] = split
        elif reads_joined or not sources.isdisjoint(splits):
            if node in before_layers:
                whole = "a layer reads a value that depends on the entire batch"
                raise RefusedError(node, whole if reads_joined else _mixes(node))
            _require_joinable(node, [states[v] for v in operands if v[0] in splits])
            joined.add(node)
            continue
        # The halves of a full-batch value are slices of it, so they must be its parts.
        if split is not None and (node in splits or can_join):
            states.update(zip(results_of(node), split.states, strict=True))
    output = captured.module.graph.output_node()
    if in_layers.isdisjoint(splits):
        # Reported at the output: no operator is to blame.
        raise RefusedError(output, "the model has no repeated layers that the batch goes through")
    for value in map(value_of, output.all_input_nodes):
        _require_joinable(value[0], [states[value]] if value[0] in splits else [])
    return splits


def _require_joinable(node: Node, halves: Iterable[State]) -> None:
    """Raise an error if the joined ``halves`` are not the full batch's value of ``node``."""
    if not all(map(_can_be_joined, halves)):
        raise RefusedError(node, _mixes(node))


def _can_be_joined(state: State) -> bool:
    return isinstance(state, Rows) and state.can_be_joined


def _mixes(node: Node) -> str:
    node = node.args[0] if is_getitem(node) else node
    name = str(node.target.__name__).partition(".")[0]
    return f"{name} mixes the batch, or is not known to keep its samples separate"


def _batch_of_inputs(captured: Captured) -> dict[Value, State]:
    """Return the rows of every input that has the batch.

    Raises:
        RefusedError: the batch cannot be halved.
    """
    inputs = [
        node
        for node, ref in zip(captured.placeholders, captured.refs, strict=True)
        if ref.kind == "input" and isinstance(node.meta["val"], Tensor)
    ]
    size = next((shape_of(node)[0] for node in inputs if len(shape_of(node)) > 1), None)
    if size is None:
        raise RefusedError(
            captured.module.graph.output_node(), "no input has a batch and another dim"
        )
    if size % HALVES:
        raise RefusedError(inputs[0], f"a batch of {size} has no equal halves")
    # A dim of this size that is not a batch does no harm: only what runs on its halves is split.
    return {(node, 0): BATCH_FIRST for node in inputs if shape_of(node)[:1] == (size,)}


def _differentiable_inputs(captured: Captured) -> list[Node]:
    return [
        node
        for node, ref in zip(captured.placeholders, captured.refs, strict=True)
        if ref.kind in ("param", "input")
        and isinstance(node.meta["val"], Tensor)
        and carries_gradient(node.meta["val"])
    ]


def _on_halves(node: Node, operands: list[Value], states: Mapping[Value, State]) -> Split | None:
    """Return how ``node`` runs on each half of the batch, treated as two ranks; or ``None``."""
    of_operands = [states[value] for value in operands if value in states]
    if draws(node) or not of_operands:
        return None
    split = None
    if all(isinstance(state, Rows) for state in of_operands):
        split = _row_by_row(node, operands, cast("Mapping[Value, Rows]", states))
    return split or on_sorted_rows(node, states)


def _row_by_row(node: Node, operands: list[Value], states: Mapping[Value, Rows]) -> Split | None:
    """Return how ``node`` runs on halves of rows by its sharding rule, or ``None``."""
    rule = rule_for(node)
    index = None if rule is None else _batch_index(rule, operands, states)
    if rule is None or index is None:
        return None
    factor, cut = index
    strategy = shard_factor(rule, factor, cut, HALVES)
    if strategy is None or strategy.lowering != "itself":
        return None
    if any(placement.kind != "S" for placement in strategy.results):
        return None  # a sum over the batch
    for value, placement in zip(operands, strategy.operands, strict=True):
        if value in states and placement != states[value].placement:
            return None
        if value not in states and placement.segments:
            return None  # a half of a full-batch value is one slice
    orders = {states[value].order for value in operands if value in states}
    (order, *others) = orders
    if others or not (order is None or _keeps_order(rule, factor, operands, strategy, states)):
        return None
    where = strategy.results[0]
    if is_call(node, *DRAWS) and (where.segments or math.prod(shape_of(node)[: where.dim]) != 1):
        return None  # the counter's rows of a half must be contiguous
    return Split(strategy, tuple(Rows(placement, order) for placement in strategy.results))


_Index = tuple[Factor, Segmentation]


def _batch_index(
    rule: OpRule, operands: list[Value], states: Mapping[Value, Rows]
) -> _Index | None:
    """Return the index of the operator that is or begins with the batch, and its segments."""
    indices: dict[_Index | None, None] = {}
    for value, dims in zip(operands, rule.operands, strict=True):
        if value in states:
            placement = states[value].placement
            indices[_index_of(dims[placement.dim], placement.segments)] = None
    (index, *others) = indices
    return None if others or index is None or index[0].blocked else index


def _index_of(dim: Dim, segments: tuple[int, ...]) -> _Index | None:
    if len(dim) == 1:
        return dim[0], Segmentation(segments)
    outer = len(segments) or 1
    for factor in dim:
        if outer == 1:
            return factor, Segmentation(())
        outer, rest = divmod(outer, factor.size)
        if rest:
            return None
    return None


def _keeps_order(
    rule: OpRule,
    factor: Factor,
    operands: list[Value],
    strategy: Strategy,
    states: Mapping[Value, Rows],
) -> bool:
    """Whether sorted rows stay rows, and are combined with nothing that is in another order."""
    if rule.placed:
        return False  # the random numbers of a row depend on its position
    rows_only = all((factor,) in dims for dims in rule.results)
    for value, dims, placement in zip(operands, rule.operands, strategy.operands, strict=True):
        if value in states:
            rows_only = rows_only and dims[placement.dim] == (factor,)
        elif placement.is_sharded and value[0].target not in FILLED:
            return False
    return rows_only
