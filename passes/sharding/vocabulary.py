"""One rank's operators for a lookup or a loss over a sharded vocabulary."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.fx import Node

from sp_compiler.base.placement import R
from sp_compiler.ir.fx import arguments
from sp_compiler.ops.convert import CONVERT
from sp_compiler.ops.vocabulary import VOCAB_EMBEDDING, VOCAB_NLL
from sp_compiler.ops.vocabulary_losses import VOCAB_LOGSUMEXP, VOCAB_SMOOTHED_NLL

_aten = torch.ops.aten


class Emit(Protocol):
    """Function that emits a call of an operator."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node: ...


def lower_over_vocabulary(node: Node, values: dict[str, Any], world_size: int, emit: Emit) -> Node:
    """Emit the operators that replace ``node``; return their result.

    - ``embedding`` -> ``vocab_embedding``; with a padding row, one without a gradient there
    - ``cross_entropy_loss`` -> ``vocab_nll``, or with weights or smoothing ``vocab_smoothed_nll``;
      the sum of the losses, for a mean divided by the number or the weights of the labels
    - ``logsumexp`` -> ``vocab_logsumexp``; ``log_softmax`` -> ``x`` minus ``vocab_logsumexp``

    Args:
        node: the unsharded call.
        values: its arguments by name; tensors are one rank's parts.
        world_size: number of ranks.
        emit: emits the calls.
    """
    return _LOWERINGS[node.target](node, values, world_size, emit)


def _embedding(node: Node, values: dict[str, Any], world_size: int, emit: Emit) -> Node:
    weight, ids = values["weight"], values["indices"]
    # The global number: ``weight`` is already a shard, and may be padded.
    num_rows = arguments(node)["weight"].meta["val"].shape[0]
    rows = emit(VOCAB_EMBEDDING.overload, weight, ids, num_rows, world_size)
    padding = values["padding_idx"]
    if padding < 0:
        return rows
    # The row of the padding token is looked up but gets no gradient. Our operator has no such
    # argument.
    is_padding = emit(_aten.unsqueeze.default, emit(_aten.eq.Scalar, ids, padding), -1)
    return emit(_aten.where.self, is_padding, emit(_aten.detach.default, rows), rows)


def _loss(node: Node, values: dict[str, Any], world_size: int, emit: Emit) -> Node:
    logits, target, ignore = values["self"], values["target"], values["ignore_index"]
    weight, smoothing = values["weight"], values["label_smoothing"]
    classes, dtype = arguments(node)["self"].meta["val"].shape[1], logits.meta["val"].dtype
    logits = _wide(logits, emit)
    if weight is None and smoothing == 0:
        pair = emit(VOCAB_NLL.overload, logits, target, ignore, classes, world_size)
    else:
        weight = weight and _wide(weight, emit)
        wide = logits.meta["val"].dtype
        weights = weight or emit(_aten.new_ones.default, target, [classes], dtype=wide)
        args = (logits, target, weights, ignore, classes, smoothing, world_size)
        pair = emit(VOCAB_SMOOTHED_NLL.overload, *args)
    loss = emit(operator.getitem, pair, 0)
    # ATen's codes: 0 none, 1 mean, 2 sum.
    if values["reduction"] != 0:
        loss = emit(_aten.sum.default, loss)
    if values["reduction"] == 1:
        # The mean is over the tokens that are not ignored.
        counted = emit(_aten.ne.Scalar, target, ignore)
        if weight is not None:  # a label counts with the weight of its class
            index = emit(_aten.where.ScalarOther, counted, target, 0)
            own = emit(_aten.index.Tensor, weight, [index])
            counted = emit(_aten.where.ScalarOther, counted, own, 0)
        loss = emit(_aten.div.Tensor, loss, emit(_aten.sum.default, counted))
    return _as(dtype, loss, emit)


def _wide(value: Node, emit: Emit) -> Node:
    """Return ``value`` in at least 32 bits, in which torch's kernels compute and accumulate.

    A logsumexp of 16 bits is off by more than the loss of a row that is predicted well, and so is
    its gradient; in float16 the sum of many rows would overflow.
    """
    return _as(torch.promote_types(value.meta["val"].dtype, torch.float32), value, emit)


def _as(dtype: torch.dtype, value: Node, emit: Emit) -> Node:
    is_already = value.meta["val"].dtype == dtype
    return value if is_already else emit(_aten._to_copy.default, value, dtype=dtype)


def _logsumexp(node: Node, values: dict[str, Any], world_size: int, emit: Emit) -> Node:
    return _rows(node, values["self"], world_size, emit)


def _rows(node: Node, logits: Node, world_size: int, emit: Emit) -> Node:
    classes = arguments(node)["self"].meta["val"].shape[-1]
    return emit(VOCAB_LOGSUMEXP.overload, logits, classes, world_size)


def _log_softmax(node: Node, values: dict[str, Any], world_size: int, emit: Emit) -> Node:
    logits, dtype = values["self"], values["dtype"]
    logits = _as(dtype or logits.meta["val"].dtype, logits, emit)
    dtype, logits = logits.meta["val"].dtype, _wide(logits, emit)
    rows = emit(_aten.unsqueeze.default, _rows(node, logits, world_size, emit), -1)
    # Every rank subtracts it from its own columns: its gradient is a sum over the ranks.
    rows = emit(CONVERT.overload, rows, "I", "R", world_size)
    rows.meta["placement"] = R
    return _as(dtype, emit(_aten.sub.Tensor, logits, rows), emit)


_LOWERINGS: dict[object, Callable[[Node, dict[str, Any], int, Emit], Node]] = {
    _aten.embedding.default: _embedding,
    _aten.cross_entropy_loss.default: _loss,
    _aten.logsumexp.default: _logsumexp,
    _aten.log_softmax.int: _log_softmax,
}
