"""Global shapes of the results of an operator whose arguments have one rank's sizes.

Rules are about global tensors, graphs about one rank's parts. Operands are scaled by their
placement; the results follow from running the operator without data, unless an argument is a local
size.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from sp_compiler.base.placement import Placement
from sp_compiler.ir.fx import arguments
from sp_compiler.rules.table import is_pointwise, row_of

aten = torch.ops.aten
Shape = tuple[int, ...]
NO_SUCH_CALL = (AssertionError, IndexError, NotImplementedError, RuntimeError, ValueError)
"""Errors that an operator raises for shapes that do not go together."""


def global_shape(shape: Sequence[int], placement: Placement, world_size: int) -> Shape:
    """Return :meth:`Placement.global_shape`; a shape without the dim is returned unchanged."""
    if placement.dim >= len(shape):
        return tuple(shape)
    return placement.global_shape(tuple(shape), world_size)


def local_shapes(node: Node) -> list[Shape | None]:
    """Return the shapes of one rank's results; ``None`` for a result that is not a tensor."""
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    return [tuple(item.shape) if isinstance(item, Tensor) else None for item in values]


@dataclass(frozen=True)
class GlobalCall:
    """An unsharded call that one rank's call may be a part of.

    Attributes:
        args, kwargs: arguments of the node, with the sizes of the unsharded call.
        shapes: shapes of the unsharded results; ``None`` for a result that is not a tensor.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: list[Shape | None]


def global_calls(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[GlobalCall]:
    """Yield every call on unsharded tensors that ``node`` can be one rank's part of.

    Args:
        operands: values of the operand nodes: meta tensors of the global shape, or other values.
        placements: placements of the operands, in the same order.
    """
    # Three ways, from the cheapest: shapes by arithmetic, by broadcasting, by running the operator.
    sized = _SIZED.get(node.target)
    if sized is not None:
        for shapes in sized(node, operands, placements, world_size):
            yield GlobalCall(node.args, node.kwargs, shapes)
    elif is_pointwise(node):
        shapes = [operand.shape for operand in operands if isinstance(operand, Tensor)]
        shape = tuple(torch.broadcast_shapes(*shapes))
        yield GlobalCall(node.args, node.kwargs, [shape])
    else:
        # On replicated operands the sizes among the arguments are global already.
        scale = world_size if any(p.is_sharded for p in placements) else 1
        for args, kwargs in _global_arguments(node, scale):
            # A size that does not fit the global operands is refused by the operator itself.
            with contextlib.suppress(*NO_SUCH_CALL):
                yield GlobalCall(args, kwargs, _run(node.target, args, kwargs, operands))


def _global_arguments(
    node: Node, world_size: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of ``node``, with each size that a shard changes as it is and scaled to all ranks.

    Running the operator shows which one is right: with the others, shapes do not fit.
    """
    row = row_of(node)
    named = [] if row is None else [n for n in row.local_arguments if n in arguments(node)]
    candidates = [_sizes(arguments(node)[name], world_size) for name in named]
    for sizes in itertools.product(*candidates):
        args, kwargs = list(node.args), dict(node.kwargs)
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.name not in named:
                continue
            size = sizes[named.index(argument.name)]
            if position < len(args):
                args[position] = size
            else:
                kwargs[argument.name] = size
        yield tuple(args), kwargs


def _sizes(local: Any, world_size: int) -> list[Any]:
    """Return one rank's size or shape, and the global ones that it may be a part of."""
    if local is None:  # an optional size that is not given
        return [None]
    if world_size == 1:
        return [local]
    if isinstance(local, int):
        return [local, local * world_size]
    return [local, *map(list, _scaled(local, world_size))]


def _run(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Any]
) -> list[Shape | None]:
    """Shapes of the results of ``target`` when its node arguments are ``operands``."""
    # One value per occurrence, as ``tensor_operands`` lists them: ``x * x`` has two.
    leaves, spec = tree_flatten((args, kwargs))
    values = iter(operands)
    args, kwargs = tree_unflatten(
        [next(values) if isinstance(leaf, Node) else leaf for leaf in leaves], spec
    )
    # A factory names its device, and would allocate there.
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    result = target(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else [result]
    return [tuple(item.shape) if isinstance(item, Tensor) else None for item in results]


def _scaled(shape: Shape, world_size: int) -> Iterator[Shape]:
    """``shape`` with each dim in turn ``world_size`` times as large."""
    for dim, size in enumerate(shape):
        yield (*shape[:dim], size * world_size, *shape[dim + 1 :])


def _reshaped(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    """Shapes that one rank's result may be a part of, on any dim: the rule selects the right
    one."""
    (local,) = local_shapes(node)
    assert local is not None
    # The sizes of a replicated value are global.
    if not placements[0].is_sharded:
        yield [local]
        return
    for shape in _scaled(local, world_size):
        yield [shape]


def _expanded(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    """Shape of an expansion; copies of a replicated value are also parts of more copies."""
    (local,) = local_shapes(node)
    assert local is not None
    source = operands[0].shape
    offset = len(local) - len(source)
    shape = list(local)
    # Dims that are not expanded have the global size of the operand.
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
    """Shapes of the parts: those of the operand, with the given sizes on the dim that is split."""
    dim = arguments(node)["dim"] % operands[0].dim()
    # On the sharded dim the sizes are those of one rank's parts, on any other they are global.
    scale = world_size if placements[0].is_sharded and placements[0].dim == dim else 1
    shape = tuple(operands[0].shape)
    yield [
        (*shape[:dim], local[dim] * scale, *shape[dim + 1 :])
        for local in local_shapes(node)
        if local is not None
    ]


# Which of the results are empty differs between kernels and the meta device.


def _bags(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    """Shapes of a lookup of bags, whose width alone may be sharded."""
    width = operands[0].shape[1]
    local = [shape or () for shape in local_shapes(node)]
    yield [(*shape[:-1], width) if len(shape) == 2 else shape for shape in local]


def _running_norm(
    node: Node, operands: Sequence[Any], placements: Sequence[Placement], world_size: int
) -> Iterator[list[Shape | None]]:
    """Shapes of a batch norm with running statistics."""
    shape = tuple(operands[0].shape)
    yield [shape, *(local if local == (0,) else shape[1:2] for local in local_shapes(node)[1:])]


_Sized = Callable[[Node, Sequence[Any], Sequence[Placement], int], Iterator[list[Shape | None]]]
# Views whose sizes are one rank's: run on global operands they would fail or give another shape, so
# that the global shapes are computed from the local ones.
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
    **dict.fromkeys(
        (
            aten.embedding_bag.default,
            aten.embedding_bag.padding_idx,
            aten._embedding_bag.default,
            aten._embedding_bag_forward_only.default,
        ),
        _bags,
    ),
    aten._native_batch_norm_legit_no_training.default: _running_norm,
}
