"""Fused attention: constant masks, and the explicit core if it has dropout."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.fx import ancestors, arguments, calls, is_getitem, shape_of
from sp_compiler.ir.op_traits import draws
from sp_compiler.ir.rewriting import insert_call, replace_with
from sp_compiler.ir.symbolic import Binding, Sizes, evaluate

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten
_sdpa = _aten.scaled_dot_product_attention.default
# Largest mask that is computed to find out its kind: a quarter of a gigabyte of booleans.
_MAX_ELEMENTS = 1 << 28
# Operators that read only the shape and type of their first operand.
_SHAPE_ONLY = (
    _aten.new_ones.default,
    _aten.new_zeros.default,
    _aten.new_full.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten.full_like.default,
)


def fold_attention_masks(graph: Graph, sizes: Sizes | None = None) -> None:
    """Replace masks that depend on no input: by ``is_causal``, or by no mask.

    ``sdpa(q, k, v, mask)`` -> ``sdpa(q, k, v, None, p, is_causal=True)`` where ``mask`` evaluates
    to the lower triangle, -> ``sdpa(q, k, v)`` if it masks nothing. The mask is computed, not
    guessed: it may depend only on constants of the graph and open ``sizes``, and is computed again
    for every size that the program is used with.
    """
    binding = sizes.example if sizes is not None else {}
    # For the graph: all layers share one mask, or masks made of the same parts.
    known: dict[Node, Tensor | None] = {}
    kinds: dict[Node, str | None] = {}
    for node in calls(graph, _sdpa):
        bound = arguments(node)
        mask = bound["attn_mask"]
        if mask is None or bound["is_causal"]:
            continue
        if mask not in kinds:
            kinds[mask] = _kind(_constant(mask, known, binding))
            if kinds[mask] is not None and sizes is not None:
                sizes.proofs.append(_proof(mask, kinds[mask]))
        if kinds[mask] is not None:
            factors = (bound["query"], bound["key"], bound["value"])
            node.args = (*factors, None, bound["dropout_p"], kinds[mask] == "causal")
            node.kwargs = {name: bound[name] for name in ("scale", "enable_gqa") if bound[name]}
            report_of(Pass.NORMALIZE).rewrote(kind="attention mask")
        else:
            reason = "the mask is neither causal nor open, or depends on an input"
            report_of(Pass.NORMALIZE).decline(node, reason)


def _kind(mask: Tensor | None) -> str | None:
    """Return ``"causal"``, ``"all"`` or, for any other or unknown mask, ``None``."""
    if mask is None or mask.ndim < 2:
        return None
    # A mask of numbers is added to the scores: the lowest number, or -inf, forbids. Any other value
    # (a bias by distance, as ALiBi's) is no mask in this sense.
    allowed = mask if mask.dtype is torch.bool else mask == 0
    forbidden = ~allowed if mask.dtype is torch.bool else mask <= torch.finfo(mask.dtype).min
    if not bool((allowed | forbidden).all()):
        return None
    if bool(allowed.all()):
        return "all"
    rows, columns = mask.shape[-2:]
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if bool((allowed == triangle).all()) else None


def _proof(mask: Node, kind: str | None) -> Callable[[Binding], bool]:
    """Return a function that checks whether ``mask`` is of this kind for other sizes too."""
    # On a copy, because the mask is erased from the graph once nobody uses it.
    graph, copies, needed = Graph(), dict[Node, Node](), ancestors([mask])
    for node in mask.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return lambda binding: _kind(_constant(copies[mask], {}, binding)) == kind


def _constant(node: Node, known: dict[Node, Tensor | None], binding: Binding) -> Tensor | None:
    """Compute a value that depends on no input, on the CPU; ``None`` for others."""
    if node in known:
        return known[node]
    known[node] = None  # values that depend on an input, and those that are too large
    if node.op == "call_function" and _is_small(node, binding):
        known[node] = _compute(node, known, binding)
    return known[node]


def _is_small(node: Node, binding: Binding) -> bool:
    value = node.meta["val"]
    if not isinstance(value, Tensor) or is_getitem(node):
        return False
    return math.prod(evaluate(tuple(value.shape), binding)) <= _MAX_ELEMENTS


def _compute(node: Node, known: dict[Node, Tensor | None], binding: Binding) -> Tensor | None:
    if draws(node):
        return None
    # Of these the operand may well depend on an input: its numbers are not read.
    if any(node.target is target for target in _SHAPE_ONLY):
        value = node.args[0].meta["val"]
        empty = torch.empty(evaluate(tuple(value.shape), binding), dtype=value.dtype)
        args = (empty, *node.args[1:])
    else:
        # Down to the factories, for a mask is a short chain of operators on them.
        operands = {operand: _constant(operand, known, binding) for operand in node.all_input_nodes}
        if any(value is None for value in operands.values()):
            return None
        args = map_arg(node.args, operands.__getitem__)
    kwargs = {**node.kwargs, "device": "cpu"} if "device" in node.kwargs else node.kwargs
    with torch.no_grad():
        return node.target(*evaluate(args, binding), **evaluate(kwargs, binding))


def explicit_attention(graph: Graph) -> None:
    """Fused attention with dropout -> products, mask, softmax, dropout, in place.

    ``sdpa(q, k, v, mask, p, causal)`` -> ``matmul(dropout(softmax(mask(q @ k^T * scale))), v)``

    with q (b, a, s, d), k and v (b, a or kv heads, l, d). Without dropout it stays fused; with
    dropout, a fused kernel would draw the mask from torch's generator instead of the seed.
    """
    triangles: dict[str, Node] = {}
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
        key = insert_call(node, _aten.transpose.int, (key, -2, -1), origin=_ORIGIN)
        scores = insert_call(
            node, _aten.matmul.default, (query, key), origin=_ORIGIN, name="scores"
        )
        scores = insert_call(node, _aten.mul.Tensor, (scores, scale), origin=_ORIGIN, name="scores")
        mask = bound["attn_mask"]
        if bound["is_causal"]:
            mask = _triangle(graph, shape_of(scores)[-2:], triangles)  # type: ignore[arg-type]
        probabilities = _masked_softmax(node, scores, mask, causal=bound["is_causal"])
        args = (probabilities, bound["dropout_p"], True)
        dropped = insert_call(node, _aten.native_dropout.default, args, origin=_ORIGIN)
        dropped = insert_call(node, operator.getitem, (dropped, 0), origin=_ORIGIN)
        context = insert_call(
            node, _aten.matmul.default, (dropped, value), origin=_ORIGIN, name="context"
        )
        replace_with(node, context)


def _repeat_heads(node: Node, x: Node, num_heads: int) -> Node:
    """(b, kv heads, l, d) -> (b, num_heads, l, d), every head repeated beside itself."""
    *lead, kv_heads, length, width = shape_of(x)
    if kv_heads == num_heads:
        return x
    wide = insert_call(node, _aten.unsqueeze.default, (x, -3), origin=_ORIGIN)
    size = [*lead, kv_heads, num_heads // kv_heads, length, width]
    wide = insert_call(node, _aten.expand.default, (wide, size), origin=_ORIGIN)
    size = [*lead, num_heads, length, width]
    return insert_call(node, _aten.reshape.default, (wide, size), origin=_ORIGIN)


def _masked_softmax(node: Node, scores: Node, mask: Node | None, *, causal: bool) -> Node:
    """Return probabilities; a completely masked row is zero, as in fused attention."""
    is_bool = mask is not None and mask.meta["val"].dtype is torch.bool
    if is_bool:
        # A causal row always sees itself; a given mask may forbid all of a row, and the softmax of
        # nothing but -inf is NaN.
        lowest = -math.inf if causal else torch.finfo(scores.meta["val"].dtype).min
        args = (mask, scores, lowest)
        scores = insert_call(node, _aten.where.ScalarOther, args, origin=_ORIGIN)
    elif mask is not None:
        scores = insert_call(node, _aten.add.Tensor, (scores, mask), origin=_ORIGIN)
    probabilities = insert_call(node, _aten.softmax.int, (scores, -1), origin=_ORIGIN, name="probs")
    if is_bool and not causal:
        args = (mask, probabilities, 0.0)
        probabilities = insert_call(node, _aten.where.ScalarOther, args, origin=_ORIGIN)
    return probabilities


def _triangle(graph: Graph, size: tuple[int, int], known: dict[str, Node]) -> Node:
    """Return the causal mask (queries, keys), computed once at the start of the graph for all
    layers."""
    # As text: open sizes have no hash.
    if str(size) in known:
        return known[str(size)]
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    device = next(
        value.device
        for node in graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta["val"], Tensor)
    )
    options = {"dtype": torch.bool, "device": device}
    ones = insert_call(first, _aten.ones.default, (list(size),), options, origin=_ORIGIN)
    mask = insert_call(first, _aten.tril.default, (ones,), origin=_ORIGIN, name="causal_mask")
    # It belongs to no layer, or outlining would make it an output of the first one.
    for node in (ones, mask):
        node.meta.pop("nn_module_stack", None)
        node.meta.pop("stack_trace", None)
    known[str(size)] = mask
    return mask
