"""Regions sharded by hand over two ranks, as Megatron does it, and ways to break them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from sp_compiler.base.placement import Placement
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import placements_of
from sp_compiler.ir.program import Region
from sp_compiler.ir.rewriting import copy_graph, make_call
from tests.helpers.regions import region_of

WORLD = 2
BATCH, SEQUENCE, HIDDEN, HEADS = 2, 6, 8, 4
TOKENS, HEAD_DIM, INNER = BATCH * SEQUENCE, HIDDEN // HEADS, 4 * HIDDEN
aten = torch.ops.aten
convert = torch.ops.sp_compiler.convert
dropout = torch.ops.sp_compiler.dropout

Inputs = dict[str, tuple[tuple[int, ...], str]]
"""Name of each input: its global shape and its placement."""


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> tuple[Tensor]:
        return (self.function(*args),)


def sharded(function: Callable[..., Tensor], inputs: Inputs, output: str, name: str) -> Region:
    """Capture ``function`` on local parts of ``inputs``."""
    placements = tuple(Placement.parse(placement) for _, placement in inputs.values())
    args = [
        torch.zeros(placement.local_shape(shape, WORLD), dtype=torch.float64)
        if shape
        else torch.zeros((), dtype=torch.int64)
        for (shape, _), placement in zip(inputs.values(), placements, strict=True)
    ]
    region = region_of(_Function(function), *args, name=name)
    return replace(
        region,
        input_names=tuple(inputs),
        input_placements=placements,
        output_placements=(Placement.parse(output),),
    )


def attention_block(sequence_parallel: bool) -> Region:
    """Attention with column- and row-parallel weights; V comes from a replicated weight.

    The residual stream is S(0) with sequence parallelism and I without.
    """
    stream, norm = ("S(0)", "R") if sequence_parallel else ("I", "I")
    shards = WORLD if sequence_parallel else 1

    def forward(*args: Tensor) -> Tensor:
        x, seed, norm_weight, norm_bias, query, key, value, out, out_bias = args
        y = F.layer_norm(x, (HIDDEN,), norm_weight, norm_bias)
        y = convert(y, stream, "R", WORLD)
        q, k = F.linear(y, query), F.linear(y, key)
        v = convert(F.linear(y, value), "R", "S(1)", WORLD)
        heads = (BATCH, SEQUENCE, HEADS // WORLD, HEAD_DIM)
        q, k, v = (part.reshape(heads).transpose(1, 2) for part in (q, k, v))
        scores = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * HEAD_DIM**-0.5, -1)
        context = torch.matmul(scores, v).transpose(1, 2).reshape(TOKENS, HIDDEN // WORLD)
        y = convert(F.linear(context, out), "P", stream, WORLD) + out_bias
        return x + dropout(y, seed, 0.1, 0, 0, shards)

    inputs: Inputs = {
        "x": ((TOKENS, HIDDEN), stream),
        "seed": ((), "I"),
        "norm.weight": ((HIDDEN,), norm),
        "norm.bias": ((HIDDEN,), norm),
        "query": ((HIDDEN, HIDDEN), "S(0)"),
        "key": ((HIDDEN, HIDDEN), "S(0)"),
        "value": ((HIDDEN, HIDDEN), "R"),
        "out": ((HIDDEN, HIDDEN), "S(1)"),
        "out_bias": ((HIDDEN,), norm),
    }
    return sharded(forward, inputs, stream, "Attention")


def mlp_block(sequence_parallel: bool) -> Region:
    """The MLP of the paper, biases and all."""
    stream, norm = ("S(0)", "R") if sequence_parallel else ("I", "I")

    def forward(*args: Tensor) -> Tensor:
        x, norm_weight, norm_bias, up, up_bias, down, down_bias = args
        y = F.layer_norm(x, (HIDDEN,), norm_weight, norm_bias)
        y = convert(y, stream, "R", WORLD)
        y = F.gelu(F.linear(y, up) + up_bias, approximate="tanh")
        return x + convert(F.linear(y, down), "P", stream, WORLD) + down_bias

    inputs: Inputs = {
        "x": ((TOKENS, HIDDEN), stream),
        "norm.weight": ((HIDDEN,), norm),
        "norm.bias": ((HIDDEN,), norm),
        "up": ((INNER, HIDDEN), "S(0)"),
        "up_bias": ((INNER,), "S(0)"),
        "down": ((HIDDEN, INNER), "S(1)"),
        "down_bias": ((HIDDEN,), norm),
    }
    return sharded(forward, inputs, stream, "Mlp")


def edges(sequence_parallel: bool) -> Region:
    """Surroundings of the blocks: global values are cut into rows (or columns) and joined again."""
    dim = 0 if sequence_parallel else 1

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        y = convert(x, "I", f"S({dim})", WORLD)
        return convert(F.gelu(y * weight), f"S({dim})", "I", WORLD)

    scale = ((1, HIDDEN), "R") if sequence_parallel else ((1, HIDDEN), "S(1)")
    return sharded(forward, {"x": ((TOKENS, HIDDEN), "I"), "weight": scale}, "I", "Edges")


BLOCKS: dict[str, Callable[[bool], Region]] = {
    "attention": attention_block,
    "mlp": mlp_block,
    "edges": edges,
}


def conversions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if placements_of(node) is not None]


def is_identity(node: Node) -> bool:
    """Return whether the conversion changes no number on any rank."""
    source, target = placements_of(node)  # type: ignore[misc]
    return bool(source.is_replicated and target.is_replicated)


def drop(node: Node) -> None:
    """Replace a conversion by something of the right shape that does not communicate."""
    x, world_size = node.args[0], node.args[3]
    have, want = x.meta["val"].shape, node.meta["val"].shape
    dim = next((d for d, (a, b) in enumerate(zip(have, want, strict=True)) if a != b), None)
    with node.graph.inserting_before(node):
        if dim is None:
            new = x
        elif have[dim] < want[dim]:
            new = make_call(
                node.graph, aten.cat.default, ([x] * world_size, dim), like=node, origin="test"
            )
        else:
            args = (x, dim, 0, want[dim])
            new = make_call(node.graph, aten.slice.Tensor, args, like=node, origin="test")
    _replace(node, new)


def misplace(node: Node) -> bool:
    """Convert along another dim, reshaped to the right shape; False where no dim is named."""
    shape = tuple(node.meta["val"].shape)
    x, *texts, world_size = node.args
    wrong = [
        text.translate(str.maketrans("01", "10")).partition("|")[0].rstrip(")") for text in texts
    ]
    wrong = [text + ")" if text.startswith("S") else text for text in wrong]
    if len(shape) != 2 or wrong == texts:
        return False
    with node.graph.inserting_before(node):
        new = make_call(
            node.graph, convert.default, (x, *wrong, world_size), like=node, origin="test"
        )
        new = make_call(node.graph, aten.reshape.default, (new, shape), like=node, origin="test")
    _replace(node, new)
    return True


def _replace(node: Node, new: Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def copied(region: Region) -> Region:
    """A region whose graph may be broken."""
    graph = copy_graph(region.module.graph)
    return replace(region, module=GraphModule(nn.Module(), graph))


def copied_graphs(partitioned: Partitioned) -> Partitioned:
    backward = partitioned.backward
    return replace(
        partitioned,
        forward=copy_graph(partitioned.forward),
        backward=None if backward is None else copy_graph(backward),
    )


def names(nodes: Sequence[Node]) -> list[str]:
    return [node.name for node in nodes]
