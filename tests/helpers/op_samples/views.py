"""Calls of views."""

from __future__ import annotations

import math

import torch

from tests.helpers.op_samples.draw import Args, Draw, Sample

aten = torch.ops.aten


def _reshape(draw: Draw) -> Args:
    """Another way to cut the same elements, perhaps with dims of size 1."""
    shape = draw.shape(1, 4)
    atoms = [f for size in shape for f in draw.one_of([size], _split_size(size, draw.world_size))]
    result, start = [], 0
    while start < len(atoms):
        end = draw.random.randint(start + 1, len(atoms))
        result += [math.prod(atoms[start:end]), *draw.one_of([], [], [1])]
        start = end
    return [draw.numbers(*shape), result]


def _split_size(size: int, world_size: int) -> list[int]:
    return [size // world_size, world_size] if size % world_size == 0 else [size]


def _flatten(draw: Draw) -> Args:
    shape = draw.shape()
    start = draw.random.randrange(len(shape))
    return [draw.numbers(*shape), start, draw.random.randrange(start, len(shape))]


def _unflatten(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return [draw.numbers(*shape), dim, _split_size(shape[dim], draw.world_size)]


def _permute(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.random.sample(range(len(shape)), len(shape))]


def _movedims(draw: Draw) -> Args:
    shape = draw.shape(2)
    pair = [draw.random.sample(range(len(shape)), 2) for _ in range(2)]
    return [draw.numbers(*shape), *pair]


def _movedim(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.dim(len(shape)), draw.dim(len(shape))]


def _unsqueeze(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.dim(len(shape) + 1)]


def _expand(draw: Draw) -> Args:
    shape = draw.shape(1, 4)
    return [draw.numbers(*draw.narrower(shape)), list(shape)]


def _complex(draw: Draw) -> Args:
    shape = draw.shape()
    return [torch.complex(draw.numbers(*shape), draw.numbers(*shape))]


def _pixels(draw: Draw, *, is_shuffle: bool) -> Args:
    """Images behind any number of batch dims."""
    ratio, channels, *sides = draw.one_of(1, 2, 3), draw.size(), draw.size(), draw.size()
    batch = draw.one_of((), draw.shape(1, 2))
    if is_shuffle:
        return [draw.numbers(*batch, channels * ratio**2, *sides), ratio]
    return [draw.numbers(*batch, channels, *(side * ratio for side in sides)), ratio]


SAMPLES: dict[str, Sample] = {
    **dict.fromkeys(("aten::reshape", "aten::view", "aten::_unsafe_view"), _reshape),
    "aten.view.dtype": lambda draw: [draw.numbers(*draw.shape()), torch.int64],
    "aten::flatten": _flatten,
    "aten::unflatten": _unflatten,
    "aten::t": lambda draw: [draw.numbers(*draw.shape(1, 2))],
    "aten::permute": _permute,
    "aten.movedim.int": _movedim,
    "aten.movedim.intlist": _movedims,
    "aten::unsqueeze": _unsqueeze,
    "aten::expand": _expand,
    "aten::pixel_shuffle": lambda draw: _pixels(draw, is_shuffle=True),
    "aten::pixel_unshuffle": lambda draw: _pixels(draw, is_shuffle=False),
    "aten::view_as_real": _complex,
    "aten::view_as_complex": lambda draw: [draw.numbers(*draw.shape(), 2)],
}
