"""Calls of products and convolutions."""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401 - registers the grouped product

from tests.helpers.op_samples.draw import Args, Draw, Sample, Shape

aten = torch.ops.aten


def _linear(draw: Draw) -> Args:
    """With a bias for each output, or the same one for all."""
    *lead, inner = draw.shape(1)
    out = draw.size()
    bias = draw.one_of(None, (out,), (out,), (), (1,))
    summand = [] if bias is None else [draw.numbers(*bias)]
    return [draw.numbers(*lead, inner), draw.numbers(out, inner), *summand]


def _product(draw: Draw, batch: Shape, other: Shape | None = None) -> Args:
    m, k, n = draw.size(), draw.size(), draw.size()
    return [draw.numbers(*batch, m, k), draw.numbers(*(batch if other is None else other), k, n)]


def _matmul(draw: Draw) -> Args:
    batch = draw.shape(0, 2)
    batches = [batch, draw.narrower(batch) if batch else ()]
    draw.random.shuffle(batches)
    return _product(draw, *batches)


def _added_product(draw: Draw, batch: Shape) -> Args:
    left, right = _product(draw, batch)
    result = (*batch, left.shape[-2], right.shape[-1])
    return [draw.numbers(*draw.narrower(result)), left, right]


def _distance(draw: Draw, *, norm: bool = True) -> Args:
    """Of rows of two batches, or of one that the other lacks."""
    batch = draw.shape(0, 2)
    other = draw.narrower(batch) if batch and norm else batch
    m, n, k = draw.size(), draw.size(), draw.size()
    return [draw.numbers(*batch, m, k), draw.numbers(*other, n, k), *([2.0] * norm)]


def _distance_backward(draw: Draw) -> Args:
    x, y, p = _distance(draw)
    y = y.expand(*x.shape[:-2], *y.shape[-2:]).contiguous()
    between = aten._cdist_forward(x, y, p, None)
    return [torch.randn_like(between), x, y, p, between]


def _cross(draw: Draw) -> Args:
    shape = (*draw.shape(1, 2), 3)
    other = draw.narrower(shape)
    other = (*other[:-1], 3) if other else (3,)
    return [draw.numbers(*shape), draw.numbers(*other)]


def _convolution(draw: Draw, num_dims: int = 1) -> Args:
    batch, groups = draw.size(), draw.one_of(1, 1, 2)
    channels, out = groups * draw.one_of(1, 3), groups * draw.world_size * draw.one_of(1, 2)
    image = draw.numbers(batch, channels, *[6 + n for n in range(num_dims)])
    weight = draw.numbers(out, channels // groups, *[2] * num_dims)
    bias = draw.one_of(None, draw.numbers(out))
    settings = [[stride] * num_dims for stride in (draw.one_of(1, 2), draw.one_of(0, 1), 1)]
    return [image, weight, bias, *settings, groups]


def _any_convolution(draw: Draw) -> Args:
    image, weight, bias, *settings, groups = _convolution(draw, draw.one_of(1, 2, 3))
    is_transposed = draw.one_of(False, False, True)
    if is_transposed:  # of a group, the weight has all inputs and the outputs of one
        shape = image.shape[1], len(weight) // groups, *weight.shape[2:]
        weight = draw.numbers(*shape)
    return [image, weight, bias, *settings, is_transposed, [0] * len(settings[0]), groups]


def _triangle(draw: Draw) -> Args:
    """Against either side, of a batch that one may lack."""
    batch, m, n = draw.shape(0, 2), draw.size(), draw.size()
    is_left = draw.one_of(True, False)
    size = m if is_left else n
    other = draw.narrower(batch) if batch else ()
    matrix = draw.numbers(*other, size, size) / size + 2 * torch.eye(size)
    return [matrix, draw.numbers(*batch, m, n), {"upper": False, "left": is_left}]


def _convolution_padding(draw: Draw, num_dims: int) -> Args:
    image, weight, bias, stride, _, dilation, groups = _convolution(draw, num_dims)
    return [image, weight, bias, stride, "valid", dilation, groups]


def _convolution_backward(draw: Draw) -> Args:
    args = _any_convolution(draw)
    grad = torch.ops.aten.convolution(*args)
    image, weight, _, *settings = args
    sizes = [grad.shape[1]]
    return [draw.numbers(*grad.shape), image, weight, sizes, *settings, [True] * 3]


def _grouped_product(draw: Draw) -> Args:
    """Rows sorted by expert, a matrix an expert, and where the rows of each end."""
    rows, experts, inner, out = draw.size(), draw.size(), draw.size(), draw.size()
    ends = draw.ids(rows + 1, experts).sort().values
    ends[-1] = rows
    factors = [draw.numbers(rows, inner), draw.numbers(experts, inner, out)]
    return [*factors, ends.to(torch.int32)]


def _grouped_product_backward(draw: Draw) -> Args:
    rows, weight, ends = _grouped_product(draw)
    return [rows, weight, ends, draw.numbers(len(rows), weight.shape[2])]


SAMPLES: dict[str, Sample] = {
    "aten::linear": _linear,
    "aten::mm": lambda draw: _product(draw, ()),
    "aten::bmm": lambda draw: _product(draw, (draw.size(),)),
    "aten::matmul": _matmul,
    "aten::addmm": lambda draw: _added_product(draw, ()),
    "aten::baddbmm": lambda draw: _added_product(draw, (draw.size(),)),
    "aten::cdist": _distance,
    "aten::_cdist_forward": lambda draw: [*_distance(draw), None],
    "aten::_euclidean_dist": lambda draw: _distance(draw, norm=False),
    "aten::_cdist_backward": _distance_backward,
    "aten::linalg_cross": _cross,
    "aten::linalg_solve_triangular": _triangle,
    "aten::convolution": _any_convolution,
    "aten::conv1d": lambda draw: _convolution(draw, 1),
    "aten::conv2d": lambda draw: _convolution(draw, 2),
    "aten::conv3d": lambda draw: _convolution(draw, 3),
    "aten.conv1d.padding": lambda draw: _convolution_padding(draw, 1),
    "aten.conv2d.padding": lambda draw: _convolution_padding(draw, 2),
    "aten.conv3d.padding": lambda draw: _convolution_padding(draw, 3),
    "aten::convolution_backward": _convolution_backward,
    "transformers::grouped_mm_fallback": _grouped_product,
    "transformers::grouped_mm_fallback_backward": _grouped_product_backward,
}
