"""Kinds of operators that several passes ask for.

A kind that only one pass needs (the matmuls that it can move, the views that it looks through) is a
table in that pass.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch.fx import Node

from sp_compiler.ir.fx import arguments, placements_of
from sp_compiler.ops.async_products import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from sp_compiler.ops.attention import DROPOUT_ATTENTION
from sp_compiler.ops.convert import WAIT, Conversion, conversion_between
from sp_compiler.ops.dropout import DROPOUT, DROPOUT_MASK
from sp_compiler.ops.registry import OPERATORS, operator_of
from sp_compiler.ops.uniform import UNIFORM

aten = torch.ops.aten

MATMULS = {
    # operator -> positions of the two factors
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.linear.default: (0, 1),
    aten.convolution.default: (0, 1),
}
# Rows sorted by expert times a matrix per expert; by name, because the second belongs to
# transformers, which need not be installed.
_GROUPED = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
# Ours, and the forms of ``scaled_dot_product_attention`` that PyTorch picks by device and dtype.
FUSED_ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        DROPOUT_ATTENTION.overload,
    }
)
# Views of a part of their argument: saving the result keeps the full storage alive.
NARROWING_VIEWS = frozenset(
    {
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.diagonal.default,
        aten.as_strided.default,
        *(ours.overload for ours in OPERATORS.values() if ours.view == "part"),
    }
)
# Views whose schemas declare no alias.
_OTHER_VIEWS = frozenset(
    {aten._unsafe_view.default, *(ours.overload for ours in OPERATORS.values() if ours.view)}
)
RESULT_NAMES = {
    # operators with several results, as the generated code calls them
    aten.native_layer_norm.default: ("norm", "mean", "rstd"),
    aten.native_layer_norm_backward.default: ("grad_input", "grad_weight", "grad_bias"),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ("context", "logsumexp"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        "grad_query",
        "grad_key",
        "grad_value",
    ),
    **{ours.overload: ours.result_names for ours in OPERATORS.values() if ours.result_names},
}
FILLED = {
    # operator that makes a constant -> the value, or the name of the argument that holds it
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.full.default: "fill_value",
    aten.full_like.default: "fill_value",
    aten.new_full.default: "fill_value",
    aten.scalar_tensor.default: "s",
}
COPIES = frozenset({aten.clone.default, aten._to_copy.default})
# The same elements in the same order, under another shape.
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# How else a captured graph spells them, until they are normalized.
CAPTURED_RESHAPES = (
    *RESHAPES,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
)
# torch tags only ``where.self``, to which these decompose.
_POINTWISE_BY_PARTS = frozenset({aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf})


def conversion_of(node: Node) -> Conversion | None:
    """Return the conversion of a ``convert`` node; ``None`` for other nodes, or if none exists."""
    placements = placements_of(node)
    return None if placements is None else conversion_between(*placements)


def collective_of(node: Node) -> str | None:
    """Return the collective of a conversion: ``"all_gather"``, ``"reduce_scatter"``..."""
    conversion = conversion_of(node)
    # No crossings: a slice of the rank's own tensor, or nothing at all.
    return conversion.method if conversion is not None and conversion.link_crossings else None


def is_collective(node: Node) -> bool:
    """Return whether the node communicates: as a conversion, or inside."""
    return collective_of(node) is not None or has_inner_communication(node)


def is_identity(node: Node) -> bool:
    """Return whether a conversion does not change any rank's tensor, apart from gradients."""
    conversion = conversion_of(node)
    return conversion is not None and not conversion.method


def is_wait(node: Node) -> bool:
    """Return whether the node waits for a collective that was started earlier."""
    return node.target is WAIT.overload


def is_started(node: Node) -> bool:
    """Return whether a collective runs asynchronously until its ``wait``."""
    return any(is_wait(user) for user in node.users)


def is_view(node: Node) -> bool:
    """Return whether the result shares the storage of its first argument (read from the schema)."""
    if node.op != "call_function":
        return False
    # A part of a split is a view, like the split; other results of operators with several are not.
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if node.target in _OTHER_VIEWS or is_identity(node):
        return True
    # A number has no storage: conj(1 + 2j), which a gradient may have.
    return _aliases_first(node.target) and isinstance(node.args[0], Node)


@functools.cache
def _aliases_first(target: object) -> bool:
    # Read from the schema: a list of views would miss those of the next version of PyTorch.
    # Cached, because torch creates new objects for a schema's arguments at every access.
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    # An alias that is written: an in-place operator.
    return alias is not None and not alias.is_write


def writes(node: Node) -> bool:
    """Return whether the operator writes into its first argument and returns that: a view by its
    storage, but not by its cost."""
    ours = operator_of(node.target)
    return ours is not None and ours.writes


def is_pure_view(node: Node) -> bool:
    """Return whether the node computes nothing: a view whose operator does not write."""
    return is_view(node) and not writes(node)


def is_part(node: Node) -> bool:
    """Return whether ``node`` is one of an operator's several results, with its own storage."""
    return node.target is operator.getitem and not is_view(node)


def is_handed(node: Node) -> bool:
    """Return whether ``node`` is an argument to which the caller keeps no reference, so that the
    function frees it."""
    return bool(node.meta.get("handed"))


def base(node: Node) -> Node:
    """Return the node that owns the storage of ``node``."""
    while is_view(node):
        node = node.args[0]
    return node


def view_chain(node: Node) -> list[Node]:
    """Return the views between ``node`` (included if it is a view) and its base, innermost last."""
    chain = []
    while is_view(node):
        chain.append(node)
        node = node.args[0]
    return chain


def is_returned(node: Node) -> bool:
    """Return whether the function returns the tensor or a view: the caller may write into it."""
    return any(user.op == "output" or (is_view(user) and is_returned(user)) for user in node.users)


def is_tagged_pointwise(node: Node) -> bool:
    """Return whether PyTorch tags the operator, or all operators that it decomposes to, as
    pointwise: it broadcasts its operands and combines them element by element."""
    target = node.target
    return torch.Tag.pointwise in getattr(target, "tags", ()) or target in _POINTWISE_BY_PARTS


def is_copy(node: Node) -> bool:
    return node.target in COPIES


def is_cast(node: Node) -> bool:
    """Return whether ``node`` is a copy that changes only the element type."""
    return node.target is aten._to_copy.default


def is_narrowing_cast(node: Node) -> bool:
    """Return whether ``node`` is a cast between floating dtypes, to one of fewer bits."""
    if not is_cast(node):
        return False
    value, given = node.meta["val"], node.args[0].meta["val"]
    is_floating = value.is_floating_point() and given.is_floating_point()
    return is_floating and value.itemsize < given.itemsize and value.device == given.device


DRAWS = (DROPOUT.overload, DROPOUT_MASK.overload, UNIFORM.overload)
"""Our operators that draw from the counter; the fourth argument, ``site``, distinguishes calls."""


def draws(node: Node) -> bool:
    """Return whether the operator draws from torch's generator; its arguments can disable that."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Attention has ``dropout_p``, recurrent layers ``dropout`` and ``train``; a module in eval mode
    # or without dropout calls the same operator.
    given = arguments(node)
    is_off = any(given.get(name) == 0.0 for name in ("dropout_p", "dropout"))
    return not is_off and not any(given.get(name) is False for name in ("train", "training"))


def is_dropout_mask(node: Node) -> bool:
    return node.target is DROPOUT_MASK.overload


def has_inner_communication(node: Node) -> bool:
    """Return whether the operator communicates internally, so that rerunning it repeats
    collectives."""
    ours = operator_of(node.target)
    return ours is not None and ours.collectives is not None


def is_grouped_product(node: Node) -> bool:
    """Return whether the node multiplies rows, sorted by expert, by a matrix per expert."""
    return getattr(getattr(node.target, "_schema", None), "name", "") in _GROUPED


def matmul_factors(node: Node) -> tuple[Node, Node] | None:
    """Return the two factors of a matmul, the first of several right ones; ``None`` for other
    operators."""
    if node.target is ALL_GATHER_MATMUL.overload:
        return node.args[0], node.args[1][0]
    positions = MATMULS.get(node.target)
    if is_grouped_product(node) or node.target is MATMUL_REDUCE_SCATTER.overload:
        positions = (0, 1)
    return None if positions is None else (node.args[positions[0]], node.args[positions[1]])
