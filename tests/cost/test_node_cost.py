"""Operations of convolutions against torch's own counts, and bytes of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from sp_compiler.cost.node_cost import node_collectives, operator_flops, product_flops
from tests.helpers.graph_builder import GraphBuilder, convert

_aten = torch.ops.aten


def _call(groups: int, *, transposed: bool) -> tuple[Any, ...]:
    """Arguments of a convolution from 8 to 16 channels."""
    image = torch.empty(2, 8, 10, 12, device="meta")
    sizes = (8, 16 // groups) if transposed else (16, 8 // groups)
    weight = torch.empty(*sizes, 3, 3, device="meta")
    return image, weight, None, [2, 1], [0, 0], [1, 1], transposed, [0, 0], groups


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_operations_of_a_convolution_and_its_gradients(groups: int, transposed: bool) -> None:
    image, weight, bias, *options = args = _call(groups, transposed=transposed)
    result = _aten.convolution.default(*args)
    flops = flop_registry[_aten.convolution](*args, out_val=result)
    graph = Graph()
    operands: list[Node] = [graph.placeholder(name) for name in ("image", "weight")]
    for operand, value in zip(operands, (image, weight), strict=True):
        operand.meta["val"] = value
    node = graph.call_function(_aten.convolution.default, (*operands, bias, *options))
    node.meta["val"] = result
    assert product_flops(node) == flops
    for mask in ([True, True, True], [False, True, False], [True, False, False]):
        backward = (result, image, weight, [16], *options, mask)
        grads = _aten.convolution_backward.default(*backward)
        counted = operator_flops(_aten.convolution_backward.default, backward, {}, grads)
        assert counted == (flops * sum(mask[:2]),) * 2
        # The registry counts one group right: the same here, by another way.
        if groups == 1:
            assert counted[0] == flop_registry[_aten.convolution_backward](*backward, out_val=grads)


@pytest.mark.parametrize(
    ("source", "target", "shape", "parts"),
    [
        ("S(1|6)", "R", (8, 2), 4 * 8 * 2),
        ("P", "S(1|6)", (8, 6), 4 * 8 * 2),
        ("P", "I", (8, 6), 48),
    ],
)
def test_collectives_move_padding_too(
    source: str, target: str, shape: tuple[int, ...], parts: int
) -> None:
    """Six columns on four ranks: each sends two."""
    b = GraphBuilder()
    node = b.call(convert, b.input("x", *shape), source, target, 4)
    (found,) = node_collectives(node)
    assert found.num_bytes == 4 * parts
