"""Operators that reduce selected rows: sums, means and losses over all rows of a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, reduced_dims, shape_of
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.ops.alignments import CTC_LOSS, LEFT_OUT
from sp_compiler.trace.masked_rows.rows import Rows, RowsRefused, RowValues

_aten = torch.ops.aten
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList)
_MEANS = (_aten.mean.default, _aten.mean.dim)
_OF_PAIRS = (
    _aten.mse_loss.default, _aten.l1_loss.default, _aten.smooth_l1_loss.default,
    _aten.huber_loss.default, _aten.binary_cross_entropy.default,
    _aten.binary_cross_entropy_with_logits.default,
)  # fmt: skip
_OF_CLASSES = (
    _aten.cross_entropy_loss.default, _aten.nll_loss_nd.default, _aten.nll_loss.default,
)  # fmt: skip
_NONE, _MEAN = 0, 1  # values of the argument ``reduction``


class Reductions:
    """Rewrites sums, means and losses over the rows that a mask selects::

        x[mask].mean()              -->  where(mask, x, 0).sum() / mask.sum()
        mse_loss(x[mask], y[mask])  -->  where(mask, mse_loss(x, y, "none"), 0).sum() / mask.sum()
        cross_entropy(x[mask], y[mask])
                                    -->  cross_entropy(x, where(mask, y, ignore_index))

    If no rows are selected, means are NaN and gradients zero, as in the model.

    Args:
        values: the values of rows in the graph.
    """

    def __init__(self, values: RowValues) -> None:
        self._values = values

    def __call__(self, node: Node) -> bool:
        """Replace ``node`` if it reduces the dim of rows; return whether it does."""
        target, bound = node.target, arguments(node) if _is_reduction(node) else {}
        if target is _aten.broadcast_tensors.default:
            return self._not_broadcast(node)
        if target in _OF_CLASSES:
            return self._of_classes(node, bound)
        if target is CTC_LOSS.overload:
            return self._of_alignments(node, bound)
        if target in _OF_PAIRS and bound["reduction"] != _NONE:
            self._values.substitute(node, self._pairs(node, bound))
        elif target in (*_SUMS, *_MEANS):
            x = bound["self"]
            dims = reduced_dims(node)
            if self._values.rows[x].dim not in dims:
                return self._along_others(node, dims)
            result = self._reduced(node, x, dims, mean=target in _MEANS)
            if bound.get("keepdim"):
                result = self._values.call(_aten.reshape.default, result, shape_of(node))
            self._values.substitute(node, result)
        else:
            return False
        return True

    def _not_broadcast(self, node: Node) -> bool:
        """Remove a broadcast of operands of equal shape, with which torch's losses begin."""
        operands: list[Node] = node.args[0]
        first, *others = (shape_of(each) for each in operands)
        if not all(same_shape(first, shape) for shape in others):
            return False
        for user in list(node.users):
            user.replace_all_uses_with(operands[user.args[1]])
        return True

    def _along_others(self, node: Node, dims: Sequence[int]) -> bool:
        """Rewrite a sum or a mean within each row, which keeps the rows."""
        x = node.all_input_nodes[0]
        rows, rank = self._values.rows[x], len(shape_of(x))
        if min(dims) < rows.dim:
            return False  # the dim of rows would move
        behind = [dim - rank for dim in dims]
        every = self._values.call(node.target, rows.node, behind, *node.args[2:], **node.kwargs)
        self._values.rows[node] = replace(rows, node=every, column=None, flat=None)
        return True

    def _reduced(self, node: Node, x: Node, dims: Sequence[int], *, mean: bool) -> Node:
        """Return the sum or the mean of the selected rows of ``x`` over ``dims``, which include the
        dim of rows."""
        values, rows = self._values, self._values.rows[x]
        given, dtype = x.meta["val"].dtype, node.meta["val"].dtype
        # The sum of a mean in half precision is in float32, which does not overflow.
        wide = torch.float32 if mean and dtype.itemsize < 4 else dtype
        cast = {} if given == wide or not wide.is_floating_point else {"dtype": wide}
        right, added = len(shape_of(x)) - rows.dim - 1, len(shape_of(rows.mask)) - 1
        others = [dim + added * (dim > rows.dim) for dim in dims if dim != rows.dim]
        every = values.zero_filled(x, right)
        if mean and others:
            every, cast = values.call(_aten.mean.dim, every, others, True, **cast), {}
        places = [*range(rows.dim, rows.dim + added + 1), *others]
        total = values.call(_aten.sum.dim_IntList, every, sorted(places), **cast)
        if not mean:
            return total
        # Without any rows it is 0 / 0, as in the model.
        total = values.call(_aten.div.Tensor, total, self._count(rows.mask))
        return total if wide == dtype else values.call(_aten._to_copy.default, total, dtype=dtype)

    def _count(self, mask: Node) -> Node:
        every = tuple(range(len(shape_of(mask))))
        return self._values.call(_aten.sum.default, self._values.hit(mask, every, 0))

    def _pairs(self, node: Node, bound: Mapping[str, object]) -> Node:
        """Return an elementwise loss: unreduced for all rows, then its sum or mean."""
        x = bound["self"] if bound["self"] in self._values.rows else bound["target"]
        assert isinstance(x, Node)
        tensors = [bound["self"], bound["target"]]
        if any(len(shape_of(each)) != len(shape_of(x)) for each in tensors):
            raise RowsRefused("they are combined with values that are not rows")
        single = self._values.call(node.target, *({**bound, "reduction": _NONE}).values())
        single.meta["val"] = x.meta["val"]
        self._values.rows[single] = self._values.pointwise(single, self._values.rows.__getitem__)
        dims = range(len(shape_of(x)))
        return self._reduced(node, single, dims, mean=bound["reduction"] == _MEAN)

    def _of_classes(self, node: Node, bound: Mapping[str, Any]) -> bool:
        """Rewrite a loss with one class per row, which ignores those of ``ignore_index``."""
        values, (x, target) = self._values, (bound["self"], bound["target"])
        if not {x, target} <= values.rows.keys() or bound["weight"] in values.rows:
            raise RowsRefused("they are combined with values that are not rows")
        rows = values.rows[x]
        if values.rows[target].mask is not rows.mask:
            raise RowsRefused("they are mixed with those of another mask")
        if len(shape_of(x)) != 2 or rows.dim or len(shape_of(target)) != 1:
            raise RowsRefused("their classes are not in the dim after them")
        sizes = shape_of(rows.mask)
        every = tuple(range(len(sizes)))
        # Rows in one dim, since dim 1 of the operand has the classes. Rows that are not selected
        # get ignore_index, so a mean and its divisor do not include them.
        scores = values.widened(rows, every, 1, x)
        if rows.axes != every:
            scores = values.call(_aten.expand.default, scores, [*sizes, shape_of(x)[1]])
        scores = values.call(_aten.reshape.default, scores, [-1, shape_of(x)[1]])
        wanted = self._labels(target, bound["ignore_index"])
        given = {**bound, "self": scores, "target": wanted}
        loss = values.call(node.target, *given.values())
        if bound["reduction"] == _NONE:
            loss = values.call(_aten.reshape.default, loss, sizes)
            values.rows[node] = Rows(rows.mask, loss, 0, every)
        else:
            self._values.substitute(node, loss)
        return True

    def _of_alignments(self, node: Node, bound: Mapping[str, Any]) -> bool:
        """Rewrite a loss whose targets are selected labels, with the sequences concatenated."""
        values, targets = self._values, bound["targets"]
        if [x for x in node.all_input_nodes if x in values.rows] != [targets]:
            raise RowsRefused("they are combined with each other")
        if len(shape_of(targets)) != 1:
            raise RowsRefused("they are not single labels")
        given = {**bound, "targets": self._labels(targets, LEFT_OUT)}
        self._values.substitute(node, values.call(node.target, *given.values()))
        return True

    def _labels(self, labels: Node, left_out: int) -> Node:
        """Return all rows of ``labels`` in one dim, with ``left_out`` where none is selected."""
        values, rows = self._values, self._values.rows[labels]
        every = tuple(range(len(shape_of(rows.mask))))
        wide, hit = values.widened(rows, every, 0, labels), values.hit(rows.mask, every, 0)
        wide = values.call(_aten.where.ScalarOther, hit, wide, left_out)
        return values.call(_aten.reshape.default, wide, [-1])


def _is_reduction(node: Node) -> bool:
    return node.target in (*_SUMS, *_MEANS, *_OF_PAIRS, *_OF_CLASSES, CTC_LOSS.overload)
