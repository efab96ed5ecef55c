"""Calls of norms."""

from __future__ import annotations

import math

import torch

from tests.helpers.op_samples.draw import Args, Draw, Sample

aten = torch.ops.aten


def _norm(draw: Draw, num_affine: int, eps: bool = True) -> Args:
    shape = draw.shape(2, 4)
    last = shape[draw.one_of(-1, -1, 1) :]
    affine = draw.one_of([None] * num_affine, [draw.numbers(*last) for _ in range(num_affine)])
    return [draw.numbers(*shape), list(last), *affine, *([1e-3] if eps else [])]


def _layer_norm_backward(draw: Draw) -> Args:
    x, last, *_ = _norm(draw, 0)
    weight, bias = draw.numbers(*last), draw.numbers(*last)
    _, mean, rstd = aten.native_layer_norm(x, last, weight, bias, 1e-3)
    return [draw.numbers(*x.shape), x, last, mean, rstd, weight, bias, [True] * 3]


def _rms_norm_backward(draw: Draw) -> Args:
    x, last, weight, eps = _norm(draw, 1)
    _, rstd = aten._fused_rms_norm(x, last, weight, eps)
    return [draw.numbers(*x.shape), x, last, rstd, weight, [True, weight is not None]]


def _group_norm(draw: Draw) -> Args:
    groups, shape = draw.size(), (draw.size(), *draw.shape(0, 2))
    channels = groups * draw.one_of(1, 3)
    affine = draw.one_of([None] * 2, [draw.numbers(channels), draw.numbers(channels)])
    return [draw.numbers(shape[0], channels, *shape[1:]), groups, *affine, 1e-3]


def _native_group_norm(draw: Draw) -> Args:
    x, groups, weight, bias, eps = _group_norm(draw)
    return [x, weight, bias, *x.shape[:2], math.prod(x.shape[2:]), groups, eps]


def _group_norm_backward(draw: Draw) -> Args:
    x, weight, bias, *sizes, eps = _native_group_norm(draw)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, eps)
    mask = [True, weight is not None, weight is not None]
    return [draw.numbers(*x.shape), x, mean, rstd, weight, *sizes, mask]


def _batch_norm(draw: Draw) -> Args:
    x = draw.numbers(draw.size() + 1, draw.size(), *draw.one_of((), (3,), (2, 3)))
    weight, bias, mean = (draw.numbers(x.shape[1]) for _ in range(3))
    return [x, weight, bias, mean, draw.numbers(x.shape[1]).exp(), True, 0.1, 1e-5]


def _batch_norm_without_statistics(draw: Draw) -> Args:
    x, weight, bias, _, _, *rest = _batch_norm(draw)
    return [x, weight, bias, *rest]


def _batch_norm_of_running(draw: Draw) -> Args:
    *tensors, _, momentum, eps = _batch_norm(draw)
    return [*tensors, momentum, eps]


def _batch_norm_backward(draw: Draw) -> Args:
    x, weight, bias, mean, variance, _, *rest = _batch_norm(draw)
    training = draw.one_of(True, False)
    saved = aten.native_batch_norm(x, weight, bias, mean.clone(), variance, training, *rest)[1:]
    grad = draw.numbers(*x.shape)
    return [grad, x, weight, mean, variance, *saved, training, 1e-5, [True] * 3]


SAMPLES: dict[str, Sample] = {
    "aten::_native_batch_norm_legit_functional": _batch_norm,
    "aten::_native_batch_norm_legit": _batch_norm_without_statistics,
    "aten::_native_batch_norm_legit_no_training": _batch_norm_of_running,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::group_norm": _group_norm,
    "aten::native_group_norm": _native_group_norm,
    "aten::native_group_norm_backward": _group_norm_backward,
    "aten::layer_norm": lambda draw: _norm(draw, 2),
    "aten::native_layer_norm": lambda draw: _norm(draw, 2),
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::rms_norm": lambda draw: _norm(draw, 1),
    "aten::_fused_rms_norm": lambda draw: _norm(draw, 1),
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
}
