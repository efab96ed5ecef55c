"""``einsum`` as sums, matmuls and permutations, which have sharding rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import shape_of
from sp_compiler.ir.rewriting import insert_call
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.passes.normalize.views import move

# A letter, or the position of a dim among those that "..." covers.
Label = str | int
# A value and the label of each of its dims.
Labelled = tuple[Node, list[Label]]

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten


def contract(
    node: Node, equation: str, operands: Sequence[Node], path: Sequence[int] | None
) -> Node:
    """Compute ``einsum`` of the ``operands`` with other operators, inserted before ``node``.

    ==================  =======================================================================
    Equation            Becomes
    ==================  =======================================================================
    btd,df->btf         ``matmul(x, w)``
    btd,fd->btf         ``linear(x, w)``
    btd,dhk->bthk       ``reshape(matmul(x, reshape(w, (d, h * k))), (b, t, h, k))``
    bthk,hkd->btd       ``matmul(reshape(x, (b, t, h * k)), reshape(w, (h * k, d)))``
    bthd,bshd->bhts     ``matmul(transpose(q, 1, 2), permute(k, (0, 2, 3, 1)))``
    ebd,edf->ebf        ``matmul(x, w)``
    t,d->td             ``mul(reshape(x, (t, 1)), reshape(y, (1, d)))``
    bthd,bthd->bth      ``sum(mul(x, y), -1)``
    ==================  =======================================================================

    A label of only one operand that is not in the result is summed first; for a label that occurs
    twice in an operand the diagonal is taken; more than two operands are multiplied pairwise.

    Args:
        node: the call that the new nodes replace.
        equation: letters, "..." for any number of dims, with or without a right side.
        operands: one value per term on the left.
        path: positions of each pair to multiply, whose product is appended; by default from left to
            right.
    """
    labels, out = _labels(equation, [len(shape_of(x)) for x in operands])
    remaining = [_diagonal(node, x, names) for x, names in zip(operands, labels, strict=True)]
    # Dims of size 1 that are broadcast are dropped: they would be summed instead of repeated.
    sizes = _sizes(remaining)
    remaining = [_without_broadcast(node, *operand, sizes) for operand in remaining]
    pairs = list(path or ())
    while len(remaining) > 1:
        first, second = sorted((pairs.pop(0), pairs.pop(0))) if path else (0, 1)
        # The later one first: its removal does not move the other.
        right, left = remaining.pop(second), remaining.pop(first)
        needed = {*out, *(name for _, names in remaining for name in names)}
        # The last product has the order of the result, so that no permutation follows.
        order = dict.fromkeys((*left[1], *right[1])) if remaining else out
        kept = [name for name in order if name in needed]
        product = _product(node, left, right, kept, sizes)
        remaining.insert(len(remaining) if path else 0, product)
    result, names = _summed(node, *remaining[0], out)
    return _moved(node, result, names, out)


def _labels(equation: str, ranks: Sequence[int]) -> tuple[list[list[Label]], list[Label]]:
    """Return the labels of the dims of every operand and of the result."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    dots = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    most = max(dots)
    # numpy's convention, which torch follows: letters that occur once, in alphabetical order.
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = "..." + "".join(sorted(name for name in letters if letters.count(name) == 1))

    # The dims of "..." are aligned from the right, as broadcasting does.
    def expand(term: str, count: int) -> list[Label]:
        before, ellipsis, after = term.partition("...")
        return [*before, *(range(most - count, most) if ellipsis else ()), *after]

    expanded = [expand(term, count) for term, count in zip(terms, dots, strict=True)]
    return expanded, expand(right, most)


def _call(node: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    return insert_call(node, target, args, kwargs, origin=_ORIGIN)


def _diagonal(node: Node, x: Node, names: list[Label]) -> Labelled:
    """Take diagonals until each label occurs once."""
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first, second = [dim for dim, other in enumerate(names) if other == name][:2]
            # The diagonal becomes the last dim.
            x = _call(node, _aten.diagonal.default, x, 0, first, second)
            names = [other for dim, other in enumerate(names) if dim not in (first, second)]
            names.append(name)
    return x, names


def _sizes(operands: Sequence[Labelled]) -> dict[Label, int]:
    """Return the size of each label; 1 only if no operand has more."""
    sizes: dict[Label, int] = {}
    for x, names in operands:
        for name, size in zip(names, shape_of(x), strict=True):
            if _is_one(sizes.get(name, 1)):
                sizes[name] = size
    return sizes


def _is_one(size: int) -> bool:
    # By same_shape: a plain comparison of an open size would be recorded.
    return same_shape((size,), (1,))


def _without_broadcast(
    node: Node, x: Node, names: list[Label], sizes: dict[Label, int]
) -> Labelled:
    """Drop dims of size 1 that are larger in another operand."""
    kept = [
        name
        for name, size in zip(names, shape_of(x), strict=True)
        if not _is_one(size) or _is_one(sizes[name])
    ]
    return _reshaped(node, x, [sizes[name] for name in kept]), kept


def _product(
    node: Node, left: Labelled, right: Labelled, kept: list[Label], sizes: dict[Label, int]
) -> Labelled:
    """Multiply two operands and sum over all labels but ``kept``, the order of the result."""
    # Labels that neither the result nor the other operand has are summed first.
    left, right = (
        _summed(node, *operand, [*kept, *other[1]])
        for operand, other in ((left, right), (right, left))
    )
    # Labels of both operands are batch dims if kept, else contracted; those of one are its rows.
    batch = [name for name in kept if name in left[1] and name in right[1]]
    rows_left, rows_right = (
        [name for name in kept if name in names and name not in batch] for _, names in (left, right)
    )
    # The operand whose rows come first in the result goes left: no dims have to move afterwards.
    if rows_right and (not rows_left or kept.index(rows_right[0]) < kept.index(rows_left[0])):
        left, right = right, left
    (x, x_names), (y, y_names) = left, right
    x_own = [name for name in x_names if name not in y_names]
    y_own = [name for name in y_names if name not in x_names]
    inner = [name for name in y_names if name in x_names and name not in batch]

    def size(names: Iterable[Label]) -> int:
        return math.prod(sizes[name] for name in names)

    # An outer product, or a sum over elementwise products: these are not matmuls.
    if not inner or not (x_own or y_own):
        names = [*(name for name in kept if name in (*x_names, *y_names)), *inner]
        # Each factor gets a dim for every label, of size 1 for labels that it lacks.
        factors = []
        for x, own in (left, right):
            moved = _moved(node, x, own, [name for name in names if name in own])
            shape = [sizes[name] if name in own else 1 for name in names]
            factors.append(_reshaped(node, moved, shape))
        return _summed(node, _call(node, _aten.mul.Tensor, *factors), names, kept)
    x = _moved(node, x, x_names, [*batch, *x_own, *inner])
    lead = [sizes[name] for name in batch]
    # A matmul with a plain weight takes rows of any number of dims, which keeps the token dims
    # separate; a batched one takes matrices.
    rows = [size(x_own)] if batch or not x_own else [sizes[name] for name in x_own]
    x = _reshaped(node, x, [*lead, *rows, size(inner)])
    # A weight stored (out, in) needs no permutation: ``linear`` transposes it itself.
    if not batch and y_names == [*y_own, *inner]:
        y = _reshaped(node, y, [size(y_own), size(inner)])
        product = _call(node, _aten.linear.default, x, y)
    else:
        y = _moved(node, y, y_names, [*batch, *inner, *y_own])
        y = _reshaped(node, y, [*lead, size(inner), size(y_own)])
        product = _call(node, _aten.matmul.default, x, y)
    names = [*batch, *x_own, *y_own]
    return _reshaped(node, product, [sizes[name] for name in names]), names


def _summed(node: Node, x: Node, names: list[Label], kept: Sequence[Label]) -> Labelled:
    """Sum over the labels that are not ``kept``."""
    dims = [dim for dim, name in enumerate(names) if name not in kept]
    if dims:
        x = _call(node, _aten.sum.dim_IntList, x, dims)
    return x, [name for name in names if name in kept]


def _moved(node: Node, x: Node, names: list[Label], order: list[Label]) -> Node:
    if names == order:
        return x
    target, args = move([names.index(name) for name in order])
    return _call(node, target, x, *args)


def _reshaped(node: Node, x: Node, size: list[int]) -> Node:
    if same_shape(shape_of(x), size):
        return x
    return _call(node, _aten.reshape.default, x, size)
