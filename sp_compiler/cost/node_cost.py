"""Costs of one node of a final graph: arithmetic, memory traffic, communication, time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sp_compiler.cost.hardware import Hardware, collective_us, kernel_us
from sp_compiler.ir.fx import arguments, placements_of, tensor_operands
from sp_compiler.ir.op_traits import (
    FUSED_ATTENTION,
    collective_of,
    is_part,
    is_pure_view,
    is_started,
    is_view,
    is_wait,
)
from sp_compiler.ops.accumulate import ADD_PRODUCT, WRITE_ROWS
from sp_compiler.ops.async_products import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from sp_compiler.ops.attention import DROPOUT_ATTENTION, DROPOUT_ATTENTION_BACKWARD
from sp_compiler.ops.registry import Collective, operator_of
from sp_compiler.ops.vocabulary import VOCAB_EMBEDDING

_aten = torch.ops.aten
_ATTENTION_BACKWARDS = frozenset(
    getattr(getattr(torch.ops, each.namespace), f"{each.overloadpacket.__name__}_backward").default
    for each in FUSED_ATTENTION
)
# Operators that read only the rows or elements of their first operand that an index picks.
_LOOKUPS = frozenset(
    {
        VOCAB_EMBEDDING.overload,
        _aten.embedding.default,
        _aten.gather.default,
        _aten.index.Tensor,
        _aten.index_select.default,
    }
)
# Matmuls of composite graphs -> position of the first factor; the second is the next operand.
_PRODUCTS = {
    **dict.fromkeys(
        (
            *("aten::linear", "aten::mm", "aten::bmm", "aten::matmul", "aten::_grouped_mm"),
            *("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"),
            *("aten::scaled_dot_product_attention", "transformers::grouped_mm_fallback"),
        ),
        0,
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), 1),
}


def _convolution_backward_flops(
    result: Any, grad: Tensor, image: Tensor, weight: Tensor, *options: Any
) -> int:
    """Return the operations of the gradients that are requested, each as many as the forward's."""
    *_, transposed, _padding, _groups, mask = options
    spread = image if transposed else grad
    return 2 * spread.numel() * math.prod(weight.shape[1:]) * sum(mask[:2])


# torch's registry has ``addmm`` and ``mm`` but not ``linear``, into which simplify turns them; for
# the weight's gradient of a convolution it multiplies the channels of all groups with each other.
_BY_HAND: dict[Any, Callable[..., int]] = {
    _aten.linear.default: lambda result, x, *_: 2 * result.numel() * x.shape[-1],
    _aten.convolution_backward.default: _convolution_backward_flops,
    ADD_PRODUCT.overload: lambda result, _, left, right, *rest: 2 * left.numel() * right.shape[-1],
    ALL_GATHER_MATMUL.overload: lambda result, *_: (
        2 * result[0].shape[1] * sum(product.numel() for product in result[1:])
    ),
    MATMUL_REDUCE_SCATTER.overload: lambda result, left, right, *_: (
        2 * left.numel() * right.shape[1]
    ),
}
"""Operations of one call, from its result and its arguments."""


def tensor_bytes(value: object) -> int:
    """Return the bytes of a tensor, or of all results of an operator."""
    if isinstance(value, Tensor):  # nearly always: avoids a search for leaves
        return value.numel() * value.element_size()
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def node_flops(node: Node) -> tuple[int, int]:
    """Floating point operations of matmuls (2 per multiply-add): (model, hardware).

    Attention scores count in full, causal or not, as in the papers. The two values differ if the
    operator recomputes internally: the backward of fused attention multiplies queries and keys
    again.
    """
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return operator_flops(node.target, args, kwargs, node.meta["val"])


def operator_flops(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[int, int]:
    """Return :func:`node_flops` of an operator with these operands and this ``result``."""
    # By hand: torch's registry lacks the operator for CPUs, and it has one count for a backward, in
    # which the recomputed matmul is part of the model's work.
    if target in FUSED_ATTENTION:
        product = _attention_product(*args[:2])
        # Scores, and scores times values; our operator recomputes the scores if some are dropped.
        again = target is DROPOUT_ATTENTION.overload and args[4] is not None
        return 2 * product, (3 if again else 2) * product
    if target in _ATTENTION_BACKWARDS:
        product = _attention_product(*args[1:3])
        return 4 * product, 5 * product  # two gradients per matmul, and the scores again
    if target in _BY_HAND:
        flops = _BY_HAND[target](result, *args)
        return flops, flops
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:  # pointwise and reductions: memory-bound, as the papers assume
        return 0, 0
    flops = int(formula(*args, **kwargs, out_val=result))
    return flops, flops


def product_flops(node: Node) -> float:
    """Return the operations (2 per multiply-add) of a composite operator that is a matmul, else
    0.

    For the placement solver, which sees only the forward, before composite operators (``linear``,
    ``matmul``...) are decomposed to those that :func:`node_flops` supports.
    """
    # By name: one of them is from transformers, which may not be installed.
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name not in _PRODUCTS:
        return 0.0
    shapes = [operand.meta["val"].shape for operand in tensor_operands(node)]
    left, right = shapes[_PRODUCTS[name] : _PRODUCTS[name] + 2]
    if name == "aten::scaled_dot_product_attention":
        return 2.0 * math.prod(left) * right[-2] + 2.0 * math.prod(left[:-1]) * math.prod(
            shapes[2][-2:]
        )
    if "conv" in name and arguments(node).get("transposed", False):
        # Each element of the image is spread over the window and all channels of its group.
        return 2.0 * math.prod(left) * math.prod(right[1:])
    # Number of elements summed for one of the result: for a convolution its channels and window.
    inner = math.prod(right[1:]) if "conv" in name else left[-1]
    return 2.0 * float(node.meta["val"].numel()) * inner


def _attention_product(query: Tensor, key: Tensor) -> int:
    """Operations of one matmul (b, a, s, d) x (b, a, s', d)."""
    return 2 * math.prod(query.shape) * key.shape[-2]


def node_collectives(node: Node) -> list[Collective]:
    """Return the collectives that ``node`` runs, if any."""
    kind = collective_of(node)
    if kind is not None:
        given = arguments(node)
        num_bytes = min(tensor_bytes(given["x"].meta["val"]), tensor_bytes(node.meta["val"]))
        # The smaller side of the others is a part: all parts together, with their padding.
        num_parts = 1 if kind == "all_reduce" else given["world_size"]
        return [Collective(kind, 1, num_bytes * num_parts)]
    ours = operator_of(node.target)
    if ours is None or ours.collectives is None:
        return []
    return [*ours.collectives(arguments(node), node.meta["val"])]


def collectives_us(collectives: list[Collective], world_size: int, hardware: Hardware) -> float:
    """Return the total time of collectives, without overlap."""
    total = 0.0
    for item in collectives:
        # One by one, because each pays the latency.
        each = item.num_bytes / max(1, item.count)
        total += item.count * collective_us(each, item.kind, world_size, hardware)
    return total


def compute_us(node: Node, hardware: Hardware, fused: Mapping[Node, int] | None = None) -> float:
    """Return the roofline time of ``node`` as a separate kernel; 0 for views and conversions.

    Args:
        fused: bytes moved by nodes that are part of a larger kernel; see
            :func:`sp_compiler.cost.fused_kernels.fused_bytes`.
    """
    # A part of several results exists when they do.
    if node.op != "call_function" or is_part(node) or is_pure_view(node):
        return 0.0
    if placements_of(node) is not None:  # its time is on the link
        return 0.0
    # A split: the node returns a list, and only its parts are views by the schema.
    if isinstance(node.meta["val"], (list, tuple)) and is_view(next(iter(node.users), node)):
        return 0.0
    if fused is not None and node in fused:
        return kernel_us(0, fused[node], product_dtype(node), hardware)
    _, flops = node_flops(node)
    time_us = kernel_us(flops, _moved_bytes(node), product_dtype(node), hardware)
    if (count := _drawn_numbers(node)) > 0:
        time_us = max(time_us, hardware.drawn_us(count))
    return time_us


def _drawn_numbers(node: Node) -> int:
    """Return how many random numbers an operator draws."""
    ours = operator_of(node.target)
    if ours is not None and ours.placed:
        return int(node.meta["val"].numel())
    if ours in (DROPOUT_ATTENTION, DROPOUT_ATTENTION_BACKWARD):
        given = arguments(node)
        query, key = given["query"].meta["val"], given["key"].meta["val"]
        return math.prod(query.shape[:-1]) * key.shape[-2] if given["seed"] is not None else 0
    return 0


def _moved_bytes(node: Node) -> int:
    """Return what a kernel reads and writes: its operands and results, but only the rows that it
    reads of tables."""
    written = tensor_bytes(node.meta["val"])
    if node.target is WRITE_ROWS.overload:
        return 2 * tensor_bytes(node.args[1].meta["val"])
    read = sum(tensor_bytes(source.meta["val"]) for source in node.all_input_nodes)
    if node.target in _LOOKUPS:
        table = tensor_bytes(node.all_input_nodes[0].meta["val"])
        read -= max(0, table - written)
    return read + written


def product_dtype(node: Node) -> torch.dtype:
    """Return the dtype of a matmul: that of its first tensor operand."""
    # Not that of the result: matmuls in float8 have results in 16 bits.
    for value in (source.meta["val"] for source in node.all_input_nodes):
        if isinstance(value, Tensor):
            return value.dtype
    return torch.float32


@dataclass(frozen=True)
class Span:
    """A kernel or a collective in the timeline of a function.

    Attributes:
        name: name of its node.
        operator: the operator that it runs.
        stream: "compute", "tp" for the link of the tensor-parallel group, or "host" for that to
            the host.
        begin_us: time since the start of the function.
        recomputed: whether it repeats a computation of the forward.
    """

    name: str
    operator: str
    stream: Literal["compute", "tp", "host"]
    begin_us: float
    end_us: float
    recomputed: bool = False

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


def function_spans(
    graph: Graph,
    world_size: int,
    hardware: Hardware,
    fused: Mapping[Node, int] | None,
) -> Iterator[Span]:
    """Yield the timeline of a generated function: kernels, and concurrently collectives, one after
    another.

    A collective that is started asynchronously runs until its ``wait``; one that is part of a
    matmul runs concurrently with it; any other blocks the kernels.

    Args:
        fused: as for :func:`compute_us`.
    """
    now_us = link_free_us = 0.0
    arrival_us: dict[Node, float] = {}
    for node in graph.nodes:
        operator, recomputed = str(node.target), bool(node.meta.get("recomputed"))
        time_us = compute_us(node, hardware, fused)
        collectives = node_collectives(node)
        if collectives:
            # One link: a collective waits for those before it, whether or not anything needs them.
            begin_us = max(now_us, link_free_us)
            link_free_us = begin_us + collectives_us(collectives, world_size, hardware)
            kinds = ", ".join(item.kind for item in collectives)
            yield Span(node.name, kinds, "tp", begin_us, link_free_us, recomputed)
            ours = operator_of(node.target)
            if ours is not None and ours.pipelined:
                # One rank's part is computed after the last rows have arrived, or before the first
                # sums leave; the others while the link is busy, if they take less time than that.
                now_us = max(begin_us, link_free_us - time_us * (1 - 1 / world_size))
                # A collective would sum in transit. Here a kernel sums all that has arrived.
                arrived_bytes = ours.scratch_bytes(arguments(node), node.meta["val"])
                time_us += kernel_us(0, arrived_bytes, product_dtype(node), hardware)
            elif is_started(node):
                arrival_us[node] = link_free_us
            else:
                now_us = link_free_us
        elif is_wait(node):
            now_us = max(now_us, arrival_us[node.args[0]])
        if time_us:
            yield Span(node.name, operator, "compute", now_us, now_us + time_us, recomputed)
        now_us += time_us


def elapsed_us(
    graph: Graph,
    world_size: int,
    hardware: Hardware,
    fused: Mapping[Node, int] | None = None,
) -> float:
    """Return the time of a generated function; see :func:`function_spans`."""
    spans = function_spans(graph, world_size, hardware, fused)
    return max((span.end_us for span in spans), default=0.0)


def merged(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Sum ``collectives`` to one entry per kind, in order of first appearance."""
    totals: dict[str, Collective] = {}
    for item in collectives:
        old = totals.get(item.kind, Collective(item.kind, 0, 0))
        count, num_bytes = old.count + item.count, old.num_bytes + item.num_bytes
        totals[item.kind] = Collective(item.kind, count, num_bytes)
    return tuple(totals.values())
