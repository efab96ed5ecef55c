"""Values of the rows that a mask selects, and their counterparts for all positions of the mask."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import shape_of
from sp_compiler.ir.rewriting import make_call

_aten = torch.ops.aten
# Pointwise operators that are finite wherever their operands are, and so are their derivatives. For
# other operators, the rows that are not selected may hit a pole that the selected ones avoid, and
# their gradient would be 0 times infinity.
_FINITE = frozenset(
    {
        "_to_copy", "abs", "add", "alias", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "bitwise_and", "bitwise_not", "bitwise_or", "celu",
        "clamp", "clamp_max", "clamp_min", "clone", "cos", "detach", "dropout", "elu", "eq", "erf",
        "floor_divide", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "huber_loss",
        "l1_loss", "le", "leaky_relu", "lerp", "log_sigmoid_forward", "logical_and", "logical_not",
        "logical_or", "lt", "maximum", "minimum", "mish", "mse_loss", "mul", "ne", "neg", "prelu",
        "relu", "relu6", "rsub", "selu", "sigmoid", "sign", "silu", "sin", "smooth_l1_loss",
        "softplus", "square", "sub", "tanh", "threshold", "where",
    }
)  # fmt: skip
# Operators whose kernels check the range of their operands; 0 is in range.
_OF_A_RANGE = ("binary_cross_entropy",)


@dataclass(frozen=True)
class Rows:
    """A value of the selected rows, and its counterpart for all positions of the mask.

    Attributes:
        mask: the mask, with dims ``(M0, M1, ...)``.
        node: the value for all positions, with the dims of ``axes`` in place of the dim of rows.
        dim: the dim of rows.
        axes: dims of the mask that the value depends on, in order.
        column: if the value is the index of each row along one axis, that axis.
        flat: the value, with rows as its only dim, from which this one was expanded.
    """

    mask: Node
    node: Node
    dim: int
    axes: tuple[int, ...]
    column: int | None = None
    flat: Rows | None = None


class RowsRefused(Exception):
    """The reason why a node cannot be computed for all rows."""


class RowValues:
    """The values of selected rows in a graph, and calls that compute with all rows.

    Attributes:
        graph: the graph that is rewritten.
        node: new calls are inserted before it, and get its module and source line.
        rows: the counterpart for all positions of each node that is a value of selected rows.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.node: Node
        self.rows: dict[Node, Rows] = {}
        self._hits: dict[tuple[object, ...], Node] = {}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert a call without a value."""
        with self.graph.inserting_before(self.node):
            # Shapes are computed at the end, for the entire graph: until all selected rows are
            # gone, some are unbacked symbols.
            meta = {"val": None}
            return make_call(
                self.graph, target, args, kwargs, like=self.node, origin=Pass.EXPORT, meta=meta
            )

    def pointwise(self, node: Node, rows_of: Callable[[Node], Rows]) -> Rows:
        """Apply ``node`` to all rows; ``rows_of`` returns those of an operand."""
        operands = {x: rows_of(x) for x in node.all_input_nodes if x in self.rows}
        if not _is_finite(node, operands):
            raise RowsRefused("the other rows may have no finite value here")
        # The size may be the number of selected rows, as the divisor of a mean: all rows are more.
        if any(not isinstance(x.meta["val"], Tensor) for x in node.all_input_nodes):
            raise RowsRefused("a size is used that may be their number")
        mask = next(iter(operands.values())).mask
        right = {len(shape_of(x)) - rows.dim - 1 for x, rows in operands.items()}
        ranks = [len(shape_of(x)) for x in node.all_input_nodes if x not in operands]
        if any(rows.mask is not mask for rows in operands.values()) or len(right) != 1:
            raise RowsRefused("they are mixed with those of another mask")
        # An operand with a dim where the rows are would be broadcast along other positions.
        if max(ranks, default=0) > min(right):
            raise RowsRefused("they are combined with values that are not rows")
        axes = union(operands.values())
        wide = {x: self.widened(rows, axes, min(right), x) for x, rows in operands.items()}
        if _name(node) in _OF_A_RANGE:
            wide = {x: self.zeroed(each, mask, axes, min(right)) for x, each in wide.items()}
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: wide.get(x, x))
        dim = len(shape_of(node)) - min(right) - 1
        every = self.call(node.target, *args, **kwargs)
        # Its other branch may be minus infinity in all of a row that is not selected.
        if _name(node) == "where" and node.meta["val"].is_floating_point():
            every = self.zeroed(every, mask, axes, min(right))
        return Rows(mask, every, dim, axes)

    def zeroed(self, every: Node, mask: Node, axes: tuple[int, ...], right: int) -> Node:
        """Return ``every`` with zeros where the mask selects no row."""
        return self.call(_aten.where.ScalarOther, self.hit(mask, axes, right), every, 0)

    def widened(
        self, rows: Rows, axes: tuple[int, ...], right: int, source: Node | None = None
    ) -> Node:
        """Return the value with a dim for each of ``axes``: of size 1 if independent of it."""
        if rows.axes == axes:
            return rows.node
        given = shape_of(source) if source is not None else [None] * (right + 1)
        sizes = [shape_of(rows.mask)[axis] if axis in rows.axes else 1 for axis in axes]
        shape = [*given[: rows.dim], *sizes, *given[rows.dim + 1 :]]
        return self.call(_aten.reshape.default, rows.node, shape)

    def hit(self, mask: Node, axes: tuple[int, ...], right: int) -> Node:
        """Return the positions that the mask selects, with the dims of ``axes``, then ``right``
        dims of size 1."""
        # Each call of a module makes its own. If layers shared the one of the first, it would be an
        # additional input of all but the first, and equal layers would compile as different blocks.
        module_call = str(self.node.meta.get("nn_module_stack"))
        key = module_call, mask, axes, right
        if key in self._hits:
            return self._hits[key]
        if right:
            sizes = [shape_of(mask)[axis] for axis in axes]
            hit = self.hit(mask, axes, 0)
            hit = self.call(_aten.reshape.default, hit, [*sizes, *[1] * right])
        else:
            others = [axis for axis in range(len(shape_of(mask))) if axis not in axes]
            is_bool = mask.meta["val"].dtype is torch.bool
            hit = mask if is_bool else self.call(_aten.ne.Scalar, mask, 0)
            if others:
                hit = self.call(_aten.any.dims, hit, others)
        self._hits[key] = hit
        return hit

    def zero_filled(self, value: Node, right: int) -> Node:
        """Return ``value`` for all rows, with zeros where the mask does not select them."""
        rows = self.rows[value]
        every = tuple(range(len(shape_of(rows.mask))))
        return self.zeroed(self.widened(rows, every, right, value), rows.mask, every, right)

    @staticmethod
    def substitute(node: Node, result: Node) -> None:
        """Replace ``node``, which does not depend on the number of rows, by ``result``."""
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)


def union(rows: Iterable[Rows]) -> tuple[int, ...]:
    """Return the dims of the mask that any of ``rows`` depends on, in order."""
    return tuple(sorted({axis for each in rows for axis in each.axes}))


def is_mask(index: Node) -> bool:
    """Return whether ``index`` is a mask, which selects rows; other indices are positions."""
    return isinstance(index, Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)


def is_pointwise(node: Node) -> bool:
    """Return whether each row of the result is computed from the same row of the operands."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or _name(node) in _FINITE


def _is_finite(node: Node, operands: Container[Node]) -> bool:
    """Return whether a pointwise operator and its derivative are finite for finite ``operands``."""
    # The divisor must not be rows: those that are not selected may be zero.
    if _name(node) == "div":
        return not any(x in operands for x in node.all_input_nodes if x is not node.args[0])
    # Non-negative integer exponents: others have a pole, or a derivative with one, at zero.
    if _name(node) == "pow":
        return isinstance(node.args[1], int) and node.args[1] >= 0
    return _name(node) in _FINITE


def _name(node: Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]
