"""One form for operators with several forms, and common operators in place of rare ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, calls, carries_gradient, is_call, shape_of
from sp_compiler.ir.rewriting import insert_call, refake, replace_call, replace_with
from sp_compiler.ir.symbolic import same_shape
from sp_compiler.passes.normalize.cells import bilinear, gru_cell
from sp_compiler.passes.normalize.composites import glu, masked_write
from sp_compiler.passes.normalize.einsum import contract
from sp_compiler.passes.normalize.losses import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    kl_div,
    loss_of_elements,
    multilabel_margin_loss,
    nll_loss,
    picked_log_probabilities,
)
from sp_compiler.passes.normalize.recurrent_layers import RECURRENT, separate_layers

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten


def canonical_operators(graph: Graph) -> None:
    """Rewrite in place; each form on the left becomes the one on the right.

    - ``&`` -> ``bitwise_and``; ``t()``, ``.T`` -> ``transpose``, ``permute``
    - ``x.type_as(y)`` -> a cast of ``x``, or ``x``; ``x @ w.T`` -> ``linear(x, w)``
    - ``copy(x, y)``, ``fill(x, y)`` -> ``y``, cast and expanded
    - ``expand_as``, ``reshape_as``, ``view_as`` -> ``expand``, ``reshape``
    - ``broadcast_tensors(x, y)[i]`` -> ``expand`` of one
    - ``einsum`` -> ``matmul`` or ``linear``, sums and permutations, see :func:`.einsum.contract`
    - ``adaptive_avg_pool`` to one element -> ``mean``
    - ``glu(x)`` -> ``a * sigmoid(b)`` of the halves of ``x``; a real ``sgn(x)`` -> ``sign``
    - ``x[mask] = v`` of a value that does not depend on the place -> ``where``
    - ``cross_entropy`` of logits with classes in dim 1 of several -> that of rows of logits; with
      probabilities as targets -> their elementwise product with ``log_softmax``
    - ``logsumexp`` that keeps its dims -> one that does not, and ``reshape``
    - recurrent layers with dropout between them -> one operator per layer
    - ``gru_cell`` -> two projections and their gates; ``bilinear`` -> a matmul, sums of its rows
    - ``nll_loss`` of ``log_softmax(x)`` -> ``cross_entropy`` of ``x``; ``kl_div`` -> elementwise
    - ``multilabel_margin_loss``, ``binary_cross_entropy_with_logits`` -> their definitions
    - ``mse_loss`` and other means or sums of losses of elements -> the losses, then mean or sum
    - ``log_softmax(x).gather(-1, y)`` of a label per row -> ``-cross_entropy(x, y)``
    - ``_weight_norm(v, g)`` -> ``v * (g / norm(v))``
    - ``x[..., i::n]`` of a dim divisible by n -> ``select`` from its groups of n adjacent elements
    - ``repeat``, ``repeat_interleave`` with a number -> ``reshape``, ``expand``, ``reshape``
    - ``sort``, ``argsort`` -> the stable ones: otherwise the order of equal keys is up to the
      kernel, and backward may sort again with another kernel (Inductor's, or a fallback)
    - operators with sparse gradients (``embedding(..., sparse=True)``) -> those with dense ones:
      only dense gradients can be summed over ranks and be parts of a distributed parameter
    - a tensor with the conjugate or negative bit -> a materialized one, because the bit is lost
      between ranks; ``ihfft`` -> ``rfft`` and its conjugate
    - a new tensor like an activation -> one of that size, which does not depend on the activation
    - a new tensor without a dtype -> one of the dtype that it had when captured
    """
    # A list: rewrites insert nodes, which are in canonical form already.
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is not None:
            rewrite(node)
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            refake(node)  # a view of a tensor that had the bit
    for node in calls(graph, *_WITH_SPARSE_GRADIENTS):
        _dense_gradient(node)
    # torch.get_default_dtype() may be another one when the program runs.
    for node in calls(graph, *_FACTORIES):
        dtype = node.meta["val"].dtype
        if node.kwargs.get("dtype") is None and dtype.is_floating_point:
            node.kwargs = {**node.kwargs, "dtype": dtype}


def _bitwise_and(node: Node) -> None:
    node.target = _aten.bitwise_and.Tensor


def _stable_sort(node: Node) -> None:
    bound = arguments(node)
    node.target = _STABLE_SORTS.get(node.target, node.target)
    node.args = (bound["self"],)
    node.kwargs = {"stable": True, "dim": bound["dim"], "descending": bound["descending"]}


def _dense_gradient(node: Node) -> None:
    names = [argument.name for argument in node.target._schema.arguments]
    node.args = tuple(
        False if name in _SPARSE else value
        for name, value in zip(names, node.args, strict=False)  # the rest are defaults
    )
    node.kwargs = {name: value for name, value in node.kwargs.items() if name not in _SPARSE}


def _conjugate(node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    if is_call(source, _aten.conj_physical.default):
        replace_with(node, source.args[0])
    else:
        replace_call(node, _aten.conj_physical.default, (source,), origin=_ORIGIN)


def _negative(node: Node) -> None:
    replace_call(node, _aten.neg.default, node.args[:1], origin=_ORIGIN)


def _ihfft(node: Node) -> None:
    bound = arguments(node)
    norm = {"forward": "backward", "ortho": "ortho"}.get(bound["norm"], "forward")
    args = bound["self"], bound["n"], bound["dim"], norm
    spectrum = insert_call(node, _aten.fft_rfft.default, args, origin=_ORIGIN)
    replace_call(node, _aten.conj_physical.default, (spectrum,), origin=_ORIGIN)


def _broadcast_to(node: Node) -> None:
    node.target = _aten.expand.default


def _t(node: Node) -> None:
    # Dims from the end, as make_dims_negative writes those of captured operators.
    replace_call(node, _aten.transpose.int, (node.args[0], -2, -1), origin=_ORIGIN)


def _reversed(node: Node) -> None:
    if len(shape_of(node)) == 2:
        _t(node)
        return
    order = tuple(range(len(shape_of(node)) - 1, -1, -1))
    replace_call(node, _aten.permute.default, (node.args[0], order), origin=_ORIGIN)


def _product(node: Node) -> None:
    x, other = node.args[:2]
    assert isinstance(x, Node)
    assert isinstance(other, Node)
    # A vector times a matrix stays: its result lacks the rows of tokens that linear's rule expects.
    if len(shape_of(x)) > 1 and _is_transposed(other):
        replace_call(node, _aten.linear.default, (x, other.args[0]), origin=_ORIGIN)


def _einsum(node: Node) -> None:
    bound = arguments(node)
    # Integers stay: ``einsum`` keeps their type, and ``sum`` would widen it.
    if carries_gradient(node.meta["val"]):
        replace_with(node, contract(node, bound["equation"], bound["tensors"], bound["path"]))


def _sgn(node: Node) -> None:
    # Backward of a real ``sgn`` is made of tensors that torch's own tracing cannot represent.
    if not node.meta["val"].is_complex():
        replace_call(node, _aten.sign.default, node.args, origin=_ORIGIN)


def _pooled_to_one(node: Node) -> None:
    # For channels-last inputs, autograd would otherwise record an as_strided of the mean.
    bound = arguments(node)
    if all(size == 1 for size in bound["output_size"]):
        dims = list(range(-len(bound["output_size"]), 0))
        replace_call(node, _aten.mean.dim, (bound["self"], dims, True), origin=_ORIGIN)


def _weight_norm(node: Node) -> None:
    bound = arguments(node)
    norm = _norm_except(node, bound["v"], 2, bound["dim"])
    scale = insert_call(node, _aten.div.Tensor, (bound["g"], norm), origin=_ORIGIN)
    replace_call(node, _aten.mul.Tensor, (bound["v"], scale), origin=_ORIGIN)


def _norm_except_dim(node: Node) -> None:
    bound = arguments(node)
    replace_with(node, _norm_except(node, bound["v"], bound["pow"], bound["dim"]))


def _norm_except(node: Node, x: Node, power: int, dim: int) -> Node:
    """Norm of the elements at each index of ``dim``; here, -1 means all of ``x``."""
    rank = len(shape_of(x))
    others = [other for other in range(rank) if other != dim % rank]
    args = (x, power) if dim == -1 else (x, power, others, True)
    return insert_call(node, _aten.linalg_vector_norm.default, args, origin=_ORIGIN)


def _is_transposed(node: Node) -> bool:
    """Return whether the node is ``w.T`` of a ``w`` with two dims, in any form."""
    if len(shape_of(node)) != 2 or not is_call(node, _aten.transpose.int, _aten.permute.default):
        return False
    dims = node.args[1:] if is_call(node, _aten.transpose.int) else node.args[1]
    first, second = (dim % 2 for dim in dims)
    return first != second and (is_call(node, _aten.transpose.int) or first == 1)


def _type_as(node: Node) -> None:
    replace_with(node, _cast_like(node, node.args[0]))


def _copy(node: Node) -> None:
    # Values are never written in place: a copy over another is the source with the other's shape,
    # dtype and device (a scalar that is written into a tensor on a GPU comes from the CPU).
    _expand_to(node, _cast_like(node, node.args[1]))


def _fill(node: Node) -> None:
    _replace_by_factory(node, "full", arguments(node)["value"])


def _cast_like(node: Node, x: Any) -> Node:
    given, wanted = x.meta["val"], node.meta["val"]
    differ = [key for key in ("dtype", "device") if getattr(given, key) != getattr(wanted, key)]
    new = {key: getattr(wanted, key) for key in differ}
    return insert_call(node, _aten._to_copy.default, (x,), new, origin=_ORIGIN) if new else x


def _expand_as(node: Node) -> None:
    _expand_to(node, node.args[0])


def _expand_to(node: Node, x: Any) -> None:
    if not same_shape(shape_of(x), shape_of(node)):
        size = list(shape_of(node))
        x = insert_call(node, _aten.expand.default, (x, size), origin=_ORIGIN)
    replace_with(node, x)


def _broadcast_tensors(node: Node) -> None:
    for user in list(node.users):
        _expand_to(user, node.args[0][user.args[1]])
    node.graph.erase_node(node)


def _reshape_as(node: Node) -> None:
    size = list(shape_of(node))
    replace_call(node, _aten.reshape.default, (node.args[0], size), origin=_ORIGIN)


def _strided_slice(node: Node) -> None:
    """Interleaved rotary embeddings and similar: ``x[..., ::2]`` and ``x[..., 1::2]``."""
    bound = arguments(node)
    x, step = bound["self"], bound["step"]
    shape = shape_of(x)
    dim = bound["dim"] % len(shape)
    if step == 1:
        return
    # Not by slice.indices, which would specialize an open size.
    start = bound["start"] or 0
    start = start if start >= 0 else torch.sym_max(start + shape[dim], 0)
    # A dim that is not divisible by the step cannot be split into factors that a rule could name.
    if not shape[dim] or shape[dim] % step or shape_of(node)[dim] != shape[dim] // step:
        return
    size = [*shape[:dim], shape[dim] // step, step, *shape[dim + 1 :]]
    groups = insert_call(node, _aten.reshape.default, (x, size), origin=_ORIGIN)
    replace_call(node, _aten.select.int, (groups, dim + 1, start), origin=_ORIGIN)


def _repeat(node: Node) -> None:
    """(n,) -> (1, n) -> (r, n) -> (r * n,) for every dim at once."""
    x, counts = node.args
    added = len(counts) - len(shape_of(x))
    shape = (*[1] * added, *shape_of(x))
    pairs = list(zip(counts, shape, strict=True))
    _repeated(node, [(1, n) for _, n in pairs], pairs)


def _repeat_interleave(node: Node) -> None:
    """(n,) -> (n, 1) -> (n, r) -> (n * r,), as key-value heads are repeated."""
    bound = arguments(node)
    shape = shape_of(bound["self"])
    if bound["dim"] is None:  # it repeats all elements, flattened
        return
    dim = bound["dim"] % len(shape)
    narrow = [(n, 1) for n in shape]
    wide = [(n, bound["repeats"] if d == dim else 1) for d, n in enumerate(shape)]
    _repeated(node, narrow, wide)


def _repeated(node: Node, narrow: list[tuple[int, int]], wide: list[tuple[int, int]]) -> None:
    """Repeat through one dim for the elements and one for the copies, if there are copies."""
    # Only dims with copies are split in two.
    copied = [pair != other for pair, other in zip(narrow, wide, strict=True)]

    def size(pairs: list[tuple[int, int]]) -> list[int]:
        groups = [
            pair if many else (pair[0] * pair[1],) for pair, many in zip(pairs, copied, strict=True)
        ]
        return [n for group in groups for n in group]

    x = insert_call(node, _aten.reshape.default, (node.args[0], size(narrow)), origin=_ORIGIN)
    x = insert_call(node, _aten.expand.default, (x, size(wide)), origin=_ORIGIN)
    replace_call(node, _aten.reshape.default, (x, list(shape_of(node))), origin=_ORIGIN)


def _logsumexp(node: Node) -> None:
    bound = arguments(node)
    if not bound["keepdim"] or not bound["dim"]:  # no dims: all of them
        return
    rows = insert_call(node, node.target, (bound["self"], bound["dim"]), origin=_ORIGIN)
    replace_call(node, _aten.reshape.default, (rows, list(shape_of(node))), origin=_ORIGIN)


def _like(node: Node) -> None:
    # Otherwise a mask of zeros like the hidden states would be active, and placed with them.
    source = node.args[0]
    if not isinstance(source, Node) or not source.meta["requires_grad"]:
        return
    name = node.target._schema.name.split("::")[1].removeprefix("new_").removesuffix("_like")
    numbers = (arguments(node)["fill_value"],) if name == "full" else ()
    # Uninitialized memory will be overwritten: zeros serve as well, and are equal on every rank.
    _replace_by_factory(node, "zeros" if name == "empty" else name, *numbers)


def _replace_by_factory(node: Node, name: str, *numbers: Any) -> None:
    value = node.meta["val"]
    args, kwargs = (list(value.shape), *numbers), {"dtype": value.dtype, "device": value.device}
    replace_call(node, getattr(_aten, name).default, args, kwargs, origin=_ORIGIN)


_FACTORIES = (
    _aten.zeros.default,
    _aten.ones.default,
    _aten.full.default,
    _aten.empty.memory_format,
    _aten.arange.default,
    _aten.arange.start,
    _aten.arange.start_step,
    _aten.linspace.default,
    _aten.eye.default,
    _aten.scalar_tensor.default,
)
_WITH_SPARSE_GRADIENTS = (
    _aten.embedding.default,
    _aten.embedding_bag.default,
    _aten.embedding_bag.padding_idx,
    _aten.gather.default,
)
_SPARSE = ("sparse", "sparse_grad")
"""Names of the argument that requests sparse gradients; its default is dense."""
_STABLE_SORTS = {_aten.sort.default: _aten.sort.stable, _aten.argsort.default: _aten.argsort.stable}
_REWRITES: dict[object, Callable[[Node], None]] = {
    _aten.__and__.Tensor: _bitwise_and,
    # Also those with stable=False.
    **dict.fromkeys((*_STABLE_SORTS, *_STABLE_SORTS.values()), _stable_sort),
    _aten.t.default: _t,
    _aten.numpy_T.default: _reversed,
    _aten.matmul.default: _product,
    _aten.mm.default: _product,
    _aten.einsum.default: _einsum,
    _aten.glu.default: glu,
    _aten.sgn.default: _sgn,
    _aten.index_put.default: masked_write,
    **{getattr(_aten, f"adaptive_avg_pool{n}d").default: _pooled_to_one for n in (1, 2, 3)},
    _aten._weight_norm.default: _weight_norm,
    _aten.norm_except_dim.default: _norm_except_dim,
    _aten.cross_entropy_loss.default: cross_entropy,
    _aten.gru_cell.default: gru_cell,
    _aten.bilinear.default: bilinear,
    **dict.fromkeys(RECURRENT, separate_layers),
    _aten.logsumexp.default: _logsumexp,
    _aten.nll_loss_nd.default: nll_loss,
    _aten.gather.default: picked_log_probabilities,
    _aten.kl_div.default: kl_div,
    _aten.multilabel_margin_loss.default: multilabel_margin_loss,
    _aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    **{
        getattr(_aten, name).default: loss_of_elements
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
    },
    _aten._conj.default: _conjugate,
    _aten._neg_view.default: _negative,
    _aten.fft_ihfft.default: _ihfft,
    _aten.type_as.default: _type_as,
    _aten.broadcast_to.default: _broadcast_to,
    _aten.broadcast_tensors.default: _broadcast_tensors,
    _aten.copy.default: _copy,
    _aten.fill.Tensor: _copy,
    _aten.fill.Scalar: _fill,
    _aten.expand_as.default: _expand_as,
    _aten.reshape_as.default: _reshape_as,
    _aten.view_as.default: _reshape_as,
    _aten.slice.Tensor: _strided_slice,
    _aten.repeat.default: _repeat,
    _aten.repeat_interleave.self_int: _repeat_interleave,
    **{
        getattr(_aten, f"{prefix}{name}{suffix}").default: _like
        for name in ("empty", "zeros", "ones", "full")
        for prefix, suffix in (("new_", ""), ("", "_like"))
    },
}
REWRITTEN = frozenset(_REWRITES)
"""Operators that :func:`canonical_operators` rewrites, at least with some arguments."""
