"""Calls of lookups and losses over a vocabulary, slices, joins and indices."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.helpers.op_samples.draw import Args, Draw, Sample, Shape

aten = torch.ops.aten


def _embedding(draw: Draw) -> Args:
    rows = 2 * draw.size()
    ids = draw.ids(rows, *draw.shape())
    return [draw.numbers(rows, draw.size()), ids, draw.one_of(-1, 1), draw.one_of(True, False)]


def _embedding_backward(draw: Draw) -> Args:
    table, ids, padding, by_frequency = _embedding(draw)
    grad = draw.numbers(*ids.shape, table.shape[1])
    return [grad, ids, table.shape[0], padding, by_frequency]


def _loss(draw: Draw) -> Args:
    rows, classes = draw.size() + 1, 2 * draw.size()
    target = draw.ids(classes, rows)
    target[0] = draw.one_of(-100, 0)
    return [draw.numbers(rows, classes), target, None, draw.one_of(0, 1, 2), -100]


def _bags(draw: Draw) -> Args:
    """Of sums, means or largest elements; with a factor for each index, of sums alone."""
    entries, bags, width = draw.size(), draw.size(), draw.size()
    ids = draw.ids(entries, 3 * bags)
    mode = draw.one_of(0, 1, 2)
    factors = draw.one_of(None, draw.numbers(len(ids))) if mode == 0 else None
    table, offsets = draw.numbers(entries, width), torch.arange(bags) * 3
    return [table, ids, offsets, False, mode, False, factors]


def _bags_backward(draw: Draw, name: str) -> Args:
    """Of what the lookup leaves for it."""
    table, ids, offsets, *settings, factors = _bags(draw)
    out, bag_of, sizes, largest = aten._embedding_bag(table, ids, offsets, *settings, factors)
    grad, (by_frequency, mode, sparse) = torch.randn_like(out), settings
    if name == "_per_sample_weights":
        return [grad, table, ids, offsets, bag_of, 0]
    bag_of = torch.arange(len(ids)) // 3  # on a CPU, sums leave none
    if name == "_dense":
        return [grad, ids, bag_of, sizes, largest, len(table), by_frequency, mode, factors]
    return [
        *(grad, ids, offsets, bag_of, sizes, largest, len(table)),
        *(by_frequency, mode, sparse, factors),
    ]


def _slice(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    start = draw.random.randrange(shape[dim])
    end = draw.random.randrange(start, shape[dim]) + 1
    return [draw.numbers(*shape), dim, start, end, draw.one_of(1, 1, 2)]


def _narrow(draw: Draw) -> Args:
    x, dim, start, end, _ = _slice(draw)
    return [x, dim, start, end - start]


def _select(draw: Draw) -> Args:
    x, dim, start, *_ = _slice(draw)
    return [x, dim, draw.one_of(start, start - x.shape[dim])]


def _slice_backward(draw: Draw) -> Args:
    x, *rest = _slice(draw)
    return [draw.numbers(*aten.slice.Tensor(x, *rest).shape), list(x.shape), *rest]


def _select_backward(draw: Draw) -> Args:
    x, *rest = _select(draw)
    return [draw.numbers(*aten.select.int(x, *rest).shape), list(x.shape), *rest]


def _roll(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.one_of([], [draw.dim(len(shape))])
    return [draw.numbers(*shape), [draw.one_of(1, -2)], dim]


def _split(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return [draw.numbers(*shape), draw.parts(shape[dim]), dim]


def _unbind(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.dim(len(shape))]


def _cat(draw: Draw) -> Args:
    shape = list(draw.shape())
    dim = draw.dim(len(shape))
    tensors = []
    for _ in range(draw.random.randint(1, 3)):
        shape[dim] = draw.size()
        tensors.append(draw.numbers(*shape))
    return [tensors, dim]


def _cat_with_nothing(draw: Draw) -> Args:
    """``cat`` skips an empty vector, whatever the rank of the others."""
    tensors, dim = _cat(draw)
    return [[*tensors, *draw.one_of([], [draw.numbers(0)])], dim]


def _stack(draw: Draw) -> Args:
    shape = draw.shape()
    return [[draw.numbers(*shape) for _ in range(draw.world_size)], draw.dim(len(shape) + 1)]


def _padding(draw: Draw, shape: Shape) -> list[int]:
    """Some of it negative: with the opposite on the other side the size stays as it is."""
    dims = draw.random.randint(1, len(shape))
    pairs = [draw.one_of((0, 0), (1, 2), (1, -1), (-1, 1)) for _ in range(dims)]
    return [
        number
        for size, pair in zip(reversed(shape), pairs, strict=False)
        for number in (pair if size > 1 else (0, 0))
    ]


def _pad(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), _padding(draw, shape), *draw.one_of([], [0.0], [0.5])]


def _pad_mode(draw: Draw) -> Args:
    mode = draw.one_of("constant", "circular", "replicate")
    if mode == "constant":
        x, padding, *value = _pad(draw)
        return [x, padding, mode, *value]
    return [draw.numbers(draw.size(), draw.size(), 6), [1, 2], mode]


def _indexed(draw: Draw) -> tuple[Shape, list[Any], Shape]:
    """A shape, index tensors for some of its dims, and the shape of what they pick."""
    shape = draw.shape()
    first = draw.random.randrange(len(shape))
    last = draw.random.randrange(first, len(shape)) + 1
    picked = draw.shape(0, 2)
    indices: list[Any] = [None] * first
    indices += [
        draw.ids(shape[dim], *draw.narrower(picked) if picked else ()) for dim in range(first, last)
    ]
    if picked:
        indices[first] = draw.ids(shape[first], *picked)
    return shape, indices, (*shape[:first], *picked, *shape[last:])


def _index(draw: Draw) -> Args:
    shape, indices, _ = _indexed(draw)
    return [draw.numbers(*shape), indices]


def _index_put(draw: Draw) -> Args:
    shape, indices, picked = _indexed(draw)
    values = draw.numbers(*draw.narrower(picked) if picked else ())
    return [draw.numbers(*shape), indices, values, draw.one_of(True, True, False)]


def _gather(draw: Draw) -> Args:
    """Along one dim as many as it has or another number, of others all or some."""
    shape = draw.shape()
    dim = draw.dim(len(shape))
    picked = [draw.one_of(size, size, max(1, size // 2)) for size in shape]
    picked[dim] = draw.size()
    return [draw.numbers(*shape), dim, draw.ids(shape[dim], *picked)]


def _scatter(draw: Draw) -> Args:
    """Nothing is put at one place twice."""
    shape = draw.shape()
    dim = draw.dim(len(shape))
    picked = [draw.one_of(size, size, max(1, size // 2)) for size in shape]
    order = draw.numbers(*picked[:dim], shape[dim], *(picked[dim:][1:])).argsort(dim)
    index = order.narrow(dim, 0, picked[dim]).contiguous()
    return [draw.numbers(*shape), dim, index, draw.numbers(*picked)]


def _scatter_value(draw: Draw) -> Args:
    return [*_scatter(draw)[:3], draw.one_of(0.0, 0.5)]


def _scatter_reduce(draw: Draw, value: bool = False) -> Args:
    return [*(_scatter_value if value else _scatter)(draw), {"reduce": "multiply"}]


def _index_select(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return [draw.numbers(*shape), dim, draw.ids(shape[dim], draw.size())]


def _index_add(draw: Draw) -> Args:
    """Rows are added at one place twice."""
    x, dim, index = _index_select(draw)
    factor = draw.one_of({}, {"alpha": 0.5})
    return [x, dim, index, draw.numbers(*x.index_select(dim, index).shape), factor]


def _index_copy(draw: Draw) -> Args:
    """No row is put twice."""
    x, dim, *_ = _index_select(draw)
    index = torch.randperm(x.shape[dim], generator=draw.generator)[: draw.size()]
    return [x, dim, index, draw.numbers(*x.index_select(dim, index).shape)]


def _index_fill(draw: Draw) -> Args:
    return [*_index_select(draw), draw.one_of(0.0, 0.5)]


def _reduced_scatter(draw: Draw) -> Args:
    included = {"include_self": draw.one_of(True, False)}
    return [*_scatter(draw), draw.one_of("sum", "mean", "amax"), included]


def _one_hot(draw: Draw) -> Args:
    # Of one class, as of a single number, torch warns when it is asked for the sharding.
    classes = draw.size() + 1
    return [draw.ids(classes, 2, *draw.shape(0, 2)), classes]


def _slice_scatter(draw: Draw) -> Args:
    x, *rest = _slice(draw)
    return [x, draw.numbers(*aten.slice.Tensor(x, *rest).shape), *rest]


def _select_scatter(draw: Draw) -> Args:
    x, *rest = _select(draw)
    return [x, draw.numbers(*aten.select.int(x, *rest).shape), *rest]


SAMPLES: dict[str, Sample] = {
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::embedding_bag": _bags,
    "aten.embedding_bag.padding_idx": lambda draw: [*_bags(draw), False, draw.one_of(None, 0)],
    "aten::_embedding_bag": _bags,
    "aten::_embedding_bag_forward_only": _bags,
    **{
        f"aten::_embedding_bag{name}_backward": functools.partial(_bags_backward, name=name)
        for name in ("", "_dense", "_per_sample_weights")
    },
    "aten::cross_entropy_loss": _loss,
    "aten::slice": _slice,
    "aten::narrow": _narrow,
    "aten::select": _select,
    "aten::slice_backward": _slice_backward,
    "aten::select_backward": _select_backward,
    "aten::index_select": _index_select,
    "aten::index_add": _index_add,
    "aten::index_copy": _index_copy,
    "aten::index_fill": _index_fill,
    "aten::scatter_reduce": _reduced_scatter,
    "aten::one_hot": _one_hot,
    "aten::roll": _roll,
    "aten::split_with_sizes": _split,
    "aten::unbind": _unbind,
    "aten::cat": _cat_with_nothing,
    "aten::stack": _stack,
    "aten::constant_pad_nd": _pad,
    "aten::pad": _pad_mode,
    "aten::index": _index,
    "aten::_unsafe_index": _index,
    "aten::index_put": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::gather": _gather,
    "aten::scatter_add": _scatter,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter_value,
    "aten.scatter.reduce": _scatter_reduce,
    "aten.scatter.value_reduce": lambda draw: _scatter_reduce(draw, value=True),
    "aten::slice_scatter": _slice_scatter,
    "aten::select_scatter": _select_scatter,
}
