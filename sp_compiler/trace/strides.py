"""Rewrite ``as_strided``, which reads a tensor by its place in memory, to reads by index.

The position of an element in memory depends on the kernel that made the tensor, and on the passes,
which drop copies and turn views into reshapes. The values of the export still have the strides of
the model's own code, so at this point it is known which elements are meant::

    y = as_strided(x, size, stride)
    -->
    y = x.permute(order of its strides).reshape(-1)[i * step0 + j * step1 + ...]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.fx import arguments, calls
from sp_compiler.ir.rewriting import make_call
from sp_compiler.ir.symbolic import NotSymbolic, is_open

_aten = torch.ops.aten
_READS = (_aten.as_strided.default, _aten.as_strided_copy.default)
_WRITES = (_aten.as_strided_scatter.default,)


def index_strided(graph: Graph) -> None:
    """Rewrite an exported ``graph`` in place; new nodes get no values.

    Raises:
        UnsupportedError: elements outside of the operand, or elements that are written twice.
        NotSymbolic: sizes or strides are open.
    """
    # Backwards: an operand that is itself rewritten has no value afterwards.
    for node in reversed([*calls(graph, *_READS, *_WRITES)]):
        _rewrite(node)


@dataclass(frozen=True)
class _Step:
    """``size`` elements of a flat tensor, ``step`` apart."""

    size: int
    step: int


def _rewrite(node: Node) -> None:
    given = arguments(node)
    x, value = given["self"], given["self"].meta["val"]
    offset = given.get("storage_offset")
    offset = value.storage_offset() if offset is None else offset
    numbers = [*given["size"], *given["stride"], offset, *value.shape, *value.stride()]
    if any(map(is_open, numbers)):
        raise NotSymbolic("as_strided reads memory by sizes that are open")
    order = sorted(_spread(value), key=lambda dim: -value.stride(dim))
    start, steps = _steps(node, order, offset - value.storage_offset())
    call = functools.partial(_call, node)
    with node.graph.inserting_before(node):
        flat = x
        for dim in reversed(range(value.dim())):
            if dim not in order:  # all of its elements are the same one
                flat = call(_aten.select.int, flat, dim, 0)
        dims = [sorted(order).index(dim) for dim in order]
        flat = call(_aten.reshape.default, call(_aten.permute.default, flat, dims), [-1])
        index = _index(node, start, steps, value.device)
        if node.target in _READS:
            result = call(_aten.index.Tensor, flat, [index])
        else:
            _require_apart(node, steps)
            flat = call(_aten.index_put.default, flat, [index], given["src"])
            flat = call(_aten.reshape.default, flat, [value.shape[dim] for dim in order])
            back = [dims.index(dim) for dim in range(len(dims))]
            flat = call(_aten.permute.default, flat, back)
            result = call(_aten.reshape.default, flat, list(value.shape))
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _call(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    return make_call(node.graph, target, args, kwargs, like=node, origin=Pass.EXPORT)


def _spread(value: torch.Tensor) -> list[int]:
    """Return the dims whose elements are at different positions in memory."""
    return [dim for dim in range(value.dim()) if value.size(dim) > 1 and value.stride(dim)]


def _steps(node: Node, order: Sequence[int], offset: int) -> tuple[int, list[_Step]]:
    """Return the first element that is read of the flat operand, and the step of each dim."""
    given = arguments(node)
    value = given["self"].meta["val"]
    # Dims of the operand that are contiguous with each other count as one: (size, stride).
    merged: list[tuple[int, int]] = []
    for dim in order:
        size, stride = value.size(dim), value.stride(dim)
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    digits = [_digits(node, places, merged) for places in (offset, *given["stride"])]
    counts = (2, *given["size"])  # the offset is taken once
    for position, (size, _) in enumerate(merged):
        if sum((n - 1) * each[position] for n, each in zip(counts, digits, strict=True)) >= size:
            raise _refusal(node, "reads memory outside of its operand")
    sizes = [size for size, _ in merged]
    start, *steps = [functools.reduce(_joined, zip(each, sizes, strict=True), 0) for each in digits]
    return start, [_Step(size, step) for size, step in zip(given["size"], steps, strict=True)]


def _joined(total: int, digit: tuple[int, int]) -> int:
    return total * digit[1] + digit[0]


def _digits(node: Node, places: int, dims: Sequence[tuple[int, int]]) -> list[int]:
    """Return how far along each dim an offset of ``places`` in memory is."""
    digits = []
    for _, stride in dims:
        digit, places = divmod(places, stride)
        digits.append(digit)
    if places or any(digit < 0 for digit in digits):
        raise _refusal(node, "reads memory outside of its operand")
    return digits


def _index(node: Node, start: int, steps: Sequence[_Step], device: torch.device) -> Node:
    call, options = functools.partial(_call, node), {"dtype": torch.int64, "device": device}
    index = call(_aten.full.default, [step.size for step in steps], start, **options)
    for dim, each in enumerate(steps):
        if each.size > 1 and each.step:
            end = each.size * each.step
            along = call(_aten.arange.start_step, 0, end, each.step, **options)
            along = call(_aten.reshape.default, along, [-1, *[1] * (len(steps) - dim - 1)])
            index = call(_aten.add.Tensor, index, along)
    return index


def _require_apart(node: Node, steps: Sequence[_Step]) -> None:
    """Raise an error if an element may be written twice."""
    reach = 0
    for each in sorted((each for each in steps if each.size > 1), key=lambda each: each.step):
        if each.step <= reach:
            raise _refusal(node, "writes an element twice")
        reach += (each.size - 1) * each.step
    value = arguments(node)["self"].meta["val"]
    if any(
        size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        raise _refusal(node, "writes an element twice")


def _refusal(node: Node, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{node.target} {what}; use slices, unfold() or an index in its place\n{node_origin(node)}"
    )
