"""Replaces each operator that is split by two nodes."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import Placement
from sp_compiler.ir.fx import base_name, is_call, named_arguments, shape_of
from sp_compiler.ir.op_traits import DRAWS
from sp_compiler.ir.rewriting import differentiable_result, fake_mode_of, insert_call, make_call
from sp_compiler.passes.half_batches.choice import HALVES
from sp_compiler.passes.half_batches.rows import Rows, Split, State
from sp_compiler.passes.sharding.dim_roles import Value, results_of, value_of, value_shape
from sp_compiler.rules.registry import LocalCall
from sp_compiler.rules.table import local_call

_ORIGIN = Pass.HALF_BATCHES
_aten = torch.ops.aten


class Halves:
    """The two nodes of each split value of ``graph``."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._mode = fake_mode_of(graph)
        self._last_input = graph.find_nodes(op="placeholder")[-1]
        self._made: dict[Value, tuple[Node, ...]] = {}
        self._cut: dict[tuple[Node, int], tuple[Node, ...]] = {}
        self._joined: dict[Value, Node] = {}
        self._states: dict[Value, State] = {}

    def split(self, node: Node, split: Split) -> None:
        """Insert calls of ``node`` on each half before it."""
        # Next to each other, not one half of a layer after the other: the memory that both take at
        # once in this order is what the schedule may use.
        halves = [self._results(node, split, half) for half in range(HALVES)]
        for value, state, *pair in zip(results_of(node), split.states, *halves, strict=True):
            self._made[value], self._states[value] = tuple(pair), state

    def join_operands(self, node: Node) -> None:
        """Make ``node`` read the concatenated halves of split operands."""
        for operand in node.all_input_nodes:
            value = value_of(operand)
            if value not in self._made:
                continue
            if value not in self._joined:
                state = self._states[value]
                assert isinstance(state, Rows)
                assert state.can_be_joined
                # Counted from the end, as in normal form.
                dim = state.placement.dim - len(shape_of(operand))
                args = list(self._made[value]), dim
                self._joined[value] = insert_call(
                    node, _aten.cat.default, args, origin=_ORIGIN, name=base_name(operand)
                )
            node.replace_input_with(operand, self._joined[value])

    def _results(self, node: Node, split: Split, half: int) -> list[Node]:
        call = self._call(node, split, half)
        if not isinstance(node.meta["val"], (tuple, list)):
            return [call]
        return [
            insert_call(node, operator.getitem, (call, index), origin=_ORIGIN, name=call.name)
            for _, index in results_of(node)
        ]

    def _call(self, node: Node, split: Split, half: int) -> Node:
        strategy = split.strategy
        leaves, spec = tree_flatten((node.args, node.kwargs))
        placements = iter(strategy.operands)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Node):
                place = 0 if leaf in split.numbered else half
                leaves[position] = self._half(leaf, next(placements), place)
        args, kwargs = tree_unflatten(leaves, spec)
        placed = zip(results_of(node), strategy.results, strict=True)
        shapes = tuple(p.local_shape(value_shape(value), HALVES) for value, p in placed)
        target = node.target
        if is_call(node, *DRAWS):
            # Not as for a part of one rank: the rows of the entire batch that precede this half.
            first_row = half * math.prod(shapes[0][:-1])
            args = (*args, first_row) if first_row else args
        else:
            own = named_arguments(target, args, kwargs)
            call = LocalCall(node, own, strategy.operands, strategy.results, shapes, HALVES)
            target, args, kwargs = local_call(call, args, kwargs)
        new = insert_call(node, target, args, kwargs, origin=_ORIGIN, name=f"{node.name}_{half}")
        made = tuple(value_shape(value) for value in results_of(new))
        if made != shapes:
            raise PassError(_ORIGIN, f"a rule is wrong: a half is {shapes}, got {made}", node)
        return new

    def _half(self, operand: Node, placement: Placement, half: int) -> Node:
        """Return one half of a value: it was split, is sliced after its definition, or serves
        both."""
        value, dim = value_of(operand), placement.dim
        if value in self._made:
            return self._made[value][half]
        if not placement.is_sharded:
            return operand
        if (operand, dim) not in self._cut:
            self._cut[operand, dim] = self._halves_of(operand, dim)
        return self._cut[operand, dim][half]

    def _halves_of(self, operand: Node, dim: int) -> tuple[Node, ...]:
        shape = shape_of(operand)
        size = shape[dim] // HALVES
        if is_call(operand, _aten.expand.default):
            (source,) = operand.all_input_nodes
            missing = len(shape) - len(shape_of(source))
            if dim < missing or shape_of(source)[dim - missing] == 1:
                # Copies of the same values: fewer of them serve both halves.
                fewer = [*shape[:dim], size, *shape[dim + 1 :]]
                copies = self._behind(
                    operand, operand.target, (source, fewer), f"{operand.name}_half"
                )
                return (copies,) * HALVES
        # One operator, because then its gradient is one too: the two halves of it, joined.
        args = operand, [size] * HALVES, dim - len(shape)
        parts = self._behind(
            operand, _aten.split_with_sizes.default, args, f"{operand.name}_halves"
        )
        halves = [
            self._behind(parts, operator.getitem, (parts, half), f"{operand.name}_{half}")
            for half in reversed(range(HALVES))  # each directly after the operator
        ]
        return tuple(reversed(halves))

    def _behind(self, operand: Node, target: Any, args: tuple[Any, ...], name: str) -> Node:
        """A call right after ``operand``, in its layer, so that layers that read it stay like the
        others."""
        value, requires_grad = differentiable_result(self._mode, target, args, {})
        place = operand if operand.op == "call_function" else self._last_input
        with self._graph.inserting_after(place):
            return make_call(
                self._graph, target, args, like=operand, origin=_ORIGIN, name=name,
                meta={"val": value, "requires_grad": requires_grad},
            )  # fmt: skip
