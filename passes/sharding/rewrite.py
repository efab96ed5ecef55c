"""Rewrite one region to one rank's shapes, with conversions wherever placements change.

before: y = linear(norm(x), w)          # x: (b, s, h)
after:  n = norm(x)                     # x: (b*s/t, h)          S(0)
        g = convert(n, "S(0)", "R")     # (b*s, h)               all-gather, contiguous
        y = linear(reshape(g), w)       # (b, s, 4h/t)           S(2), w: S(0)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.placement import I, Placement, R, S
from sp_compiler.ir.fx import arguments, module_of, named_arguments
from sp_compiler.ir.program import Region
from sp_compiler.ir.rewriting import erase_dead, make_call
from sp_compiler.ir.symbolic import SYMBOLIC, is_open
from sp_compiler.ops.convert import CONVERT
from sp_compiler.ops.rows import CUT_ROWS, PAD_ROWS
from sp_compiler.passes.sharding.dim_roles import Value, results_of, value_of, value_shape
from sp_compiler.passes.sharding.vocabulary import lower_over_vocabulary
from sp_compiler.rules.registry import LocalCall
from sp_compiler.rules.strategies import Strategy
from sp_compiler.rules.table import is_pointwise, local_call

aten = torch.ops.aten


def local_placement(placement: Placement) -> Placement:
    """Return the placement of a rank's tensor: rows of tokens are sharded on dim 0."""
    return S(0) if placement.kind == "T" else placement


class RegionLowering:
    """Lowers one region; see the module's docstring.

    Args:
        region: unsharded, not modified.
        active: values that take part in sharding.
        chosen: the strategy of every active operator.
        inputs: placement of each placeholder.
        outputs: required placement of each output.
        world_size: number of ranks.
    """

    def __init__(
        self,
        region: Region,
        active: Container[Value],
        chosen: dict[Node, Strategy],
        inputs: list[Placement],
        outputs: list[Placement],
        world_size: int,
    ) -> None:
        self.region = region
        self.active = active
        self.chosen = chosen
        self.inputs = inputs
        self.outputs = outputs
        self.world_size = world_size
        self.graph = Graph()
        # The nodes that hold each value, by placement, and the placement it was produced in.
        self.made: dict[Value, dict[Placement, Node]] = {}
        self.produced: dict[Value, Placement] = {}

    def run(self) -> Region:
        """Return the sharded region."""
        for node, placement in zip(self.region.placeholders, self.inputs, strict=True):
            self._placeholder(node, placement)
        for node in self.region.module.graph.nodes:
            if node.op == "call_function":
                self._lower(node)
        results = [
            self.get(value_of(node), placement)
            for node, placement in zip(self.region.outputs, self.outputs, strict=True)
        ]
        self.graph.output(results)
        erase_dead(self.graph)
        module = module_of(self.graph, self.region.module, self.region.name)
        return Region(
            name=self.region.name,
            module=module,
            input_kinds=self.region.input_kinds,
            input_names=self.region.input_names,
            input_placements=tuple(map(local_placement, self.inputs)),
            output_placements=tuple(map(local_placement, self.outputs)),
            input_shapes=tuple(map(_full_shape, self.region.placeholders)),
            output_shapes=tuple(map(_full_shape, self.region.outputs)),
        )

    def get(self, value: Value, placement: Placement) -> Node:
        """Return the node that holds ``value`` in this placement, converted at most once."""
        made = self.made[value]
        # Without a gradient R and I are the same: no conversion, whichever a strategy names.
        if value not in self.active and placement.is_replicated:
            placement = self.produced[value]
        if placement not in made:
            made[placement] = self._convert(value, self.produced[value], placement)
        return made[placement]

    # Operators.

    def _placeholder(self, node: Node, placement: Placement) -> None:
        new = self.graph.placeholder(node.name)
        _copy_meta(node, new)
        if isinstance(node.meta["val"], SYMBOLIC):  # an open size, not a value to convert
            new.meta["placement"] = placement
            return
        fake = node.meta["val"]
        if placement.is_sharded:
            with fake.fake_mode, torch.no_grad():
                fake = fake.new_empty(_part_of((node, 0), placement, self.world_size))
        new.meta["val"] = fake
        self._made((node, 0), placement, new)

    def _lower(self, node: Node) -> None:
        if node.target is operator.getitem:  # made with its operator, in _results()
            return
        if node in self.chosen:
            self._lower_active(node, self.chosen[node])
            return
        # Not active: every rank runs it on replicated values.
        new = self.graph.node_copy(node, lambda operand: self.get(value_of(operand), R))
        _copy_meta(node, new)
        number = len(results_of(node))
        self._results(node, new, Strategy((), (R,) * number, whole=tuple(range(number))))

    def _lower_active(self, node: Node, strategy: Strategy) -> None:
        """Call ``node`` on operands in the placements of ``strategy``, with local sizes."""
        leaves, spec = tree_flatten((node.args, node.kwargs))
        # One per occurrence of an operand, in the order of the leaves.
        placements = iter(strategy.operands)
        rows = next((p.dim for p in strategy.results if p.kind == "T"), 0)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Node):
                placement = next(placements)
                operand = self.get(value_of(leaf), placement)
                if rows and placement.kind != "T" and is_pointwise(node):
                    operand = self._without_rows(node, operand, len(value_shape((node, 0))) - rows)
                leaves[position] = operand
        args, kwargs = tree_unflatten(leaves, spec)
        if strategy.lowering == "vocabulary":
            new = self._vocabulary(node, args, kwargs)
        elif strategy.lowering == "sum":
            new = self._mean(node, args)
        else:
            call = LocalCall(
                node,
                named_arguments(node.target, args, kwargs),
                strategy.operands,
                strategy.results,
                tuple(
                    _part_of(value, placement, self.world_size)
                    for value, placement in zip(results_of(node), strategy.results, strict=True)
                ),
                self.world_size,
            )
            # The rule knows which of the arguments are sizes of a part.
            target, args, kwargs = local_call(call, args, kwargs)
            new = self._emit(target, args, kwargs, node, name=node.name)
        self._results(node, new, strategy)

    def _without_rows(self, node: Node, operand: Node, rank: int) -> Node:
        """Drop the leading size-1 dims of a broadcast operand where the rows are flattened."""
        # Otherwise (1, 1, h) with rows (n, h) would broadcast to three dims.
        shape = operand.meta["val"].shape
        if len(shape) <= rank:
            return operand
        args = (operand, list(shape[len(shape) - rank :]))
        return self._emit(aten.reshape.default, args, {}, node)

    def _vocabulary(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
            return self._emit(target, args, kwargs, node)

        values = named_arguments(node.target, args, kwargs)
        return lower_over_vocabulary(node, values, self.world_size, emit)

    def _mean(self, node: Node, args: tuple[Any, ...]) -> Node:
        """Lower a mean over a sharded dim: the sum of one rank's part divided by the global
        count."""
        # The means of the ranks' parts would not add up to the mean of all.
        values = arguments(node)
        shape = value_shape(value_of(values["self"]))
        dims = values.get("dim") or list(range(len(shape)))
        dtype = {"dtype": values["dtype"]} if values["dtype"] is not None else {}
        sum_args = (args[0], dims, values.get("keepdim", False))
        total = self._emit(aten.sum.dim_IntList, sum_args, dtype, node)
        count = math.prod(shape[dim] for dim in dims)
        return self._emit(aten.div.Tensor, (total, count), {}, node)

    # Conversions.

    def _convert(self, value: Value, source: Placement, target: Placement) -> Node:
        # No operator converts one sharding to another directly. It goes through the full value,
        # which others may need too; ``get`` makes that once.
        if source.is_sharded and target.is_sharded:
            full = self.get(value, I if value in self.active else R)
            return self._convert_node(full, value, I, target)
        return self._convert_node(self.made[value][source], value, source, target)

    def _convert_node(self, x: Node, value: Value, source: Placement, target: Placement) -> Node:
        """Emit the conversion, with reshapes to and from rows if either side is a T."""
        like, shape = value[0], value_shape(value)
        _part_of(value, target, self.world_size)  # to raise its error and record divisibility
        if target.kind == "T":
            x = self._to_rows(x, shape, target.dim, like)
        # In the graph's notation: rows of tokens are S(0) of the flattened tensor.
        text = (str(local_placement(source)), str(local_placement(target)))
        new = self._emit(CONVERT.overload, (x, *text, self.world_size), {}, like)
        report_of(Pass.SHARD).rewrote(kind=" -> ".join(text))
        new.meta["placement"] = local_placement(target)
        return self._from_rows(new, shape, source.dim, like) if source.kind == "T" else new

    def _to_rows(self, x: Node, shape: tuple[int, ...], num_dims: int, like: Node) -> Node:
        """Flatten the token dims; pad with copies of the last row, so that no row leads to NaN.

        The padding gets no gradient: it is cut off again before any sum over tokens.
        """
        rows, rest = math.prod(shape[:num_dims]), shape[num_dims:]
        if num_dims != 1:
            x = self._emit(aten.reshape.default, (x, [rows, *rest]), {}, like)
        if not _may_need_padding(rows, self.world_size):
            return x
        return self._emit(PAD_ROWS.overload, (x, self.world_size), {}, like)

    def _from_rows(self, x: Node, shape: tuple[int, ...], num_dims: int, like: Node) -> Node:
        rows = math.prod(shape[:num_dims])
        if _may_need_padding(rows, self.world_size):
            x = self._emit(CUT_ROWS.overload, (x, rows, self.world_size), {}, like)
        if num_dims != 1:
            x = self._emit(aten.reshape.default, (x, list(shape)), {}, like)
        return x

    def _emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        like: Node,
        name: str | None = None,
    ) -> Node:
        return make_call(self.graph, target, args, kwargs, like=like, origin=Pass.SHARD, name=name)

    def _results(self, node: Node, new: Node, strategy: Strategy) -> None:
        values = results_of(node)
        if not isinstance(node.meta["val"], (tuple, list)):
            self._made(values[0], strategy.results[0], new)
            return
        for value, placement in zip(values, strategy.results, strict=True):
            item = self._emit(operator.getitem, (new, value[1]), {}, node)
            if value[1] in strategy.whole:
                # Without gradients, as here, bag lookups return these in other shapes.
                item.meta["val"] = node.meta["val"][value[1]]
            self._made(value, placement, item)

    def _made(self, value: Value, placement: Placement, new: Node) -> None:
        """Record that ``new`` holds ``value``."""
        # The first defence against a wrong rule; the check of placements is the second.
        shape, expected = value_shape(value), _part_of(value, placement, self.world_size)
        got = tuple(new.meta["val"].shape)
        if got != tuple(expected):
            raise PassError(
                Pass.SHARD,
                f"a rule is wrong: {placement} of {shape} must be {expected}, is {got}",
                value[0],
            )
        new.meta["placement"] = local_placement(placement)
        self.made[value] = {placement: new}
        self.produced[value] = placement


def _part_of(value: Value, placement: Placement, world_size: int) -> tuple[int, ...]:
    """Return the shape of one rank's part; record that an open size is divisible if the example's
    is."""
    shape = value_shape(value)
    if not placement.is_sharded:
        return shape
    # Segments made for another dim, or for another size of this dim: the rule is wrong.
    if placement.segments and sum(placement.segments) != shape[placement.dim]:
        raise PassError(Pass.SHARD, f"{placement} does not cut {shape}", value[0])
    return placement.local_shape(shape, world_size)


def _full_shape(node: Node) -> tuple[int, ...] | None:
    """Return the shape of an unsharded value, with open sizes; ``None`` if it is not a tensor."""
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _may_need_padding(rows: int, world_size: int) -> bool:
    """Return whether rows may be padded; always true for an open number, which may not be divisible
    in some call."""
    return is_open(rows) or bool(rows % world_size)


def _copy_meta(node: Node, new: Node) -> None:
    new.meta = {**node.meta, "source": node.meta.get("source", node.name)}
