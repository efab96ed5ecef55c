"""Rewrite operators on rows selected by a mask (``x[mask]``, ``torch.where(mask)``) to all rows.

The number of rows that a mask selects depends on data, so a graph of fixed shapes cannot represent
them. Most mixtures of experts are written this way: each expert computes the rows of its own tokens
and adds the results at their original positions::

    t, k = where(mask)                                 # mask: (T, K), with u rows
    y = index_put(y, [t], y[t] + p[t, k, None] * expert(x[t]))
    -->
    w = sum(where(mask, p, 0), 1)                      # p of the selected k, or 0
    y = where(any(mask, 1)[:, None], y + w[:, None] * expert(x), y)

Row-wise operators run on all rows, and rows that the mask does not select are dropped where the
rows are written back, or where they are summed or averaged, as by a loss. The result is the same
except for the order of sums; the experts compute more rows than necessary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from sp_compiler.base.errors import CaptureError
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.fx import arguments, shape_of
from sp_compiler.ir.op_traits import CAPTURED_RESHAPES
from sp_compiler.ir.rewriting import erase_dead
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.trace.masked_rows.put_back import SINKS, PutBack, covers
from sp_compiler.trace.masked_rows.reduced import Reductions
from sp_compiler.trace.masked_rows.rows import (
    Rows,
    RowsRefused,
    RowValues,
    is_mask,
    is_pointwise,
    union,
)

_aten = torch.ops.aten
_RESHAPED = (*CAPTURED_RESHAPES, _aten.unsqueeze.default)
_ALONG_A_DIM = (
    _aten.softmax.int, _aten._softmax.default, _aten.log_softmax.int, _aten._log_softmax.default,
    _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.chunk.default,
)  # fmt: skip
_NORMS = (_aten.layer_norm.default, _aten.rms_norm.default)
_PRODUCTS = (_aten.linear.default, _aten.matmul.default, _aten.mm.default)


def compute_all_rows(graph: Graph) -> None:
    """Rewrite an exported ``graph`` in place; new nodes get no values.

    Writing a row twice without adding is undefined in PyTorch, so for such writes the mask must
    select each row at most once. A graph without selected rows does not change.

    Raises:
        CaptureError: selected rows are used in a way that cannot be rewritten to all rows.
    """
    erase_dead(graph)  # unused values need no shape
    _Rewrite(graph).run()
    erase_dead(graph)


class _Rewrite:
    """State of one rewrite: the masks, and the values of the rows that they select."""

    def __init__(self, graph: Graph) -> None:
        self._values = RowValues(graph)
        self._put_back = PutBack(self._values, self._known_mask)
        self._reduce = Reductions(self._values)
        self._places: dict[Node, Node] = {}  # results of ``where`` and ``nonzero`` to their mask
        self._numbers: dict[Node, int] = {}
        self._masks: dict[int, Node] = {}  # the first mask of each number
        self._expanded: dict[tuple[str, Node, str], Node] = {}  # by module call, mask and shape

    def run(self) -> None:
        for node in list(self._values.graph.nodes):
            if node.op != "call_function":
                continue
            self._values.node = node
            try:
                self._visit(node)
            except RowsRefused as reason:
                raise CaptureError(
                    f"rows are selected by the values in a tensor, and {reason} ({node.target}); "
                    f"use masks and torch.where in place of boolean indexing\n{node_origin(node)}"
                ) from None

    def _visit(self, node: Node) -> None:
        target = node.target
        if target in (_aten.where.default, _aten.nonzero_numpy.default, _aten.nonzero.default):
            mask = node.args[0]
            assert isinstance(mask, Node)
            # A mask computed from selected rows selects among those rows only, which a computation
            # on all rows cannot express.
            if mask not in self._values.rows:
                self._places[node] = self._known_mask(mask)
        elif node.args and node.args[0] in self._places:
            self._visit_places(node)
        elif target is _aten.index.Tensor or target is _aten.index_select.default:
            self._gather(node)
        elif target is _aten.masked_select.default:
            self._select(node)
        elif any(operand in self._values.rows for operand in node.all_input_nodes):
            if target in SINKS:
                self._put_back(node)
            elif target is _aten._assert_tensor_metadata.default:
                self._values.graph.erase_node(node)  # its operand will be gone
            elif target is not _aten.sym_size.int and not self._reduce(node):
                self._values.rows[node] = self._computed(node)

    def _known_mask(self, mask: Node) -> Node:
        """Return the first mask with the same computation: ``y[i == e] = x[i == e]`` has two."""
        if not self._numbers:
            self._numbers = _numbered(self._values.graph)
        return self._masks.setdefault(self._numbers[mask], mask)

    def _visit_places(self, node: Node) -> None:
        """``where(mask)[axis]`` and the columns of ``nonzero(mask)``."""
        source = node.args[0]
        assert isinstance(source, Node)
        mask, target = self._places[source], node.target
        if source.target is _aten.nonzero.default and target is _aten.unbind.int:
            self._places[node] = mask
        elif target is operator.getitem:
            self._values.rows[node] = self._column(mask, node.args[1])
        elif target is _aten.select.int and node.args[1] in (1, -1):
            self._values.rows[node] = self._column(mask, node.args[2])
        elif target in _RESHAPED and len(shape_of(mask)) == 1 and len(shape_of(node)) == 1:
            self._values.rows[node] = self._column(mask, 0)
        elif target is not _aten.sym_size.int:
            raise RowsRefused("their places are not taken apart")

    def _column(self, mask: Node, axis: Any) -> Rows:
        axis %= len(shape_of(mask))
        size, device = shape_of(mask)[axis], mask.meta["val"].device
        places = self._values.call(_aten.arange.default, size, device=device)
        return Rows(mask, places, 0, (axis,), axis)

    def _gather(self, node: Node) -> None:
        bound = arguments(node)
        x, indices = bound["self"], bound.get("indices")
        if indices is None:
            indices = [*[None] * (bound["dim"] % len(shape_of(x))), bound["index"]]
        places = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        chosen = [index for _, index in places if index in self._values.rows or is_mask(index)]
        if not chosen:
            if x in self._values.rows:
                raise RowsRefused("rows are taken out of them")
            return
        if x in self._values.rows or len(chosen) != len(places):
            raise RowsRefused("rows are taken out of them")
        first = places[0][0]
        if any(len(shape_of(index)) != 1 for index in chosen if index in self._values.rows):
            raise RowsRefused("their places are a table")
        if any(map(is_mask, chosen)):
            if len(places) != 1 or chosen[0] in self._values.rows:
                raise RowsRefused("a mask is one of several places")
            mask = self._known_mask(chosen[0])
            axes = tuple(range(len(shape_of(mask))))
            self._values.rows[node] = self._entered(Rows(mask, x, first, axes), x)
            return
        if [dim for dim, _ in places] != list(range(first, first + len(places))):
            raise RowsRefused("they are indexed in dims that are not adjacent")
        rows = self._taken(x, first, [self._values.rows[index] for index in chosen])
        self._values.rows[node] = self._entered(rows, node)

    def _select(self, node: Node) -> None:
        """``masked_select(x, mask)``: the rows are single elements."""
        x, mask = node.args
        assert isinstance(x, Node)
        assert isinstance(mask, Node)
        if x in self._values.rows or mask in self._values.rows:
            raise RowsRefused("rows are taken out of them")
        mask, shape = self._known_mask(mask), torch.broadcast_shapes(shape_of(x), shape_of(mask))
        # A separate one for each call of a module, for the reason given in RowValues.hit.
        key = str(node.meta.get("nn_module_stack")), mask, str(shape)
        if key not in self._expanded:
            self._expanded[key] = self._expand(mask, shape)
        mask = self._expanded[key]
        rows = Rows(mask, self._expand(x, shape), 0, tuple(range(len(shape))))
        self._values.rows[node] = self._entered(rows, node)

    def _expand(self, x: Node, shape: tuple[Any, ...]) -> Node:
        if same_shape(shape_of(x), shape):
            return x
        expanded = self._values.call(_aten.expand.default, x, list(shape))
        expanded.meta["val"] = x.meta["val"].expand(shape)
        return expanded

    def _entered(self, rows: Rows, node: Node) -> Rows:
        """Return ``rows`` with zeros where the mask selects none: those may not be finite."""
        # Their gradient is zero, but the gradient of a parameter would contain zero times NaN.
        if not node.meta["val"].is_floating_point():
            return rows
        right = len(shape_of(self._values.node)) - rows.dim - 1
        zeroed = self._values.zeroed(rows.node, rows.mask, rows.axes, right)
        return replace(rows, node=zeroed)

    def _taken(self, x: Node, first: int, places: Sequence[Rows]) -> Rows:
        """``x[..., i, j]``: ``x`` itself if the indices are those of the mask."""
        mask = places[0].mask
        if any(each.mask is not mask or len(shape_of(x)) <= first for each in places):
            raise RowsRefused("they are mixed with those of another mask")
        if covers(x, first, places):
            columns = [each.column for each in places]
            order = sorted(range(len(places)), key=lambda position: columns[position] or 0)
            if order != list(range(len(places))):
                dims = list(range(len(shape_of(x))))
                dims[first : first + len(places)] = [first + position for position in order]
                x = self._values.call(_aten.permute.default, x, dims)
            return Rows(mask, x, first, places[0].axes if len(places) == 1 else union(places))
        axes = union(places)
        index = [None] * first + [self._values.widened(each, axes, 0) for each in places]
        # Indices of rows that are not selected may be out of range.
        hit = self._values.hit(mask, axes, 0)
        index = [i and self._values.call(_aten.where.ScalarOther, hit, i, 0) for i in index]
        return Rows(mask, self._values.call(_aten.index.Tensor, x, index), first, axes)

    def _computed(self, node: Node) -> Rows:
        target, bound = node.target, {}
        if isinstance(target, OpOverload):
            bound = arguments(node)
        x = node.args[0] if node.args else None
        if target is operator.getitem and x in self._values.rows:
            rows = self._values.rows[x]
            return replace(rows, node=self._values.call(target, rows.node, node.args[1]))
        if is_pointwise(node):
            return self._values.pointwise(node, self._values.rows.__getitem__)
        others = [other for other in node.all_input_nodes if other is not x]
        if target is _aten.gather.default and {x, *others} <= self._values.rows.keys():
            return self._looked_up(node, bound)
        if x not in self._values.rows or any(other in self._values.rows for other in others):
            raise RowsRefused("they are combined with each other")
        return self._row_by_row(node, x, bound)

    def _row_by_row(self, node: Node, x: Node, bound: Mapping[str, Any]) -> Rows:
        """Return the rows of ``node``, each of which is computed from one row of ``x``."""
        target, rows, rank = node.target, self._values.rows[x], len(shape_of(x))
        right = rank - rows.dim - 1  # dims after the dim of rows
        if target in _PRODUCTS and right and (target is _aten.linear.default or rank == 2):
            product = target if target is _aten.linear.default else _aten.matmul.default
            every = self._values.call(product, rows.node, *node.args[1:], **node.kwargs)
            return replace(rows, node=every)
        if target in _RESHAPED or target is _aten.expand.default:
            return self._reshaped(node, rows)
        if target in _NORMS and len(bound["normalized_shape"]) <= right:
            every = self._values.call(target, rows.node, *node.args[1:], **node.kwargs)
            return replace(rows, node=every)
        if target in _ALONG_A_DIM:
            dim = bound["dim"] % rank
            if dim > rows.dim:
                given = {**bound, "self": rows.node, "dim": dim - rank}
                return replace(rows, node=self._values.call(target, *given.values()))
        raise RowsRefused("they are not computed row by row")

    def _looked_up(self, node: Node, bound: Mapping[str, Any]) -> Rows:
        """``gather(x, dim, index)`` where both are rows, such as the score of each row's class."""
        operands = [self._values.rows[bound[name]] for name in ("self", "index")]
        (x, index), rank = operands, len(shape_of(node))
        dim, right = bound["dim"] % rank, rank - x.dim - 1
        if x.mask is not index.mask or x.dim != index.dim or dim <= x.dim:
            raise RowsRefused("they are combined with each other")
        axes = union(operands)
        sizes = [shape_of(x.mask)[axis] for axis in axes]
        wide = []
        for rows, name in zip(operands, ("self", "index"), strict=True):
            given = shape_of(bound[name])
            every = self._values.widened(rows, axes, right, bound[name])
            shape = [*given[: x.dim], *sizes, *given[x.dim + 1 :]]
            wide.append(self._values.call(_aten.expand.default, every, shape))
        # Indices of rows that are not selected may be out of range.
        hit = self._values.hit(x.mask, axes, right)
        places = self._values.call(_aten.where.ScalarOther, hit, wide[1], 0)
        every = self._values.call(_aten.gather.default, wide[0], dim - rank, places)
        return Rows(x.mask, every, x.dim, axes)

    def _reshaped(self, node: Node, rows: Rows) -> Rows:
        """Return a view that keeps the rows as a separate dim."""
        old, new = shape_of(node.args[0]), shape_of(node)
        dims = [dim for dim, size in enumerate(new) if free_unbacked_symbols(size)]
        if len(dims) != 1 or not same_shape([new[dims[0]]], [old[rows.dim]]):
            raise RowsRefused("their dim is split or merged")
        dim, sizes = dims[0], [shape_of(rows.mask)[axis] for axis in rows.axes]
        shape = [*new[:dim], *sizes, *new[dim + 1 :]]
        plain = [size for size in new if isinstance(size, int)]
        if node.target is _aten.expand.default:
            value = self._values.call(_aten.expand.default, rows.node, shape)
        elif math.prod(old[: rows.dim]) == math.prod(new[:dim]):
            value = self._values.call(_aten.reshape.default, rows.node, shape)
        else:
            raise RowsRefused("their dim is split or merged")
        ones = len(old) == 1 and all(size == 1 for size in plain)
        expanded = rows.flat is not None and node.target is _aten.expand.default
        flat = rows if ones else rows.flat if expanded else None
        return replace(rows, node=value, dim=dim, column=None, flat=flat)


def _numbered(graph: Graph) -> dict[Node, int]:
    """Number the values; equal computations get the same number."""
    # Not by node: experts written as a loop compute ``index == expert`` once for each of its uses.
    numbers: dict[Node, int] = {}
    known: dict[str, int] = {}
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        key = node.name
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded not in tags:
            operands = map_arg((node.args, node.kwargs), lambda x: ("value", numbers[x]))
            key = f"{node.target}{operands}"
        numbers[node] = known.setdefault(key, len(known))
    return numbers
