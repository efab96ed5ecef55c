"""Fused attention: constant masks, and the explicit core if it has dropout."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.provenance import source_line
from sp_compiler.base.units import bytes_text
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import ancestors, arguments, calls, is_getitem, shape_of
from sp_compiler.ir.op_traits import draws, is_tagged_pointwise
from sp_compiler.ir.rewriting import inherit, insert_call, replace_with
from sp_compiler.ir.symbolic import Binding, evaluate

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten
_sdpa = _aten.scaled_dot_product_attention.default
# Largest value that is computed in full to classify a mask: a quarter of a gigabyte of booleans.
_MAX_ELEMENTS = 1 << 28
# Number of elements computed at once of a larger value, in blocks of rows: they fit in a cache.
_ROW_ELEMENTS = 1 << 21
# Largest mask that is examined: 131,072 x 131,072, which takes a core about a minute.
_MAX_MASK_ELEMENTS = 1 << 34
# A mask that is kept and is at least this large is worth a remark.
_LARGE_BYTES = 1 << 26
_OTHER = "the mask is neither causal nor open, or depends on an input"
# Row-wise operators that torch does not tag as pointwise: a row of the result depends only on the
# same row of the operands. Size and diagonal arguments are adapted to the rows.
_BY_ROWS = frozenset(
    {
        _aten.__and__.Tensor,
        _aten.__or__.Tensor,
        _aten._to_copy.default,
        _aten.expand.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.tril.default,
        _aten.triu.default,
    }
)
# Operators that read only the shape and type of their first operand.
_SHAPE_ONLY = (
    _aten.new_ones.default,
    _aten.new_zeros.default,
    _aten.new_full.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten.full_like.default,
)


def fold_attention_masks(captured: Captured) -> None:
    """Replace masks that depend on no input: by ``is_causal``, or by no mask.

    ``sdpa(q, k, v, mask)`` -> ``sdpa(q, k, v, None, p, is_causal=True)`` where ``mask`` evaluates
    to the lower triangle, -> ``sdpa(q, k, v)`` if it masks nothing. The mask is computed, not
    guessed: it may depend only on constants of the graph and open ``sizes``, and is computed again
    for every size that the program is used with. A large mask is computed in blocks of rows, if its
    operators allow that.
    """
    sizes = captured.sizes
    binding = sizes.example if sizes is not None else {}
    # One for the whole graph: all layers share one mask, or masks made of the same parts.
    constants = _Constants(binding)
    kinds: dict[Node, str | None] = {}
    for node in calls(captured.module.graph, _sdpa):
        bound = arguments(node)
        mask = bound["attn_mask"]
        # Kernels scale after they have masked: 0 times -inf.
        if mask is None or bound["is_causal"] or bound["scale"] == 0:
            continue
        if mask not in kinds:
            kinds[mask] = constants.kind(mask)
            if kinds[mask] is None:
                captured.notes += _large(node, mask.meta["val"], binding)
            elif sizes is not None:
                sizes.proofs.append(_proof(mask, kinds[mask]))
        if kinds[mask] is not None:
            factors = (bound["query"], bound["key"], bound["value"])
            node.args = (*factors, None, bound["dropout_p"], kinds[mask] == "causal")
            node.kwargs = {name: bound[name] for name in ("scale", "enable_gqa") if bound[name]}
            report_of(Pass.NORMALIZE).rewrote(kind="attention mask")
        else:
            report_of(Pass.NORMALIZE).decline(node, _OTHER)


def _large(attention: Node, mask: Tensor, binding: Binding) -> list[str]:
    """Return a remark on a mask that is kept, if it is large."""
    shape = evaluate(tuple(mask.shape), binding)
    num_bytes = math.prod(shape) * mask.itemsize
    if num_bytes < _LARGE_BYTES:
        return []
    return [
        f"an attention mask of {list(shape)} takes {bytes_text(num_bytes)} on every rank: {_OTHER} "
        f"({source_line(attention)}); an attention function that needs no mask saves it: see "
        "docs/tasks/long_sequences.md"
    ]


def _proof(mask: Node, kind: str | None) -> Callable[[Binding], bool]:
    """Return a function that checks whether ``mask`` is of this kind for other sizes too."""
    # On a copy, because the mask is erased from the graph once it has no users.
    graph, copies, needed = Graph(), dict[Node, Node](), ancestors([mask])
    for node in mask.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return lambda binding: _Constants(binding).kind(copies[mask]) == kind


class _Constants:
    """Computes values that depend on no input, on the CPU."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._known: dict[Node, Tensor | None] = {}

    def kind(self, mask: Node) -> str | None:
        """Return ``"causal"``, ``"all"`` or, for any other or unknown mask, ``None``."""
        value = mask.meta["val"]
        if not isinstance(value, Tensor) or value.ndim < 2:
            return None
        num_rows, num_columns = evaluate(tuple(value.shape[-2:]), self._binding)
        if num_rows * num_columns > _MAX_MASK_ELEMENTS:
            return None
        step = max(1, _ROW_ELEMENTS // max(1, num_columns))
        # A single row may be broadcast to all queries: it is never taken for causal.
        kinds = {"all", "causal"} if num_rows > 1 else {"all"}
        for first in range(0, num_rows, step):
            kinds &= _kinds(self._rows(mask, range(first, min(first + step, num_rows))), first)
            if not kinds:
                return None
        return min(kinds)

    def _rows(self, node: Node, rows: range) -> Tensor | None:
        """Compute ``rows`` of a value, or its only row; ``None`` if that is impossible."""
        by_rows = is_tagged_pointwise(node) or node.target in (*_BY_ROWS, *_SHAPE_ONLY)
        if self._num_elements(node) <= _ROW_ELEMENTS or not by_rows or draws(node):
            return _rows_of(self._value(node), rows)
        if node.target in _SHAPE_ONLY:
            operands = {x: _rows_of(self._shape(x), rows) for x in node.all_input_nodes}
        else:
            operands = {x: self._rows(x, rows) for x in node.all_input_nodes}
        bound = arguments(node)
        if "size" in bound:
            bound["size"] = [*bound["size"][:-2], len(rows), bound["size"][-1]]
        if "diagonal" in bound:
            bound["diagonal"] += rows.start
        return self._call(node, (), bound, operands)

    def _value(self, node: Node) -> Tensor | None:
        if node in self._known:
            return self._known[node]
        self._known[node] = None  # stays if the value depends on an input or is too large
        value = node.meta["val"]
        if node.op != "call_function" or not isinstance(value, Tensor) or is_getitem(node):
            return None
        if self._num_elements(node) <= _MAX_ELEMENTS and not draws(node):
            # Recursion down to the factories: a mask is a short chain of operators on them. Where
            # only an operand's shape is read, the operand may depend on an input.
            operand_of = self._shape if node.target in _SHAPE_ONLY else self._value
            operands = {x: operand_of(x) for x in node.all_input_nodes}
            self._known[node] = self._call(node, node.args, node.kwargs, operands)
        return self._known[node]

    def _shape(self, node: Node) -> Tensor | None:
        """Return a tensor that has a shape and a dtype but no meaningful values."""
        value = node.meta["val"]
        shape = evaluate(tuple(value.shape), self._binding)
        return torch.empty((), dtype=value.dtype, device="cpu").expand(shape)

    def _call(
        self, node: Node, args: Any, kwargs: Any, operands: Mapping[Node, Tensor | None]
    ) -> Tensor | None:
        if any(value is None for value in operands.values()):
            return None
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        args, kwargs = map_arg((args, kwargs), operands.__getitem__)
        with torch.no_grad():
            result: Tensor = node.target(
                *evaluate(args, self._binding), **evaluate(kwargs, self._binding)
            )
        return result

    def _num_elements(self, node: Node) -> int:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return 0
        return math.prod(evaluate(tuple(value.shape), self._binding))


def _rows_of(value: Tensor | None, rows: range) -> Tensor | None:
    if value is None or value.ndim < 2 or value.shape[-2] == 1:
        return value
    return value[..., rows.start : rows.stop, :]


def _kinds(rows: Tensor | None, first: int) -> set[str]:
    """Return the kinds of mask that ``rows``, from the row ``first`` on, may be part of."""
    if rows is None:
        return set()
    for dim in range(rows.ndim - 2):
        if rows.stride(dim) == 0:  # expanded
            rows = rows.narrow(dim, 0, min(1, rows.shape[dim]))
    # A floating-point mask is added to the scores: 0 allows, the lowest value or -inf forbids. With
    # any other value (a bias by distance, as ALiBi's) it is not a mask in this sense.
    allowed = rows if rows.dtype is torch.bool else rows == 0
    if rows.dtype is not torch.bool:
        is_mask = allowed | (rows <= torch.finfo(rows.dtype).min)
        if not bool(is_mask.all()):
            return set()
    num_rows = rows.shape[-2]
    # Causal: ones on the left of this triangle, zeros on its right.
    triangle = torch.ones(num_rows, num_rows, dtype=torch.bool, device="cpu").tril()
    left, middle, right = allowed.tensor_split((first, first + num_rows), dim=-1)
    causal = bool(left.all()) and not bool(right.any())
    causal = causal and bool((middle == triangle[:, : middle.shape[-1]]).all())
    found = {"all": bool(allowed.all()), "causal": causal}
    return {kind for kind, is_it in found.items() if is_it}


def explicit_attention(graph: Graph) -> None:
    """Fused attention with dropout -> matmuls, mask, softmax, dropout, in place.

    ``sdpa(q, k, v, mask, p, causal)`` -> ``matmul(dropout(softmax(mask(q @ k^T * scale))), v)``

    with q (b, a, s, d), k and v (b, a or kv heads, l, d). Without dropout it stays fused; with
    dropout, a fused kernel would draw the mask from torch's generator instead of the seed.
    """
    triangles: dict[str, Node] = {}
    masks: dict[Node, tuple[Node, Node]] = {}
    for node in calls(graph, _sdpa):
        bound = arguments(node)
        if bound["dropout_p"] == 0:
            continue
        query, key, value = bound["query"], bound["key"], bound["value"]
        if bound["enable_gqa"]:
            num_heads = shape_of(query)[-3]
            key, value = (_repeat_heads(node, x, num_heads) for x in (key, value))
        scale = bound["scale"]
        if scale is None:
            scale = 1 / math.sqrt(shape_of(query)[-1])
        mask, without_keys = bound["attn_mask"], None
        if mask is not None:
            mask, without_keys = _finite_rows(mask, masks)
            # Scores of zero, because theirs may overflow: NaN times the gradient 0 would be NaN.
            args: tuple[Any, ...] = (without_keys, 0.0, query)
            query = insert_call(node, _aten.where.ScalarSelf, args, origin=_ORIGIN)
        scores = _scores(node, query, key, scale)
        if bound["is_causal"]:
            mask = _triangle(scores, triangles)
        probabilities = _masked_softmax(node, scores, mask)
        args = (probabilities, bound["dropout_p"], True)
        dropped = insert_call(node, _aten.native_dropout.default, args, origin=_ORIGIN)
        dropped = insert_call(node, operator.getitem, (dropped, 0), origin=_ORIGIN)
        context = insert_call(
            node, _aten.matmul.default, (dropped, value), origin=_ORIGIN, name="context"
        )
        if without_keys is not None:
            args = (without_keys, 0.0, context)
            context = insert_call(node, _aten.where.ScalarSelf, args, origin=_ORIGIN)
        replace_with(node, context)


def _scores(node: Node, query: Node, key: Node, scale: float) -> Node:
    """Return ``query @ key^T * scale``."""
    # The scores themselves may be beyond the largest number of float16.
    first = query.meta["val"].dtype is torch.float16
    if first:
        query = insert_call(node, _aten.mul.Tensor, (query, scale), origin=_ORIGIN)
    key = insert_call(node, _aten.transpose.int, (key, -2, -1), origin=_ORIGIN)
    args = (query, key)
    scores = insert_call(node, _aten.matmul.default, args, origin=_ORIGIN, name="scores")
    if first:
        return scores
    return insert_call(node, _aten.mul.Tensor, (scores, scale), origin=_ORIGIN, name="scores")


def _repeat_heads(node: Node, x: Node, num_heads: int) -> Node:
    """(b, kv heads, l, d) -> (b, num_heads, l, d), the copies of a head next to each other."""
    *lead, kv_heads, length, width = shape_of(x)
    if kv_heads == num_heads:
        return x
    wide = insert_call(node, _aten.unsqueeze.default, (x, -3), origin=_ORIGIN)
    size = [*lead, kv_heads, num_heads // kv_heads, length, width]
    wide = insert_call(node, _aten.expand.default, (wide, size), origin=_ORIGIN)
    size = [*lead, num_heads, length, width]
    return insert_call(node, _aten.reshape.default, (wide, size), origin=_ORIGIN)


def _masked_softmax(node: Node, scores: Node, mask: Node | None) -> Node:
    """Return probabilities of the scores that a bool mask allows, or to which another is added."""
    if mask is not None and mask.meta["val"].dtype is torch.bool:
        args: tuple[Any, ...] = (mask, scores, -math.inf)
        scores = insert_call(node, _aten.where.ScalarOther, args, origin=_ORIGIN)
    elif mask is not None:
        scores = insert_call(node, _aten.add.Tensor, (scores, mask), origin=_ORIGIN)
    return insert_call(node, _aten.softmax.int, (scores, -1), origin=_ORIGIN, name="probs")


def _finite_rows(mask: Node, known: dict[Node, tuple[Node, Node]]) -> tuple[Node, Node]:
    """Return ``mask`` without the rows in which it forbids every key, and these rows.

    The softmax of such a row is NaN, while the context of fused attention is zero. Computed next to
    the mask, which is mostly one for all layers and heads: the scores are many times as large.
    """
    if mask not in known:
        after = _first_call(mask.graph) if mask.op == "placeholder" else mask.next

        def computed(target: Any, *args: Any, name: str | None = None) -> Node:
            node = insert_call(after, target, args, origin=_ORIGIN, name=name)
            _leave_layer(node)
            inherit(node, mask)
            return node

        if mask.meta["val"].dtype is torch.bool:
            seen = computed(_aten.any.dim, mask, -1, True)
            rows = computed(_aten.logical_not.default, seen, name="without_keys")
            finite = computed(_aten.logical_or.default, mask, rows)
        else:
            hidden = computed(_aten.eq.Scalar, mask, -math.inf)
            rows = computed(_aten.all.dim, hidden, -1, True, name="without_keys")
            finite = computed(_aten.where.ScalarSelf, rows, 0.0, mask)
        known[mask] = finite, rows
    return known[mask]


def _triangle(scores: Node, known: dict[str, Node]) -> Node:
    """Return the causal mask (queries, keys), computed once at the start of the graph for all
    layers."""
    size, device = shape_of(scores)[-2:], scores.meta["val"].device
    key = f"{size} {device}"  # as text: open sizes have no hash
    if key in known:
        return known[key]
    first = _first_call(scores.graph)
    options = {"dtype": torch.bool, "device": device}
    ones = insert_call(first, _aten.ones.default, (list(size),), options, origin=_ORIGIN)
    mask = insert_call(first, _aten.tril.default, (ones,), origin=_ORIGIN, name="causal_mask")
    for node in (ones, mask):
        _leave_layer(node)
    known[key] = mask
    return mask


def _leave_layer(node: Node) -> None:
    """Make ``node`` belong to no layer: outlining would make it an output of the first one."""
    node.meta.pop("nn_module_stack", None)
    node.meta.pop("stack_trace", None)


def _first_call(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
