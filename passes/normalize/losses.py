"""Losses as operators that can be sharded, by class or by element."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, is_call, shape_of
from sp_compiler.ir.op_traits import RESHAPES
from sp_compiler.ir.rewriting import insert_call, replace_call, replace_with
from sp_compiler.ir.symbolic import same_shape

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's enumeration of reductions
_NO_LABEL = -(2**31)
"""``ignore_index`` where nothing is ignored: with torch's default, -100 would not be an error."""
_RESHAPED = (*RESHAPES, _aten.flatten.using_ints)


def cross_entropy(node: Node) -> None:
    """(b, v, s) -> (b * s, v): the loss over a sharded vocabulary takes rows of logits.

    Models transpose to put classes into dim 1; those transposes and the ones here cancel.
    """
    args = arguments(node)
    logits, target = args["self"], args["target"]
    if target.meta["val"].dtype.is_floating_point:
        _of_probabilities(node)
        return
    if len(shape_of(logits)) < 3:
        return
    flat = _call(node, _aten.reshape.default, target, [-1])
    rest = (args["weight"], args["reduction"], args["ignore_index"], args["label_smoothing"])
    new = (_rows(node, logits), flat, *rest)
    if args["reduction"]:
        replace_call(node, node.target, new, origin=_ORIGIN)
        return
    losses = _call(node, node.target, *new)
    replace_call(node, _aten.reshape.default, (losses, list(shape_of(node))), origin=_ORIGIN)


def _of_probabilities(node: Node) -> None:
    """``-sum(target * weight * log_softmax(x))`` of each row, as torch itself computes it."""
    args = arguments(node)
    logits, target = _rows(node, args["self"]), _rows(node, args["target"])
    smoothing, classes = args["label_smoothing"], shape_of(logits)[-1]
    if smoothing:
        target = _call(node, _aten.mul.Tensor, target, 1 - smoothing)
        target = _call(node, _aten.add.Tensor, target, smoothing / classes)
    if args["weight"] is not None:
        target = _call(node, _aten.mul.Tensor, target, args["weight"])
    log_probabilities = _call(node, _aten.log_softmax.int, logits, -1)
    products = _call(node, _aten.mul.Tensor, log_probabilities, target)
    losses = _call(node, _aten.neg.default, _call(node, _aten.sum.dim_IntList, products, [-1]))
    if args["reduction"]:
        # Not a mean of the products: each rank can compute its share of a sum over classes.
        losses = _call(node, _aten.sum.default, losses)
    else:
        losses = _call(node, _aten.reshape.default, losses, list(shape_of(node)))
    if args["reduction"] == _MEAN and len(shape_of(logits)) > 1:
        losses = _call(node, _aten.div.Tensor, losses, shape_of(logits)[0])
    replace_with(node, losses)


def _rows(node: Node, x: Node) -> Node:
    """Return ``x`` with classes in dim 1 as rows of classes."""
    shape = shape_of(x)
    if len(shape) < 3:
        return x
    for dim in range(1, len(shape) - 1):
        x = _call(node, _aten.transpose.int, x, dim, dim + 1)
    return _call(node, _aten.reshape.default, x, [-1, shape[1]])


def nll_loss(node: Node) -> None:
    """Rewrite the loss of rows of ``log_softmax(x)`` to the fused loss, which shards by class."""
    args = arguments(node)
    shape, source = shape_of(args["self"]), args["self"]
    while is_call(source, *_RESHAPED):
        source = source.args[0]
    if len(shape) != 2 or not is_call(source, _aten.log_softmax.int):
        return
    softmax, of_softmax = arguments(source), shape_of(source)
    if softmax["dim"] not in (-1, len(of_softmax) - 1) or of_softmax[-1] != shape[-1]:
        return
    logits = softmax["self"]
    if softmax["dtype"] is not None:
        logits = _call(node, _aten._to_copy.default, logits, dtype=softmax["dtype"])
    if len(of_softmax) != 2:
        logits = _call(node, _aten.reshape.default, logits, list(shape))
    rest = (args["target"], args["weight"], args["reduction"], args["ignore_index"])
    replace_call(node, _aten.cross_entropy_loss.default, (logits, *rest), origin=_ORIGIN)


def picked_log_probabilities(node: Node) -> None:
    """``log_softmax(x).gather(-1, y)`` of a label per row -> ``-cross_entropy(x, y)``."""
    args = arguments(node)
    source, index, shape = args["self"], args["index"], shape_of(node)
    last = len(shape) - 1
    if not is_call(source, _aten.log_softmax.int) or len(source.users) > 1 or last < 1:
        return
    softmax = arguments(source)
    # A gather along another dim, or of several classes per row, is not a loss.
    if {args["dim"], softmax["dim"]} - {-1, last} or not same_shape(shape[-1:], (1,)):
        return
    # A gather may leave rows out.
    if not same_shape(shape[:-1], shape_of(source)[:-1]):
        return
    logits = softmax["self"]
    if softmax["dtype"] is not None:
        logits = _call(node, _aten._to_copy.default, logits, dtype=softmax["dtype"])
    logits = _call(node, _aten.reshape.default, logits, [-1, shape_of(logits)[-1]])
    labels = _call(node, _aten.reshape.default, index, [-1])
    losses = _call(node, _aten.cross_entropy_loss.default, logits, labels, None, _NONE, _NO_LABEL)
    picked = _call(node, _aten.neg.default, losses)
    replace_call(node, _aten.reshape.default, (picked, list(shape)), origin=_ORIGIN)


def kl_div(node: Node) -> None:
    """``t * (log(t) - x)``, 0 where ``t`` is 0; for ``t`` in logarithms, ``exp(t) * (t - x)``."""
    args = arguments(node)
    x, target = args["self"], args["target"]
    if args["log_target"]:
        difference = _call(node, _aten.sub.Tensor, target, x)
        weight = _call(node, _aten.exp.default, target)
        losses = _call(node, _aten.mul.Tensor, weight, difference)
    else:
        entropy = _call(node, _aten.xlogy.Tensor, target, target)
        crossed = _call(node, _aten.mul.Tensor, target, x)
        losses = _call(node, _aten.sub.Tensor, entropy, crossed)
    _reduce(node, losses)


def loss_of_elements(node: Node) -> None:
    """Rewrite a mean or a sum of losses of elements to the losses, and their mean or sum.

    Each rank has the losses of its part; the reduced loss would need the whole tensors.
    """
    args = arguments(node)
    if args["reduction"] == _NONE:
        return
    names = [argument.name for argument in node.target._schema.arguments]
    each = [_NONE if name == "reduction" else args[name] for name in names]
    _reduce(node, _call(node, node.target, *each))


def binary_cross_entropy_with_logits(node: Node) -> None:
    """``(1 - t) * x - log_sigmoid(x)``, with ``pos_weight`` times the last term where ``t`` is
    1."""
    args = arguments(node)
    x, target = args["self"], args["target"]
    rest = _call(node, _aten.add.Tensor, _call(node, _aten.neg.default, target), 1)
    losses = _call(node, _aten.mul.Tensor, rest, x)
    logarithm = _call(node, _aten.log_sigmoid.default, x)
    if args["pos_weight"] is not None:
        more = _call(node, _aten.sub.Tensor, args["pos_weight"], 1)
        factor = _call(node, _aten.mul.Tensor, more, target)
        factor = _call(node, _aten.add.Tensor, factor, 1)
        logarithm = _call(node, _aten.mul.Tensor, factor, logarithm)
    losses = _call(node, _aten.sub.Tensor, losses, logarithm)
    if args["weight"] is not None:
        losses = _call(node, _aten.mul.Tensor, losses, args["weight"])
    _reduce(node, losses)


def _reduce(node: Node, losses: Node) -> None:
    """Replace ``node`` by ``losses`` of elements, reduced as its ``reduction`` says."""
    reduction = arguments(node)["reduction"]
    if reduction == _MEAN:
        losses = _call(node, _aten.mean.default, losses)
    elif reduction == _SUM:
        losses = _call(node, _aten.sum.default, losses)
    replace_with(node, losses)


def multilabel_margin_loss(node: Node) -> None:
    """Rewrite the loss to its definition, ``max(0, 1 - x[label] + x[other])`` over all such pairs.

    PyTorch's own decomposition, which a trace of its gradient runs, also counts the entries after
    the -1 that ends a row of labels.
    """
    args = arguments(node)
    x, target = args["self"], args["target"]
    if len(shape_of(x)) < 2:
        x, target = (_call(node, _aten.unsqueeze.default, each, 0) for each in (x, target))
    classes = shape_of(x)[-1]
    ends = _call(node, _aten.eq.Scalar, target, -1)
    is_label = _call(node, _aten.eq.Scalar, _call(node, _aten.cumsum.default, ends, -1), 0)
    labels = _call(node, _aten.mul.Tensor, target, is_label)  # 0 where there is none
    all_classes = _call(node, _aten.arange.default, classes, device=target.meta["val"].device)
    named = _call(node, _aten.eq.Tensor, _column(node, labels), all_classes)
    named = _call(node, _aten.bitwise_and.Tensor, named, _column(node, is_label))
    others = _call(node, _aten.logical_not.default, _call(node, _aten.any.dim, named, -2))
    pairs = _call(node, _aten.unsqueeze.default, others, -2)
    pairs = _call(node, _aten.bitwise_and.Tensor, pairs, _column(node, is_label))
    picked = _column(node, _call(node, _aten.gather.default, x, -1, labels))
    margins = _call(node, _aten.sub.Tensor, _call(node, _aten.unsqueeze.default, x, -2), picked)
    margins = _call(node, _aten.relu.default, _call(node, _aten.add.Tensor, margins, 1))
    losses = _call(node, _aten.mul.Tensor, margins, pairs)
    losses = _call(
        node, _aten.div.Tensor, _call(node, _aten.sum.dim_IntList, losses, [-2, -1]), classes
    )
    if args["reduction"]:
        reduce = _aten.mean.default if args["reduction"] == _MEAN else _aten.sum.default
        losses = _call(node, reduce, losses)
    else:
        # Not the node's shape: of one sample, torch's fake kernel makes another than the real one.
        losses = _call(node, _aten.reshape.default, losses, list(shape_of(args["target"])[:-1]))
    replace_with(node, losses)


def _column(node: Node, x: Node) -> Node:
    return _call(node, _aten.unsqueeze.default, x, -1)


def _call(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    return insert_call(node, target, args, kwargs, origin=_ORIGIN)
