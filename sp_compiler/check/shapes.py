"""Global shapes of the results of an operator whose arguments hold one rank's sizes.

The rules speak of whole tensors, the graphs of parts. Operands are scaled by their placement; the
results follow by running the operator without data, except where an argument is a local size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from sp_compiler.base.placement import Placement
from sp_compiler.ir.fx import arguments
from sp_compiler.rules.table import is_pointwise

aten = torch.ops.aten
Shape = tuple[int, ...]


def global_shape(shape: Sequence[int], placement: Placement, world_size: int) -> Shape:
    """:meth:`Placement.global_shape`; what lacks the dim is no part of anything."""
    if placement.dim >= len(shape):
        return tuple(shape)
    return placement.global_shape(tuple(shape), world_size)


def local_shapes(node: Node) -> list[Shape | None]:
    """Shapes of one rank's results; ``None`` for a result that is no tensor."""
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    return [tuple(item.shape) if isinstance(item, Tensor) else None for item in values]


def result_shapes(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    """Every global shape that the results can have.

    Args:
        operands: what the operand nodes hold: a meta tensor of the global shape, or no tensor.
        placements: theirs, in the same order.
    """
    sized = _SIZED.get(node.target)
    if sized is not None:
        yield from sized(node, operands, placements, world_size)
    elif is_pointwise(node):
        yield [tuple(torch.broadcast_shapes(*_shapes(operands)))]
    else:
        yield _run(node, operands)


def _shapes(operands: Sequence[Any]) -> list[Shape]:
    return [tuple(operand.shape) for operand in operands if isinstance(operand, Tensor)]


def _run(node: Node, operands: Sequence[Any]) -> list[Shape | None]:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    values = iter(operands)
    args, kwargs = tree_unflatten(
        [next(values) if isinstance(leaf, Node) else leaf for leaf in leaves], spec
    )
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    result = node.target(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else [result]
    return [tuple(item.shape) if isinstance(item, Tensor) else None for item in results]


def _scaled(shape: Shape, world_size: int) -> Iterator[Shape]:
    """``shape`` with each dim in turn ``world_size`` times as large."""
    for dim, size in enumerate(shape):
        yield (*shape[:dim], size * world_size, *shape[dim + 1 :])


def _reshaped(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    (local,) = local_shapes(node)
    assert local is not None
    if not placements[0].is_sharded:
        yield [local]
        return
    for shape in _scaled(local, world_size):
        yield [shape]


def _expanded(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    """Copies of a replicated value may also be seen as the parts of a longer row of copies."""
    (local,) = local_shapes(node)
    assert local is not None
    source = operands[0].shape
    offset = len(local) - len(source)
    shape = list(local)
    for dim, size in enumerate(source):
        if size != 1:
            shape[offset + dim] = size
    yield [tuple(shape)]
    if placements[0].is_replicated:
        for dim, size in enumerate(local):
            if dim < offset or source[dim - offset] == 1:
                yield [(*local[:dim], size * world_size, *local[dim + 1 :])]


def _split(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    dim = arguments(node)["dim"] % operands[0].dim()
    scale = world_size if placements[0].is_sharded and placements[0].dim == dim else 1
    shape = tuple(operands[0].shape)
    yield [
        (*shape[:dim], local[dim] * scale, *shape[dim + 1 :])
        for local in local_shapes(node)
        if local is not None
    ]


def _sliced_backward(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    args = arguments(node)
    sizes, grad = list(args["input_sizes"]), list(operands[0].shape)
    dim = args["dim"] % len(sizes)
    if len(grad) < len(sizes):
        grad.insert(dim, 1)
    yield [(*grad[:dim], sizes[dim], *grad[dim + 1 :])]


def _convolution_backward(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    _, image, weight = _shapes(operands)
    yield [image, weight, weight[:1]]


def _convolved(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    """The groups of channels among the arguments are those of one rank."""
    (local,) = local_shapes(node)
    image, weight = _shapes(operands)[:2]
    assert local is not None
    yield [(image[0], weight[0], *local[2:])]


_Sized = Callable[[Node, Sequence[Any], Sequence[Placement], int], Iterator[list[Shape | None]]]
_SIZED: dict[object, _Sized] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.unflatten.int,
            aten.flatten.using_ints,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ),
        _reshaped,
    ),
    aten.expand.default: _expanded,
    aten.broadcast_to.default: _expanded,
    aten.split_with_sizes.default: _split,
    aten.slice_backward.default: _sliced_backward,
    aten.select_backward.default: _sliced_backward,
    aten.convolution_backward.default: _convolution_backward,
    **dict.fromkeys(
        (
            aten.convolution.default,
            aten.conv1d.default,
            aten.conv2d.default,
            aten.conv3d.default,
            aten.conv1d.padding,
            aten.conv2d.padding,
            aten.conv3d.padding,
        ),
        _convolved,
    ),
}
