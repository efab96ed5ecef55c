"""Run layers on two half batches, so that collectives of one overlap with kernels of the other.

::

    y = linear(x, w)                     y_0 = linear(x_0, w)
    z = gelu(y)                    ->    y_1 = linear(x_1, w)
                                         z_0 = gelu(y_0)
                                         z_1 = gelu(y_1)

A layer is one chain: nothing in its forward can run during a collective. Two halves are two chains,
which the overlap pass interleaves (Wang et al. 2024, "Domino", arXiv 2409.15241, section 3.2). Both
read the same parameters, and differentiation sums their gradients.

To an operator, a half is like one of two ranks when its batch is sharded: the operator's rule says
whether it can run on each half separately, and with which size arguments. Results are therefore
those of the full batch, except for the order of sums in gradients of parameters. This happens
before sharding, so every rank holds a part of the tokens of each half.

The layers are split, and cheap operators around them. Embeddings are looked up for the full batch,
and the halves are joined before a wide product, the head. Requires and preserves normal form.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.placement import S, Segmentation
from sp_compiler.base.provenance import OUTSIDE, layer_of, source_line
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import (
    ancestors,
    arguments,
    base_name,
    carries_gradient,
    descendants,
    is_call,
    is_getitem,
    shape_of,
    tensor_operands,
)
from sp_compiler.ir.op_traits import DRAWS, draws
from sp_compiler.ir.rewriting import (
    differentiable_result,
    erase_dead,
    fake_mode_of,
    insert_call,
    make_call,
)
from sp_compiler.passes.sharding.dim_roles import Value, results_of, value_of
from sp_compiler.passes.sharding.dim_roles import shape_of as value_shape
from sp_compiler.planning.plan import Plan
from sp_compiler.rules.registry import LocalCall
from sp_compiler.rules.strategies import Strategy, shard_factor
from sp_compiler.rules.table import local_call, rule_for

_ORIGIN = Pass.HALF_BATCHES
_aten = torch.ops.aten
_HALVES = 2
# Kernels of half the rows are a little less efficient than estimated; what is gained must be more.
_LEAST_GAIN = 0.01


def half_batches(captured: Captured) -> None:
    """Split the layers of ``captured`` in place, or decline with a reason and do not change it.

    The batch is dim 0 of the inputs with two or more dims. Operators in layers that mix it (batch
    norm, experts that sort tokens, statistics over the batch) cannot be split, nor can a batch of
    an odd size.
    """
    graph = captured.module.graph
    try:
        strategies = _calls_to_split(captured)
    except _RefusedError as refused:
        report_of(_ORIGIN).decline(refused.node, refused.reason)
        at = source_line(refused.node)
        captured.notes.append(f"half batches: {refused.reason}" + (f" ({at})" if at else ""))
        return
    halves = _Halves(graph)
    for node in list(graph.nodes):
        if node in strategies:
            halves.split(node, strategies[node])
        elif not (is_getitem(node) and node.args[0] in strategies):
            halves.join_operands(node)
    erase_dead(graph)
    graph.lint()


def halves_pay(halves: Plan, full: Plan, budget_bytes: int | None) -> bool:
    """Return whether a step on half batches takes less time than on the full one, and no more
    memory than that or ``budget_bytes``."""
    faster = halves.schedule.step_us < (1 - _LEAST_GAIN) * full.schedule.step_us
    most_bytes = max(full.activation_peak_bytes, budget_bytes or 0)
    return faster and halves.activation_peak_bytes <= most_bytes


class _RefusedError(Exception):
    """The layers cannot be split because of ``node``."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


# What is split.


def _calls_to_split(captured: Captured) -> dict[Node, Strategy]:
    """Return the calls that run once per half, in graph order, each as on one of two ranks.

    Raises:
        _RefusedError: a layer mixes the batch.
    """
    batch_dims = _batch_of_inputs(captured)
    nodes = [
        node
        for node in captured.module.graph.nodes
        if node.op == "call_function" and not is_getitem(node)
    ]
    in_layers = {node for node in nodes if layer_of(node) is not OUTSIDE}
    before_layers = ancestors(in_layers)
    activations = descendants(_differentiable_inputs(captured))
    strategies: dict[Node, Strategy] = {}
    joined: set[Node] = set()  # what reads both halves, and all behind it
    for node in nodes:
        operands = [value_of(operand) for operand in tensor_operands(node)]
        sources = {source for source, _ in operands}
        if not joined.isdisjoint(sources):
            if node in in_layers:
                raise _RefusedError(node, "a layer reads what the whole batch determines")
            joined.add(node)
            continue
        strategy = _on_halves(node, operands, batch_dims)
        # Tables and masks that inputs alone determine are made once, for both halves. So is what a
        # matrix of parameters makes behind the layers: its gradient would be made for each half.
        flows = any(value in batch_dims and value[0] in activations for value in operands)
        others = [v for v in operands if v not in batch_dims and v[0] in activations]
        is_head = node not in before_layers and any(len(value_shape(v)) > 1 for v in others)
        if strategy is not None and (node in in_layers or (flows and not is_head)):
            strategies[node] = strategy
        elif not sources.isdisjoint(strategies):
            if node in before_layers:
                raise _RefusedError(node, f"{_name(node)} mixes the batch, or is not known not to")
            joined.add(node)
            continue
        if strategy is not None:
            placements = zip(results_of(node), strategy.results, strict=True)
            batch_dims.update((value, placement.dim) for value, placement in placements)
    if not in_layers.intersection(strategies):
        # Named after the output: there is no operator whose fault it is.
        output = captured.module.graph.output_node()
        raise _RefusedError(output, "the model has no repeated layers that the batch goes through")
    return strategies


def _name(node: Node) -> str:
    return str(node.target.__name__).partition(".")[0]


def _batch_of_inputs(captured: Captured) -> dict[Value, int]:
    """Return the batch dim of every input that has one.

    Raises:
        _RefusedError: the batch cannot be halved.
    """
    inputs = [
        node
        for node, ref in zip(captured.placeholders, captured.refs, strict=True)
        if ref.kind == "input" and isinstance(node.meta["val"], Tensor)
    ]
    size = next((shape_of(node)[0] for node in inputs if len(shape_of(node)) > 1), None)
    if size is None:
        raise _RefusedError(
            captured.module.graph.output_node(), "no input has a batch and another dim"
        )
    if size % _HALVES:
        raise _RefusedError(inputs[0], f"a batch of {size} has no halves of one size")
    # A dim of this size that is no batch does no harm: only what runs on halves of it is split.
    return {(node, 0): 0 for node in inputs if shape_of(node)[:1] == (size,)}


def _differentiable_inputs(captured: Captured) -> list[Node]:
    return [
        node
        for node, ref in zip(captured.placeholders, captured.refs, strict=True)
        if ref.kind in ("param", "input")
        and isinstance(node.meta["val"], Tensor)
        and carries_gradient(node.meta["val"])
    ]


def _on_halves(node: Node, operands: list[Value], batch_dims: dict[Value, int]) -> Strategy | None:
    """Return how ``node`` runs on each half of the batch, treated as two ranks; or ``None``."""
    rule = rule_for(node)
    if rule is None or draws(node) or not any(value in batch_dims for value in operands):
        return None
    batches = [
        rule.operands[position][batch_dims[value]]
        for position, value in enumerate(operands)
        if value in batch_dims
    ]
    # The outermost index of the dim: the batch, or what it was flattened together with.
    factors = dict.fromkeys(dim[0] for dim in batches if dim)
    if len(factors) != 1 or not all(batches):
        return None
    (factor,) = factors
    strategy = None if factor.blocked else shard_factor(rule, factor, Segmentation(()), _HALVES)
    if strategy is None or strategy.lowering != "itself":
        return None
    # No sums over the batch, and no halves that lie strewn over a dim.
    if any(p.kind != "S" or p.segments for p in strategy.results):
        return None
    placed = zip(operands, strategy.operands, strict=True)
    if any(p != (S(batch_dims[v]) if v in batch_dims else p) or p.segments for v, p in placed):
        return None
    if is_call(node, *DRAWS) and math.prod(shape_of(node)[: strategy.results[0].dim]) != 1:
        return None  # the counter's rows of a half must follow each other
    return strategy


# The rewrite.


class _Halves:
    """The two nodes of each split value of ``graph``."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._mode = fake_mode_of(graph)
        self._last_input = graph.find_nodes(op="placeholder")[-1]
        self._made: dict[Value, tuple[Node, ...]] = {}
        self._cut: dict[tuple[Node, int], tuple[Node, ...]] = {}
        self._joined: dict[Value, Node] = {}
        self._dims: dict[Value, int] = {}

    def split(self, node: Node, strategy: Strategy) -> None:
        """Insert calls of ``node`` on each half before it."""
        # Side by side, not one half of a layer behind the other: what both hold at once in this
        # order is what the schedule may take.
        halves = [self._results(node, strategy, half) for half in range(_HALVES)]
        for value, placement, *pair in zip(
            results_of(node), strategy.results, *halves, strict=True
        ):
            self._made[value], self._dims[value] = tuple(pair), placement.dim

    def join_operands(self, node: Node) -> None:
        """Make ``node`` read the concatenated halves of split operands."""
        for operand in node.all_input_nodes:
            value = value_of(operand)
            if value not in self._made:
                continue
            if value not in self._joined:
                # Counted from the end, as in normal form.
                dim = self._dims[value] - len(shape_of(operand))
                args = list(self._made[value]), dim
                self._joined[value] = insert_call(
                    node, _aten.cat.default, args, origin=_ORIGIN, name=base_name(operand)
                )
            node.replace_input_with(operand, self._joined[value])

    def _results(self, node: Node, strategy: Strategy, half: int) -> list[Node]:
        call = self._call(node, strategy, half)
        if not isinstance(node.meta["val"], (tuple, list)):
            return [call]
        return [
            insert_call(node, operator.getitem, (call, index), origin=_ORIGIN, name=call.name)
            for _, index in results_of(node)
        ]

    def _call(self, node: Node, strategy: Strategy, half: int) -> Node:
        leaves, spec = tree_flatten((node.args, node.kwargs))
        placements = iter(strategy.operands)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Node) and (placement := next(placements)).is_sharded:
                leaves[position] = self._half(leaf, placement.dim, half)
        args, kwargs = tree_unflatten(leaves, spec)
        placed = zip(results_of(node), strategy.results, strict=True)
        shapes = tuple(p.local_shape(value_shape(value), _HALVES) for value, p in placed)
        target = node.target
        if is_call(node, *DRAWS):
            # Not a part of one rank's: the rows of the whole batch that stand before it.
            first_row = half * math.prod(shapes[0][:-1])
            args = (*args, first_row) if first_row else args
        else:
            names = arguments(node)
            own = names | dict(zip(names, args, strict=False)) | kwargs
            call = LocalCall(node, own, strategy.operands, strategy.results, shapes, _HALVES)
            target, args, kwargs = local_call(call, args, kwargs)
        new = insert_call(node, target, args, kwargs, origin=_ORIGIN, name=f"{node.name}_{half}")
        made = tuple(value_shape(value) for value in results_of(new))
        if made != shapes:
            raise PassError(_ORIGIN, f"a rule is wrong: a half is {shapes}, got {made}", node)
        return new

    def _half(self, operand: Node, dim: int, half: int) -> Node:
        """Return one half of a value, which was split, or is sliced after its definition."""
        value = value_of(operand)
        if value in self._made:
            return self._made[value][half]
        if (operand, dim) not in self._cut:
            self._cut[operand, dim] = self._halves_of(operand, dim)
        return self._cut[operand, dim][half]

    def _halves_of(self, operand: Node, dim: int) -> tuple[Node, ...]:
        shape = shape_of(operand)
        size = shape[dim] // _HALVES
        if is_call(operand, _aten.expand.default):
            (source,) = operand.all_input_nodes
            missing = len(shape) - len(shape_of(source))
            if dim < missing or shape_of(source)[dim - missing] == 1:
                # Copies of the same: fewer of them serve both halves.
                fewer = [*shape[:dim], size, *shape[dim + 1 :]]
                copies = self._behind(
                    operand, operand.target, (source, fewer), f"{operand.name}_half"
                )
                return (copies,) * _HALVES
        # One operator, for its gradient is one: the two halves of the gradient, joined.
        args = operand, [size] * _HALVES, dim - len(shape)
        parts = self._behind(
            operand, _aten.split_with_sizes.default, args, f"{operand.name}_halves"
        )
        halves = [
            self._behind(parts, operator.getitem, (parts, half), f"{operand.name}_{half}")
            for half in reversed(range(_HALVES))  # each directly behind the operator
        ]
        return tuple(reversed(halves))

    def _behind(self, operand: Node, target: Any, args: tuple[Any, ...], name: str) -> Node:
        """A call behind ``operand``, in its layer: one that it is handed to stays as others are."""
        value, requires_grad = differentiable_result(self._mode, target, args, {})
        place = operand if operand.op == "call_function" else self._last_input
        with self._graph.inserting_after(place):
            return make_call(
                self._graph, target, args, like=operand, origin=_ORIGIN, name=name,
                meta={"val": value, "requires_grad": requires_grad},
            )  # fmt: skip
