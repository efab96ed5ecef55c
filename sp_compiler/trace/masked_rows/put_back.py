"""Operators that write selected rows back: writes and sums at their positions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, shape_of
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.trace.masked_rows.rows import Rows, RowsRefused, RowValues, is_mask, union

_aten = torch.ops.aten
_COMPARISONS = (_aten.eq.Scalar, _aten.eq.Tensor, _aten.one_hot.default)
_PARTS = (
    operator.getitem, _aten.select.int, _aten.slice.Tensor, _aten.unbind.int, _aten.alias.default,
    _aten.permute.default, _aten.transpose.int, _aten.unsqueeze.default, _aten.clone.default,
    _aten.squeeze.dim, _aten.squeeze.default,
)  # fmt: skip


class PutBack:
    """Rewrites the operators that write rows back.

    Args:
        values: the values of rows in the graph.
        known_mask: returns the first mask with the same computation.
    """

    def __init__(self, values: RowValues, known_mask: Callable[[Node], Node]) -> None:
        self._values = values
        self._known_mask = known_mask

    def __call__(self, node: Node) -> None:
        """Replace ``node``, one of :data:`SINKS`, by the same operation on all rows."""
        value, base, indices, accumulate = SINKS[node.target](arguments(node))
        if not shape_of(value) and not accumulate and base not in self._values.rows:
            self._write_number(node, base, indices, value)
            return
        # For rows written into rows, it would have to be known which are selected by both masks.
        if base in self._values.rows or value not in self._values.rows:
            raise RowsRefused("they are written into each other")
        given = arguments(node)
        # Tokens must be in dim 0, and rewritten sums have no place for a factor.
        if given.get("dim", 0) != 0 or given.get("alpha", 1) != 1:
            raise RowsRefused("they go back to other places")
        places = [self._values.rows[index] for index in indices if index in self._values.rows]
        if any(not same_shape(shape_of(x)[1:], shape_of(base)[1:]) for x in indices if is_table(x)):
            raise RowsRefused("they go back to other places")
        rows, right = self._values.rows[value], len(shape_of(value)) - 1
        mask = rows.mask
        # ``y[mask] = ...`` uses all axes of the mask, ``index_add(0, t, ...)`` those of the
        # indices.
        if len(indices) == 1 and is_mask(indices[0]) and not places:
            same = self._known_mask(indices[0]) is mask
            axes = tuple(range(len(shape_of(mask))))
        else:
            places = [each.flat or each for each in places]
            same = len(places) == len(indices) and all(each.mask is mask for each in places)
            same = same and not any(
                is_table(x) and self._values.rows[x].flat is None for x in indices
            )
            axes = union(places)
            if same and accumulate and not covers(base, 0, places):
                self._add_anywhere(node, base, places, value)
                return
            same = same and covers(base, 0, places)
            same = same and [each.column for each in places] == list(axes)
        if not same or rows.dim != 0 or right != len(shape_of(base)) - len(axes):
            raise RowsRefused("they go back to other places")
        if not accumulate and len(axes) < len(shape_of(mask)) and not _chooses_once(mask, axes):
            raise RowsRefused("one row may be written several times, and only one write stays")
        if accumulate:
            result = self._values.call(_aten.add.Tensor, base, self._summed(value, axes, right))
        else:
            hit = self._values.hit(mask, axes, right)
            picked = self._picked(value, axes, right)
            result = self._values.call(_aten.where.self, hit, picked, base)
        self._values.substitute(node, result)

    def _write_number(self, node: Node, base: Node, indices: Sequence[Node], number: Node) -> None:
        """``y[torch.where(mask)] = number``: it does not matter which row writes it."""
        places = [self._values.rows[index] for index in indices if index in self._values.rows]
        axes = list(range(len(shape_of(places[0].mask)))) if places else []
        same = all(each.mask is places[0].mask for each in places)
        same = same and len(places) == len(indices) and [each.column for each in places] == axes
        if not same or number in self._values.rows or not covers(base, 0, places):
            raise RowsRefused("a number is written at other places")
        right = len(shape_of(base)) - len(axes)
        hit = self._values.hit(places[0].mask, tuple(axes), right)
        self._values.substitute(node, self._values.call(_aten.where.self, hit, number, base))

    def _add_anywhere(self, node: Node, base: Node, places: Sequence[Rows], value: Node) -> None:
        """Add all rows at their positions, with zeros where the mask selects none."""
        rows, rest = self._values.rows[value], list(shape_of(base))[1:]
        if len(places) != 1 or rows.dim != 0 or not same_shape(shape_of(value)[1:], rest):
            raise RowsRefused("they go back to other places")
        every = tuple(range(len(shape_of(rows.mask))))
        sizes = [shape_of(rows.mask)[axis] for axis in every]
        count = math.prod(sizes)
        index = self._values.widened(places[0], every, 0)
        index = self._values.call(_aten.expand.default, index, sizes)
        # Indices of rows that are not selected may be out of range.
        hit = self._values.hit(rows.mask, every, 0)
        index = self._values.call(_aten.where.ScalarOther, hit, index, 0)
        index = self._values.call(_aten.reshape.default, index, [count])
        kept = self._values.call(
            _aten.reshape.default, self._values.zero_filled(value, len(rest)), [count, *rest]
        )
        self._values.substitute(
            node, self._values.call(_aten.index_add.default, base, 0, index, kept)
        )

    def _summed(self, value: Node, axes: tuple[int, ...], right: int) -> Node:
        """Return the sum of the selected rows at each position of ``axes``.

        ``value`` may not depend on all of ``axes``.
        """
        known = self._values.rows
        rows = known[value]
        others = [axis for axis in range(len(shape_of(rows.mask))) if axis not in axes]
        if not others:
            return self._values.zero_filled(value, right)
        if value.target is _aten.mul.Tensor:
            # A factor that is constant over the sum is applied after it, since it is the wider one.
            for inner, outer in (value.args, value.args[::-1]):
                factor = known.get(outer)
                same_rank = all(len(shape_of(x)) == right + 1 for x in (inner, outer) if x in known)
                if inner in known and factor is not None and factor.axes == axes and same_rank:
                    total = self._summed(inner, axes, right)
                    product = self._values.call(_aten.mul.Tensor, total, factor.node)
                    hit = self._values.hit(rows.mask, axes, right)
                    return self._values.call(_aten.where.ScalarOther, hit, product, 0)
        return self._sum(value, others, right)

    def _picked(self, value: Node, axes: tuple[int, ...], right: int) -> Node:
        """Return the selected row at each position of ``axes``; arbitrary if none is selected."""
        rows = self._values.rows[value]
        if rows.axes == axes:
            return rows.node
        others = [axis for axis in range(len(shape_of(rows.mask))) if axis not in axes]
        if set(rows.axes) < set(axes):
            return self._values.widened(rows, axes, right, value)
        operands = [x for x in value.all_input_nodes if x in self._values.rows]
        if torch.Tag.pointwise in getattr(value.target, "tags", ()) and all(
            self._values.rows[x].dim == 0 for x in operands
        ):
            # Computed row by row: picking the operands gives the same result with less work.

            def picked(x: Node) -> Rows:
                inner = len(shape_of(x)) - 1
                return replace(self._values.rows[x], node=self._picked(x, axes, inner), axes=axes)

            return self._values.pointwise(value, picked).node
        return self._sum(value, others, right)

    def _sum(self, value: Node, axes: Sequence[int], right: int) -> Node:
        # PyTorch sums integers in int64; the model's graph has their own dtype.
        if not value.meta["val"].is_floating_point():
            raise RowsRefused("a sum of them would have another type")
        return self._values.call(
            _aten.sum.dim_IntList, self._values.zero_filled(value, right), axes
        )


def covers(x: Node, first: int, places: Sequence[Rows]) -> bool:
    """Return whether ``x[i, j]`` equals ``x`` at every position of the mask."""
    columns = [each.column for each in places]
    # A computed index, or one axis twice, as in a diagonal.
    if None in columns or len(set(columns)) != len(columns):
        return False
    sizes = [shape_of(places[0].mask)[axis] for axis in columns if axis is not None]
    return same_shape(shape_of(x)[first : first + len(sizes)], sizes)


def _chooses_once(mask: Node, axes: Sequence[int]) -> bool:
    """Return whether a mask of tokens and slots is ``topk(...).indices == expert``."""
    # The experts of one token are distinct, so that it has at most one slot for each.
    compared = _viewed(mask)
    if len(shape_of(mask)) != 2 or compared.target not in _COMPARISONS:
        return False
    chosen, *others = compared.args
    experts = others[0] if compared.target is _aten.eq.Tensor else None
    if isinstance(experts, Node) and _viewed(experts).target is not _aten.arange.default:
        return False
    topk = _topk_of_indices(chosen) if isinstance(chosen, Node) else None
    if topk is None:
        return False
    # A slot may have many tokens. The mask may be permuted: sizes tell which dim is which.
    return not same_shape([shape_of(mask)[axis] for axis in axes], [arguments(topk)["k"]])


def _viewed(node: Node) -> Node:
    """Return the value that ``node`` is a part or a view of."""
    while node.target in _PARTS and isinstance(source := node.args[0], Node):
        node = source
    return node


def _topk_of_indices(node: Node) -> Node | None:
    """Return the ``topk`` whose indices ``node`` views; its values, unlike these, may be equal."""
    while node.target in _PARTS and isinstance(source := node.args[0], Node):
        if source.target is _aten.topk.default:
            return source if node.args[1] == 1 else None
        node = source
    return None


def is_table(index: Any) -> bool:
    """Return whether ``index`` is an index tensor with several dims."""
    return isinstance(index, Node) and not is_mask(index) and len(shape_of(index)) > 1


_Sink = Callable[[dict[str, Any]], tuple[Node, Node, Sequence[Node], bool]]
SINKS: dict[object, _Sink] = {
    _aten.index_put.default: lambda given: (
        given["values"], given["self"], given["indices"], given["accumulate"]
    ),
    _aten.index_add.default: lambda given: (
        given["source"], given["self"], [given["index"]], True
    ),
    _aten.index_copy.default: lambda given: (
        given["source"], given["self"], [given["index"]], False
    ),
    _aten.scatter_add.default: lambda given: (
        given["src"], given["self"], [given["index"]], True
    ),
}  # fmt: skip
"""Operators that put rows back, with their rows, base, indices, and whether they accumulate."""
