"""Calls of pooling, resampling, padding and patches."""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from sp_compiler.rules.families.images import PADS, POOLS, UPSAMPLE
from tests.helpers.op_samples.draw import Args, Draw, Sample

aten = torch.ops.aten


def _image(draw: Draw, num_dims: int, *, batch: bool = True) -> Tensor:
    """Of ``num_dims`` dims, perhaps without a batch dim."""
    front = (draw.size(), draw.size())
    return draw.numbers(*front[not batch :], *[4 + dim for dim in range(num_dims)])


def _num_dims(name: str) -> int:
    found = re.search(r"(\d)d", name)
    assert found is not None
    return int(found[1])


def _pool(draw: Draw, name: str) -> Args:
    num_dims = _num_dims(name)
    x = _image(draw, num_dims, batch=draw.one_of(True, True, False))
    if "adaptive" in name:
        return [x, [draw.one_of(2, 3) for _ in range(num_dims)]]
    kernel, stride, padding = ([n] * num_dims for n in (2, draw.one_of(1, 2), draw.one_of(0, 1)))
    return [x, kernel, stride, padding]


def _pool_backward(draw: Draw, name: str) -> Args:
    """With the arguments that a gradient has no defaults for."""
    forward = name.removesuffix("_backward")
    x, *args = _pool(draw, forward)
    results = getattr(aten, forward.removeprefix("aten::"))(x, *args)
    if isinstance(results, tuple):
        args += [] if "adaptive" in name else [[1] * len(args[0]), False]
        return [torch.randn_like(results[0]), x, *args * ("adaptive" not in name), results[1]]
    args = [] if "adaptive" in name else [*args, False, True, None]
    return [torch.randn_like(results), x, *args]


def _upsample(draw: Draw, name: str, *, backward: bool = False) -> Args:
    num_dims = _num_dims(name)
    x = _image(draw, num_dims)
    size = [draw.one_of(3, 5, 8) for _ in range(num_dims)]
    align = [] if "nearest" in name else [draw.one_of(True, False)]
    if backward:
        return [draw.numbers(*x.shape[:2], *size), size, list(x.shape), *align]
    return [x, size, *align]


def _upsample_by_vectors(draw: Draw, name: str) -> Args:
    """Of a size or of factors."""
    x, size, *align = _upsample(draw, name)
    sizes = draw.one_of([size, None], [None, [1.5] * len(size)])
    return [x, sizes[0], *align, sizes[1]]


def _pad(draw: Draw, name: str) -> Args:
    """By other numbers at either end; with the gradient in front for a backward."""
    num_dims = _num_dims(name)
    x = _image(draw, num_dims, batch=draw.one_of(True, False))
    padding = [1, 2] * num_dims
    if not name.endswith("_backward"):
        return [x, padding]
    size = [side + 3 for side in x.shape[-num_dims:]]
    return [draw.numbers(*x.shape[:-num_dims], *size), x, padding]


def _patches(draw: Draw) -> Args:
    x = _image(draw, 2, batch=draw.one_of(True, False))
    return [x, [2, 2], [1, 1], [draw.one_of(0, 1)] * 2, [draw.one_of(1, 2)] * 2]


def _image_of_patches(draw: Draw) -> Args:
    x, *args = _patches(draw)
    patches = aten.im2col(x, *args)
    return [torch.randn_like(patches), list(x.shape[-2:]), *args]


def _sampled(draw: Draw, num_dims: int) -> Args:
    x = _image(draw, num_dims)
    grid = draw.numbers(len(x), *[2 + dim for dim in range(num_dims)], num_dims)
    return [x, grid, 0, draw.one_of(0, 1), draw.one_of(True, False)]


def _sampled_backward(draw: Draw, num_dims: int) -> Args:
    x, grid, *args = _sampled(draw, num_dims)
    size = (*x.shape[:2], *grid.shape[1:-1])
    return [draw.numbers(*size), x, grid, *args, [True, True]]


def _samples() -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    for name in POOLS:
        make = _pool_backward if name.endswith("_backward") else _pool
        found[name] = functools.partial(make, name=name)
    for name in PADS:
        found[name] = functools.partial(_pad, name=name)
    for name in UPSAMPLE:
        found[name] = functools.partial(_upsample, name=name)
        found[f"{name.replace('::', '.')}.vec"] = functools.partial(_upsample_by_vectors, name=name)
        found[f"{name}_backward"] = functools.partial(_upsample, name=name, backward=True)
    for num_dims in (2, 3):
        name = f"aten::grid_sampler_{num_dims}d"
        found[name] = functools.partial(_sampled, num_dims=num_dims)
        found[f"{name}_backward"] = functools.partial(_sampled_backward, num_dims=num_dims)
    return found


SAMPLES: dict[str, Sample] = {
    **_samples(),
    "aten::grid_sampler": lambda draw: _sampled(draw, 2),
    "aten::im2col": _patches,
    "aten::col2im": _image_of_patches,
}
