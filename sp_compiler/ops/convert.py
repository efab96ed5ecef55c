"""Conversions between placements: their semantics, costs, names and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.placement import Placement
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import (
    Arguments,
    Gradient,
    Operator,
    Typing,
    bytes_of,
    operator_of,
    register,
)

_sp = torch.ops.sp_compiler

LINK_CROSSINGS = {
    # A ring moves (t-1)/t of the global value's bytes a number of times over the link; an
    # all-reduce is a reduce-scatter and an all-gather.
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
}
"""Collective, named as the method of the communicator, to how often its bytes cross the link."""


@dataclass(frozen=True)
class Conversion:
    """Change of a value's placement: the same value, placed another way.

    Attributes:
        method: method of the communicator; "" if the tensors of all ranks stay the same.
        text: name of the communication in forward, or in backward if forward has none, for tables.
        offered: whether sharding may choose it. The others are gradients of offered ones, or
            convert values without gradients, for which R and I are the same.
    """

    method: str
    text: str
    offered: bool = True

    @property
    def link_crossings(self) -> int:
        """Return how often the global value's bytes cross the link; 0 means no communication."""
        return LINK_CROSSINGS.get(self.method, 0)


CONVERSIONS = {
    # (source kind, destination kind) -> what to do. The gradient is converted from the dual of the
    # destination to the dual of the source, so a row's backward is another row.
    ("S", "R"): Conversion("all_gather", "all-gather"),
    ("S", "I"): Conversion("all_gather", "all-gather"),
    ("P", "S"): Conversion("reduce_scatter", "reduce-scatter"),
    ("P", "I"): Conversion("all_reduce", "all-reduce"),
    ("P", "R"): Conversion("all_reduce", "all-reduce", offered=False),
    ("R", "S"): Conversion("shard", "slice"),
    ("I", "S"): Conversion("shard", "slice, and all-gather of the gradient"),
    ("S", "P"): Conversion("zero_pad_to_partial", "padding with zeros", offered=False),
    ("I", "R"): Conversion("", "all-reduce of the gradient"),
    ("R", "I"): Conversion("", "nothing", offered=False),
}


def conversion_between(source: Placement, target: Placement) -> Conversion | None:
    """Return the row of :data:`CONVERSIONS`, with rows form ("T") as a shard; ``None`` without one.

    Two different shards have no row: one is converted to the other through the global value.
    """
    # Only by kind: the communicator reads the dim and the number of segments from the
    # placements.
    kinds = ["S" if placement.is_sharded else placement.kind for placement in (source, target)]
    return CONVERSIONS.get((kinds[0], kinds[1]))


# The operator ``convert``.


def convert(tp: Communicator, x: Tensor, src: str, dst: str) -> Tensor:
    """Return ``x``, whose placement is ``src``, with placement ``dst``; shapes are those of one
    rank."""
    conversion = conversion_between(Placement.parse(src), Placement.parse(dst))
    assert conversion is not None, f"no conversion {src} -> {dst}"  # the checks refuse it
    converted: Tensor = getattr(tp, conversion.method)(x, src, dst) if conversion.method else x
    return converted


def _fake_converted(x: Tensor, src: str, dst: str, world_size: int) -> Tensor:
    source, target = Placement.parse(src), Placement.parse(dst)
    conversion = conversion_between(source, target)
    if conversion is not None and not conversion.method:
        # The value itself, with its strides: which views of it are possible depends on them.
        return x.new_empty_strided(x.shape, x.stride())
    shape = list(source.global_shape(tuple(x.shape), world_size))
    if target.kind == "S":  # must not fail: the checks refuse wrong conversions
        shape[target.dim] = (shape[target.dim] + target.padding(world_size)) // world_size
    return x.new_empty(shape)


def _save_placements(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.src, ctx.dst, ctx.world_size = inputs


def _backward_of_convert(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # The adjoint: R and P are each other's duals, I and S their own. What was gathered is
    # scattered, what was summed is passed on.
    source, target = (Placement.parse(text).dual for text in (ctx.dst, ctx.src))
    # Gradients of expanded values have strides of 0, but collectives send contiguous memory.
    grad = _sp.convert(grad.contiguous(), str(source), str(target), ctx.world_size)
    return grad, None, None, None


def _placements(args: Arguments) -> tuple[Placement, Placement]:
    return Placement.parse(str(args["src"])), Placement.parse(str(args["dst"]))


def _type_convert(args: Arguments, world_size: int) -> Sequence[Typing]:
    source, target = _placements(args)
    return [((source,), (target,))] if conversion_between(source, target) is not None else []


def _copied_bytes(args: Arguments, result: Tensor) -> int:
    """Bytes of the copies that a kernel makes on the way: the parts of all ranks before they are
    joined or after they are cut, with their padding, or a part before it is copied."""
    source, target = _placements(args)
    method, num_ranks = _method(args), args["world_size"]
    if method == "all_gather":  # the copy that was sent is freed before parts are joined
        if _is_joined(args):
            return bytes_of(args["x"].meta["val"]) * num_ranks
        return received_padding_bytes(args, result) + copied_to_send_bytes(args, result)
    if method == "zero_pad_to_partial":
        # Rows need no copy: the parts are in rank order already.
        is_copied = source.padding(num_ranks) or len(source.segments) > 1
        return bytes_of(args["x"].meta["val"]) * num_ranks if is_copied else 0
    is_segmented, is_padded = len(target.segments) > 1, bool(target.padding(num_ranks))
    padded_bytes = bytes_of(result) * num_ranks
    if method == "reduce_scatter":
        # One copy moves the dim to the front, one sorts the segments by rank, one pads. Each is
        # made from the one before, which is then freed: two at a time, before there is a result.
        copies = bool(target.dim) + is_segmented + is_padded
        copied_bytes = 2 * padded_bytes - bytes_of(result)
        return copied_bytes if copies > 1 else copied_to_send_bytes(args, result)
    if method == "shard":
        # Not a product with a bool: torch 2.11 multiplies no open size by one.
        return padded_bytes if is_padded else int(is_segmented) * bytes_of(result)
    return 0


def copied_to_send_bytes(args: Arguments, result: Tensor) -> int:
    """Return the bytes of the copy that a collective sends, and holds until it has arrived, if the
    operand is not laid out as it is sent."""
    _, target = _placements(args)
    method, num_ranks, x = _method(args), args["world_size"], args["x"].meta["val"]
    if method == "all_gather":
        return 0 if x.is_contiguous() else bytes_of(x)
    if method != "reduce_scatter":
        return 0
    is_rows = not (target.dim or len(target.segments) > 1 or target.padding(num_ranks))
    return 0 if is_rows and x.is_contiguous() else bytes_of(result) * num_ranks


def received_padding_bytes(args: Arguments, result: Tensor) -> int:
    """Return by how many bytes the parts that a gather receives are larger than its result."""
    if _method(args) != "all_gather":
        return 0
    return bytes_of(args["x"].meta["val"]) * args["world_size"] - bytes_of(result)


def joined_bytes(args: Arguments, result: Tensor) -> int:
    """Return the bytes of the result that a gather makes from the parts that it has received; 0 if
    it is a view of them."""
    return bytes_of(result) if _method(args) == "all_gather" and _is_joined(args) else 0


def _is_joined(args: Arguments) -> bool:
    source, _ = _placements(args)
    # Rows need no copy: the parts are in rank order already.
    return bool(source.dim) or len(source.segments) > 1


def _method(args: Arguments) -> str:
    conversion = conversion_between(*_placements(args))
    return "" if conversion is None else conversion.method


_SCHEMA = "(Tensor x, str src, str dst, SymInt world_size) -> Tensor"

CONVERT = register(
    Operator(
        name="convert",
        schema=_SCHEMA,
        kernel=convert,
        fake=_fake_converted,
        typings=_type_convert,
        gradient=Gradient(_save_placements, _backward_of_convert),
        scratch_bytes=_copied_bytes,
    )
)

CONVERT_IN_PLACE = register(
    Operator(
        name="convert_in_place",
        schema=_SCHEMA,
        # An interpreted graph can afford a separate result.
        kernel=convert,
        fake=_fake_converted,
        typings=_type_convert,
        view="all",
        writes=True,
    )
)
"""An all-reduce into the memory of its operand."""


# The operator ``wait``.


def wait(tp: Communicator, x: Tensor) -> Tensor:
    """Return ``x``, a :func:`convert` that generated code has only started, once it has arrived.

    An interpreted graph starts nothing early, so its results are complete.
    """
    return x


def _fake_waited(x: Tensor, world_size: int) -> Tensor:
    return x.new_empty(x.shape)


def _type_wait(args: Arguments, world_size: int) -> Sequence[Typing]:
    """The type is that of the conversion that it waits for."""
    sent = args["x"]
    if operator_of(sent.target) not in (CONVERT, CONVERT_IN_PLACE):
        return []
    arrived = Placement.parse(sent.args[2])
    return [((arrived,), (arrived,))]


WAIT = register(
    Operator(
        name="wait",
        schema="(Tensor x, SymInt world_size) -> Tensor",
        kernel=wait,
        fake=_fake_waited,
        typings=_type_wait,
        view="all",
        dims="...->...",
    )
)
