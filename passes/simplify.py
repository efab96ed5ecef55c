"""Small local simplifications of a joint graph that shorten the generated code.

=====================================  ==========================
before                                 after
=====================================  ==========================
``view(view(x, a), b)``                ``view(x, b)``
``t(t(x))``, ``transpose`` twice       ``x``
view, expand or slice to x's shape     ``x``
two equal views of ``x``               one
``view(sum(x, d, keepdim), s)``        ``sum(x, d)``
``mm(a, t(w))``, ``addmm`` likewise    ``linear(a, w)``, with bias
``linear(a, w) + bias``, ``mm`` too    ``linear(a, w, bias)``
``view(linear(a, w), s) + bias``       ``view(linear(a, w, bias), s)``
``x * 1``, ``x / 1``, ``x ** 1``       ``x``
``copy(x, y)``                         ``y``
``cat`` of ``view(clone(x), s)``       ``view(cat(xs), s)``
``masked_fill(x, mask, 0)``            ``where(mask, 0, x)``
=====================================  ==========================

Mutates the graph. Reads ``meta["val"]``; new nodes take the meta of what they replace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.fx import arguments, reduced_dims
from sp_compiler.ir.op_traits import RESHAPES, is_returned, is_view
from sp_compiler.ir.rewriting import erase_dead, make_like, merge_equal
from sp_compiler.ir.symbolic import example_number, is_open, plain, same_shape

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.linear.default)
# With 1 as the second operand they return the first bit for bit. A sum with 0 does not: it turns
# -0.0 into 0.0.
_KEEPS_NUMBERS = (aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar)
# Views that are the identity if they keep the shape; a transpose may keep it and move the elements.
_KEEPS_ORDER = (*RESHAPES, aten.expand.default, aten.slice.Tensor)


def simplify(graph: Graph) -> None:
    """Apply every rule once per node; each is a kind of the pass's report."""
    report = report_of(Pass.SIMPLIFY)
    # In topological order, so that the operands that a rule sees are simplified already.
    for node in list(graph.nodes):
        for rule in _RULES:
            replacement = rule(node)
            if replacement is not None:
                report.rewrote(kind=rule.__name__.strip("_"))
                node.replace_all_uses_with(replacement)
                graph.erase_node(node)
                break
    # After the rules, which make more views equal.
    views = (node for node in list(graph.nodes) if is_view(node))
    report.rewrote(len(merge_equal(views)), kind="merge_equal_views")
    erase_dead(graph)
    graph.lint()


def _view_of_view(node: Node) -> Node | None:
    """``view(view(x, a), b)`` -> ``view(x, b)``."""
    if node.target not in RESHAPES or node.args[0].target not in RESHAPES:
        return None
    # The check of placements derives the result of each view: it could not follow a single step
    # that changes the dim that the shard is a part of.
    if node.meta.get("relabels") or node.args[0].meta.get("relabels"):
        report_of(Pass.SIMPLIFY).decline(node, "the views change the dim that is sharded")
        return None
    with node.graph.inserting_before(node):
        merged = _call(aten.view.default, (node.args[0].args[0], node.args[1]), like=node)
    if 1 in merged.meta["val"].shape[:-1]:
        merged.meta["relabels"] = True  # a shard of that dim may have been one of its neighbor
    return _same_shape(merged) or merged


def _same_shape(node: Node) -> Node | None:
    """A view that keeps the shape -> its argument, unless that changes the placement."""
    if node.target not in _KEEPS_ORDER or node.meta.get("relabels"):
        return None
    source = node.args[0]
    return source if same_shape(source.meta["val"].shape, node.meta["val"].shape) else None


def _double_transpose(node: Node) -> Node | None:
    """``t(t(x))`` and ``transpose(transpose(x, i, j), i, j)`` -> ``x``."""
    inner = node.args[0] if node.args else None
    if node.target not in (aten.t.default, aten.transpose.int) or not isinstance(inner, Node):
        return None
    same = inner.target is node.target and _dims(inner) == _dims(node)
    return inner.args[0] if same else None


def _dims(node: Node) -> set[int]:
    # A set: ``transpose(x, 0, 1)`` and ``transpose(x, 1, 0)`` are the same. Empty for ``t``.
    rank = node.meta["val"].dim()
    return {dim % rank for dim in node.args[1:]}


def _sum_then_squeeze(node: Node) -> Node | None:
    """``view(sum(x, dims, True), s)`` -> ``sum(x, dims)`` if ``s`` has those dims dropped."""
    total = node.args[0] if node.target in RESHAPES else None
    if total is None or total.target is not aten.sum.dim_IntList or len(total.users) > 1:
        return None
    call = arguments(total)
    dropped = reduced_dims(total)
    squeezed = [size for dim, size in enumerate(total.meta["val"].shape) if dim not in dropped]
    if not call["keepdim"] or total.kwargs or not same_shape(squeezed, node.meta["val"].shape):
        return None
    with node.graph.inserting_before(node):
        return _call(total.target, total.args[:2], like=node)


def _fuse_bias(node: Node) -> Node | None:
    """``linear(a, w) + bias``, with a view between or not -> ``linear(a, w, bias)``; ``mm`` too."""
    if node.target is not aten.add.Tensor or arguments(node)["alpha"] != 1:
        return None
    if not all(isinstance(arg, Node) for arg in node.args[:2]):
        return None
    for product, bias in (node.args[:2], node.args[1::-1]):  # the sum may have either order
        matmul = product.args[0] if product.target in RESHAPES else product
        if _is_biased_product(product, matmul, bias):
            # Another user needs the matmul without the bias: it would be computed twice.
            if len(product.users) == len(matmul.users) == 1:
                return _with_bias(node, product, matmul, bias)
            report_of(Pass.SIMPLIFY).decline(node, "the matmul without the bias has other users")
    return None


def _is_biased_product(product: Node, matmul: Node, bias: Node) -> bool:
    if matmul.target not in _PRODUCTS or len(matmul.args) > 2:  # it already has a bias
        return False
    bias_value, value = bias.meta["val"], product.meta["val"]
    # The last dim on both sides of the view between: a view that splits it would split the bias.
    return (
        bias_value.dim() == 1
        and bias_value.dtype == value.dtype
        and same_shape(bias_value.shape, value.shape[-1:])
        and same_shape(bias_value.shape, matmul.meta["val"].shape[-1:])
    )


def _with_bias(node: Node, product: Node, matmul: Node, bias: Node) -> Node:
    with node.graph.inserting_before(node):
        # ``mm`` remains for weights stored as (in, out), such as GPT-2's.
        target, args = aten.linear.default, (*matmul.args, bias)
        if matmul.target is aten.mm.default:
            target, args = aten.addmm.default, (bias, *matmul.args)
        fused = _call(target, args, like=node, val=matmul.meta["val"])
        if product is matmul:
            return fused
        fused.meta.pop("placement", None)  # it refers to the dims of the view
        return _call(aten.view.default, (fused, product.args[1]), like=node)


def _linear(node: Node) -> Node | None:
    """``mm(a, t(w))`` -> ``linear(a, w)``; ``addmm(bias, a, t(w))`` -> ``linear(a, w, bias)``."""
    bias: tuple[Node, ...] = ()
    if node.target is aten.mm.default:
        factor, transposed = node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        first, factor, transposed = node.args
        bias = (first,)
    else:
        return None
    # A summand of two dims is not a bias of linear.
    if transposed.target is not aten.t.default or (bias and bias[0].meta["val"].dim() != 1):
        return None
    with node.graph.inserting_before(node):
        return _call(aten.linear.default, (factor, transposed.args[0], *bias), like=node)


def _times_one(node: Node) -> Node | None:
    """``x * 1``, ``x / 1`` and ``x ** 1`` -> ``x``, unless a new tensor must be made."""
    if node.target not in _KEEPS_NUMBERS or isinstance(node.args[1], Node) or node.args[1] != 1:
        return None
    source = node.args[0]
    value, given = node.meta["val"], source.meta["val"]
    # Integers become floats, and an expanded value gets its own memory, which a view may need.
    if value.dtype != given.dtype or not same_shape(value.stride(), given.stride()):
        return None
    return source if _may_share(node) else None


def _copy_over(node: Node) -> Node | None:
    """``copy(x, y)`` -> ``y``. The copy would have as much memory as what ``x`` is a view of."""
    if node.target is not aten.copy.default:
        return None
    source = node.args[1]
    value, given = node.meta["val"], source.meta["val"]
    same = value.dtype == given.dtype and value.device == given.device
    if not same or not same_shape(value.shape, given.shape):
        return None
    # Contiguous memory has all views of memory with gaps, but not those of a transpose.
    if not given.is_contiguous() or not _descends(value.stride()):
        return None
    return source if _may_share(node) else None


def _descends(strides: tuple[int, ...]) -> bool:
    return not any(map(is_open, strides)) and all(x > y > 0 for x, y in pairwise(strides))


def _may_share(node: Node) -> bool:
    """Return whether ``node`` may have the memory of its operand."""
    if is_returned(node):
        report_of(Pass.SIMPLIFY).decline(node, "it is returned, and may be modified in place")
        return False
    return True


def _fill_by_where(node: Node) -> Node | None:
    """``masked_fill(x, mask, number)`` -> ``where(mask, number, x)``.

    The same values in one pass over memory; masked_fill first copies, then writes.
    """
    if node.target is not aten.masked_fill.Scalar:
        return None
    x, mask, number = node.args
    if not _fits(number, node.meta["val"].dtype):  # masked_fill raises, where returns infinity
        report_of(Pass.SIMPLIFY).decline(node, "the value is not representable in the dtype")
        return None
    # The memory layout is that of the first operand: for where, the mask.
    if not x.meta["val"].is_contiguous() or not _is_in_order(mask):
        report_of(Pass.SIMPLIFY).decline(node, "the result could have another memory layout")
        return None
    with node.graph.inserting_before(node):
        return _call(aten.where.ScalarSelf, (mask, number, x), like=node)


def _fits(number: object, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or not isinstance(number, (int, float)):
        return False
    return math.isinf(number) or abs(number) <= torch.finfo(dtype).max


def _is_in_order(node: Node) -> bool:
    """Return whether no stride is larger than that of an earlier dim."""
    # Strides of the example: which of two is larger does not depend on open sizes.
    value = node.meta["val"]
    sizes, strides = (map(example_number, each) for each in (value.shape, value.stride()))
    # A dim of size 1 or an expanded one has no position in memory: the next operand decides there.
    of_dims = [stride for stride, size in zip(strides, sizes, strict=True) if size != 1 and stride]
    return all(outer >= inner for outer, inner in pairwise(of_dims))


def _views_behind_cat(node: Node) -> Node | None:
    """``cat([view(clone(x), s), ...])`` -> ``view(cat([x, ...]), s)`` where views merge dims.

    The gradient of a fused projection is made of those of q, k and v by heads in this way: each is
    copied once, instead of being made contiguous and then copied.
    """
    if node.target is not aten.cat.default:
        return None
    call, result = arguments(node), node.meta["val"]
    dim, views = call["dim"] % result.dim(), call["tensors"]
    if not all(_is_own_view(view) for view in views):
        return None
    parts = [_without_copy(view.args[0]) for view in views]
    if all(part is view.args[0] for part, view in zip(parts, views, strict=True)):
        return None  # these views need no copy
    merged = {_merged(part, view, dim) for part, view in zip(parts, views, strict=True)}
    if len(merged) > 1 or () in merged:
        return None
    # Otherwise they may all be channels last, and then the result would be too.
    if not any(_ends_in_order(part) for part in parts):
        report_of(Pass.SIMPLIFY).decline(node, "the result could have another memory layout")
        return None
    size = sum(part.meta["val"].shape[dim] for part in parts)
    shape = (*result.shape[:dim], size, *merged.pop(), *result.shape[dim + 1 :])
    with node.graph.inserting_before(node):
        joined = _call(node.target, (parts, dim), like=node, val=result.new_empty(shape))
        joined.meta.pop("placement", None)  # it refers to the dims of the view
        return _call(aten.view.default, (joined, list(result.shape)), like=node)


def _is_own_view(node: Node) -> bool:
    is_plain = node.target in RESHAPES and not node.meta.get("relabels")
    return is_plain and len(node.users) == 1


def _without_copy(node: Node) -> Node:
    is_own_copy = node.target is aten.clone.default and len(node.users) == 1
    return node.args[0] if is_own_copy else node


def _merged(part: Node, view: Node, dim: int) -> tuple[int, ...]:
    """Return the sizes that ``view`` merges into ``dim`` of ``part``; empty if it does anything
    else, or if one of them is open."""
    shape, result = part.meta["val"].shape, view.meta["val"].shape
    end = dim + 1 + len(shape) - len(result)
    kept = (*shape[:dim], *shape[end:])
    is_merge = end > dim + 1 and same_shape(kept, (*result[:dim], *result[dim + 1 :]))
    sizes = tuple(map(plain, shape[dim + 1 : end]))
    return sizes if is_merge and not any(map(is_open, sizes)) else ()


def _ends_in_order(node: Node) -> bool:
    """Return whether the elements of the last dim are contiguous."""
    value = node.meta["val"]
    return same_shape(value.stride()[-1:], (1,)) and not same_shape(value.shape[-1:], (1,))


def _call(target: Any, args: tuple[Any, ...], *, like: Node, val: Any = None) -> Node:
    changes = {} if val is None else {"val": val}
    name = target.__name__.partition(".")[0]
    return make_like(
        like.graph, target, args, like=like, origin=Pass.SIMPLIFY, name=name, **changes
    )


# Views first: the later rules look for a matmul followed by at most one view.
_RULES: tuple[Callable[[Node], Node | None], ...] = (
    _view_of_view,
    _same_shape,
    _double_transpose,
    _sum_then_squeeze,
    _fuse_bias,
    _linear,
    _times_one,
    _copy_over,
    _fill_by_where,
    _views_behind_cat,
)
