"""Rewrite a captured graph to the normal form that later passes expect.

Afterwards these hold:

- no aliases, copies or asserts; ``captured.copied`` has the outputs that have to be copied; a cast
  is ``_to_copy(x, dtype=...)``;
- every view is ``reshape`` with explicit sizes; splits are ``split_with_sizes``;
- dims are negative, so that a token-wise operator stays valid when leading dims are flattened;
- an activation function that a model writes out by hand is one operator;
- a bias is added by a separate ``add``, so that it can follow the reduction of a row-parallel
  matmul; matmuls with a plain weight act on the last dim of unflattened values;
- an operand (1, s, h) or (s, h) of a pointwise (b, s, h) result is expanded to (b, s, h), one of
  (b, 1, 1) to (b, s, 1);
- ids of lookups and losses on a device are checked by ``sp_compiler.checked_ids``;
- dropout is ``sp_compiler.dropout`` or a stored mask, other random numbers are made of
  ``sp_compiler.uniform``, with one seed placeholder for the graph; fused attention has no dropout.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.base.provenance import ModuleCall, layer_of
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import arguments, calls, is_call, shape_of
from sp_compiler.ir.op_traits import CAPTURED_RESHAPES, is_tagged_pointwise, is_view
from sp_compiler.ir.rewriting import (
    erase_dead,
    insert_call,
    replace_call,
    replace_with,
)
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.passes.normalize.activations import name_activations
from sp_compiler.passes.normalize.attention import explicit_attention, fold_attention_masks
from sp_compiler.passes.normalize.checked_ids import check_ids
from sp_compiler.passes.normalize.composites import split_composites
from sp_compiler.passes.normalize.decompose import REWRITTEN, canonical_operators
from sp_compiler.passes.normalize.fused_projections import split_packed, split_slices
from sp_compiler.passes.normalize.negative_dims import make_dims_negative
from sp_compiler.passes.normalize.random_numbers import draw_by_counter
from sp_compiler.passes.normalize.row_slices import slice_before_products
from sp_compiler.passes.normalize.views import keep_token_order, shorten_view_chains
from sp_compiler.passes.outline.unlisted import mark_unlisted_layers

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten
_COPIES = (
    _aten.alias.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.lift_fresh_copy.default,
    _aten.resolve_conj.default,
    _aten.resolve_neg.default,
)
# They raise if the elements that they reinterpret together are not adjacent in memory.
_VIEWS_OF_MEMORY = (_aten.view_as_complex.default, _aten.view.dtype)
_SPLITS = (_aten.split.Tensor, _aten.chunk.default, _aten.unsafe_split.Tensor)
_REWRITTEN = frozenset((*REWRITTEN, *CAPTURED_RESHAPES, *_COPIES, *_SPLITS))


def normalize(
    captured: Captured,
    dropout: Literal["regenerate", "stored"] = "regenerate",
    *,
    spelled_out: bool = False,
) -> None:
    """Rewrite the graph of ``captured`` in place; a second run changes nothing.

    The module's code is not regenerated: nothing runs it.

    Args:
        captured: a fresh capture.
        dropout: ``"regenerate"`` emits ``sp_compiler.dropout``, ``"stored"`` a mask and its use.
        spelled_out: leave activation functions that are written out by hand.

    Raises:
        UnsupportedError: random numbers that cannot be drawn by the counter-based generator.
    """
    graph = captured.module.graph
    mark_unlisted_layers(captured)  # the steps below work within layers
    # They assert the dtypes of the capture. As users of their operands they would keep dead values
    # alive.
    for node in calls(graph, _aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    # One name per operator first: the steps below match few of the many synonyms.
    split_composites(graph, known=_REWRITTEN)
    canonical_operators(graph)
    numbers = _lifted_numbers(captured)  # before the copies that identify them are dropped
    _drop_copies(captured)
    _move_to_device(numbers, captured)
    _canonical_views(graph)
    _splits_with_sizes(graph)
    make_dims_negative(graph)
    if not spelled_out:
        name_activations(graph)
    # Before rules see them, or a fused projection would be sharded across q, k and v.
    split_packed(graph)
    split_slices(graph)
    # A mask that is folded away needs no explicit attention. Attention that still has dropout is
    # decomposed, with a separate dropout: only then is it known which operators draw.
    fold_attention_masks(captured)
    explicit_attention(graph)
    draw_by_counter(captured, stored=dropout == "stored")
    # Biases are added separately, so that a row-parallel matmul can be reduced before.
    _split_bias(graph)
    _split_addmm(graph)
    _unflatten_products(graph)
    _merge_reshapes(graph)
    # The next steps ask whether a value has only one user: dead users would count.
    erase_dead(graph)
    slice_before_products(graph)
    erase_dead(graph)
    keep_token_order(graph)
    shorten_view_chains(graph)
    _expand_tokens(graph)  # last: a chain of views would absorb the expansions
    check_ids(graph)
    erase_dead(graph)
    captured.drop_unused_placeholders()
    graph.lint()


def _drop_copies(captured: Captured) -> None:
    """Replace copies by their sources, because forward writes nothing in place; casts stay."""
    graph = captured.module.graph
    dropped = []
    for node in calls(graph, *_COPIES):
        is_needed = any(is_call(user, *_VIEWS_OF_MEMORY) for user in node.users)
        if not is_needed or node.args[0].meta["val"].is_contiguous():
            dropped.append(node)
    for node in calls(graph, _aten._to_copy.default):
        source, value = node.args[0].meta["val"], node.meta["val"]
        if source.dtype is value.dtype and source.device == value.device:
            dropped.append(node)
            continue
        # Layout, pinned memory and memory format change no values. An unchanged device is left out:
        # it would be a literal from the capture.
        options = {key: node.kwargs[key] for key in ("dtype", "device") if key in node.kwargs}
        if source.device == value.device:
            options.pop("device", None)
        node.kwargs = options
    # But the caller may write into what is returned.
    captured.copied |= _kept_apart(captured.outputs, set(dropped))
    for node in dropped:
        replace_with(node, node.args[0])
    # A detach of a value with a gradient stays: it stops the gradient.
    for node in calls(graph, _aten.detach.default):
        if not node.args[0].meta["requires_grad"]:
            replace_with(node, node.args[0])


def _kept_apart(outputs: Sequence[Any], copies: Collection[Node]) -> frozenset[int]:
    """Return the positions of outputs that would share memory with an input, a parameter, a
    constant or another output if not for one of ``copies``."""
    roots: dict[int, Node] = {}
    copied = set()
    for position, leaf in enumerate(outputs):
        node = leaf
        while isinstance(node, Node) and (node in copies or is_view(node)):
            source = node.args[0]
            # A tensor that is contiguous already is returned as it is.
            if node in copies and not (is_view(node) and source.meta["val"].is_contiguous()):
                copied.add(position)
            node = source
        if isinstance(node, Node):
            roots[position] = node
    uses = Counter(roots.values())
    return frozenset(
        position
        for position in copied
        if roots[position].op == "placeholder" or uses[roots[position]] > 1
    )


def _lifted_numbers(captured: Captured) -> list[tuple[Node, str]]:
    """Return placeholder and name of each constant tensor that forward makes of Python numbers, as
    ``torch.tensor(2.0)`` does.

    Tensors that forward reads, from a closure for example, have similar names. The difference: a
    tensor made in forward is used only through a copy, because each call makes a new one.
    """
    placeholders = captured.module.graph.find_nodes(op="placeholder")
    return [
        (node, ref.name)
        for node, ref in zip(placeholders, captured.refs, strict=True)
        if ref.kind == "constant"
        and "lifted_tensor" in ref.name
        and all(is_call(user, *_COPIES) for user in node.users)
    ]


def _move_to_device(numbers: Sequence[tuple[Node, str]], captured: Captured) -> None:
    """Move each of ``numbers`` that is used only on one other device to that device: otherwise each
    step would copy it.

    On a GPU the host would wait for that copy, which no CUDA graph can record (``cuda_graphs``).
    Tensors that forward reads stay: a moved copy would not see what is written into them later.
    """
    for node, name in numbers:
        moves = [user for user in node.users if is_call(user, _aten._to_copy.default)]
        devices = {move.meta["val"].device for move in moves}
        if len(moves) < len(node.users) or len(devices) != 1:
            continue
        moved = captured.constants[name].to(devices.pop())
        # A new dict: a copy of the captured model shares the old one.
        captured.constants = {**captured.constants, name: moved}
        node.meta["val"] = node.meta["val"].to(moved.device)
        for move in moves:
            dtype = move.meta["val"].dtype
            if dtype is moved.dtype:
                replace_with(move, node)
            else:
                move.kwargs = {"dtype": dtype}


def _canonical_views(graph: Graph) -> None:
    """``view``, ``flatten``, ``squeeze``... -> ``reshape``; views that change nothing are
    removed."""
    for node in calls(graph, *CAPTURED_RESHAPES, _aten.expand.default, _aten.slice.Tensor):
        source = node.args[0]
        assert isinstance(source, Node)
        if same_shape(shape_of(source), shape_of(node)):
            replace_with(node, source)
        elif is_call(node, *CAPTURED_RESHAPES):
            node.target, node.args, node.kwargs = (
                _aten.reshape.default,
                (source, list(shape_of(node))),
                {},
            )
        elif is_call(node, _aten.expand.default):
            node.args, node.kwargs = (source, list(shape_of(node))), {}
        else:
            _explicit_slice(node, source)


def _explicit_slice(node: Node, source: Node) -> None:
    """Write start and end as positions from the front: equal slices get equal arguments."""
    bound = arguments(node)
    size = shape_of(source)[bound["dim"]]
    start, end = (
        _position(bound[name], size, default) for name, default in (("start", 0), ("end", size))
    )
    step = bound["step"]
    node.args, node.kwargs = (source, bound["dim"], start, max(start, end)), {}
    if step != 1:
        node.args = (*node.args, step)


def _position(index: int | None, size: int, default: int) -> int:
    """Return ``index`` counted from the front and clipped to ``0..size``."""
    if index is None:
        return default
    # torch.export writes "to the end" as sys.maxsize. An open index is not compared with it: that
    # would record a guard.
    if isinstance(index, int) and index >= sys.maxsize:
        return size
    index = index + size if index < 0 else index
    return size if index > size else 0 if index < 0 else index


def _splits_with_sizes(graph: Graph) -> None:
    """``split``, ``chunk`` -> ``split_with_sizes`` with the size of every part."""
    for node in calls(graph, *_SPLITS):
        dim = arguments(node)["dim"]
        sizes = [part.shape[dim] for part in node.meta["val"]]
        replace_call(
            node, _aten.split_with_sizes.default, (node.args[0], sizes, dim), origin=_ORIGIN
        )


def _split_bias(graph: Graph) -> None:
    """``linear(x, w, b)`` -> ``linear(x, w) + b``."""
    for node in calls(graph, _aten.linear.default):
        bias = arguments(node)["bias"]
        if bias is not None:
            product = insert_call(node, _aten.linear.default, node.args[:2], origin=_ORIGIN)
            replace_call(node, _aten.add.Tensor, (product, bias), origin=_ORIGIN)


def _split_addmm(graph: Graph) -> None:
    """``addmm(b, x, w)`` -> ``matmul(x, w) + b``: GPT-2's Conv1D."""
    for node in calls(graph, _aten.addmm.default):
        bound = arguments(node)
        if bound["beta"] == 1 and bound["alpha"] == 1:
            factors = (bound["mat1"], bound["mat2"])
            product = insert_call(node, _aten.matmul.default, factors, origin=_ORIGIN)
            replace_call(node, _aten.add.Tensor, (product, bound["self"]), origin=_ORIGIN)


def _unflatten_products(graph: Graph) -> None:
    """``reshape(linear(x, w) + b, (..., o))`` -> ``linear(reshape(x, (..., i)), w) + b``.

    With ``x`` (n, i) and one matrix: GPT-2's Conv1D flattens the tokens around its matmul.
    Afterwards it works on unflattened tokens like everything around it, and the two reshapes of
    ``x`` cancel.
    """
    for node in calls(graph, _aten.linear.default, _aten.matmul.default):
        x, weight = node.args
        assert isinstance(x, Node)
        # A stack of matrices has batch dims, which the reshape would have to keep too.
        if len(shape_of(x)) != 2 or len(shape_of(weight)) != 2:
            continue
        last = _biased(node)
        users = [user for user in last.users if is_call(user, _aten.reshape.default)]
        # Only if every user is such a reshape: otherwise the matmul would be computed twice.
        if not users or len(users) != len(last.users):
            continue
        shape = shape_of(users[0])
        if not all(same_shape(shape_of(user), shape) for user in users):
            continue
        if len(shape) <= 2 or shape[-1] != shape_of(last)[-1]:
            continue
        size = [*shape[:-1], shape_of(x)[-1]]
        value = insert_call(node, _aten.reshape.default, (x, size), origin=_ORIGIN)
        value = insert_call(node, node.target, (value, weight), origin=_ORIGIN)
        if last is not node:
            value = insert_call(last, _aten.add.Tensor, (value, last.args[1]), origin=_ORIGIN)
        for user in users:
            replace_with(user, value)
        graph.erase_node(last)
        if last is not node:
            graph.erase_node(node)


def _biased(product: Node) -> Node:
    """Return the sum of ``product`` and a bias if that is its only use, else ``product``."""
    users = list(product.users)
    if len(users) == 1 and is_call(users[0], _aten.add.Tensor) and users[0].args[0] is product:
        bias, factor = users[0].args[1], arguments(users[0])["alpha"]
        if isinstance(bias, Node) and len(shape_of(bias)) == 1 and factor == 1:
            return users[0]
    return product


def _merge_reshapes(graph: Graph) -> None:
    """``reshape(reshape(x, a), b)`` -> ``reshape(x, b)``, or ``x`` where it has that shape."""
    for node in calls(graph, _aten.reshape.default):
        source = node.args[0]
        # Not across layers, so that equal layers stay equal.
        while is_call(source, _aten.reshape.default) and layer_of(source) == layer_of(node):
            source = source.args[0]
        assert isinstance(source, Node)
        if same_shape(shape_of(source), shape_of(node)):
            replace_with(node, source)
        else:
            node.args = (source, node.args[1])


def _expand_tokens(graph: Graph) -> None:
    """Make the broadcast of an operand over some of the tokens a separate node.

    That is, of (1, s, ...) or (s, ...) over the batch, and of one value per sequence (b, 1, 1), as
    in stochastic depth, over the sequence.
    """
    # Once per layer: attention is recognised by one mask before and after its softmax.
    expanded: dict[tuple[Node, ModuleCall, str], Node] = {}
    for node in list(graph.nodes):
        is_single = isinstance(node.meta.get("val"), torch.Tensor)  # frexp has two results
        if node.op != "call_function" or not is_tagged_pointwise(node) or not is_single:
            continue
        result = shape_of(node)
        # Only (b, s, h): its rows of tokens are flattened together, and an operand broadcast over
        # some of them has no rows until it is expanded.
        if len(result) != 3 or result[0] == 1 or result[1] == 1:
            continue
        for operand in dict.fromkeys(node.all_input_nodes):
            shape = shape_of(operand)
            per_position = same_shape(shape[-2:-1], result[1:2]) and math.prod(shape[:-2]) == 1
            # Not (b, 1, h): expanded before it is cut into rows, it would take s times as much.
            if per_position or same_shape(shape, (result[0], 1, 1)):
                size = [*result[:2], shape[-1]]
                key = operand, layer_of(node), str(size)  # as text: open sizes have no hash
                if key not in expanded:
                    args = operand, size
                    expanded[key] = insert_call(node, _aten.expand.default, args, origin=_ORIGIN)
                node.replace_input_with(operand, expanded[key])
