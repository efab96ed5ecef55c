"""Calls of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.op_samples.draw import Args, Draw, Sample

aten = torch.ops.aten


def _batches(draw: Draw) -> Args:
    """Attention with other numbers of dims in front of the heads, as of windows, or without."""
    query, key, value, mask, *rest = _attention(draw)
    batch = draw.one_of((), (draw.size(), query.shape[0]))
    if not batch:
        query, key, value = query[0], key[0], value[0]
        mask = mask[0] if mask is not None and mask.dim() == 4 else mask
    else:
        query, key, value = (x.expand(*batch, *x.shape[1:]).clone() for x in (query, key, value))
    return [query, key, value, mask, *rest]


def _heads(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the same number of heads."""
    batch, heads, q, k, d = draw.size(), draw.size(), draw.size(), draw.size(), draw.one_of(2, 4)
    shapes = (batch, heads, q, d), (batch, heads, k, d), (batch, heads, k, d)
    return tuple(draw.numbers(*shape) for shape in shapes)  # type: ignore[return-value]


def _attention(draw: Draw) -> Args:
    query, key, value = _heads(draw)
    if draw.one_of(True, False):
        groups = max(1, query.shape[1] // draw.one_of(1, 2, 2 * draw.world_size))
        if query.shape[1] % groups == 0:
            key, value = key[:, :groups].clone(), value[:, :groups].clone()
    scores = (*query.shape[:3], key.shape[2])
    narrower = draw.narrower(scores)
    bias = draw.numbers(*(narrower if len(narrower) > 1 else scores[2:]))
    mask = draw.one_of(None, bias, draw.mask(*scores[2:]))
    causal = mask is None and draw.one_of(True, False)
    if mask is not None and mask.dtype == torch.bool:
        mask[:, 0] = True
    return [query, key, value, mask, 0.0, causal, {"enable_gqa": key.shape != query.shape}]


def _flash(draw: Draw) -> Args:
    query, key, value = _heads(draw)
    return [query, key, value, 0.0, draw.one_of(True, False)]


def _flash_backward(draw: Draw) -> Args:
    args = _flash(draw)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*args)
    return [draw.numbers(*out.shape), *args[:3], out, logsumexp, *args[3:]]


_CPU_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
SAMPLES: dict[str, Sample] = {
    "aten::scaled_dot_product_attention": lambda draw: draw.one_of(_attention, _batches)(draw),
    _CPU_FLASH: _flash,
    f"{_CPU_FLASH}_backward": _flash_backward,
}
