"""Traffic of fused kernels against bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from sp_compiler.cost.fused_kernels import fused_bytes
from sp_compiler.cost.hardware import H100
from sp_compiler.cost.node_cost import compute_us
from sp_compiler.ops.dropout import DROPOUT
from sp_compiler.ops.vocabulary import VOCAB_EMBEDDING
from tests.helpers.graph_builder import GraphBuilder, convert

aten = torch.ops.aten
FULL = 8 * 6 * 4


def test_what_only_the_kernel_reads_is_not_moved() -> None:
    b = GraphBuilder()
    x = b.input("x", 8, 6)
    scaled = b.call(aten.mul.Tensor, x, 2.0)
    summed = b.call(aten.add.Tensor, scaled, x)
    graph = b.output(b.call(aten.exp.default, summed))
    # x once, the result once; of three kernels it were seven tensors.
    assert list(fused_bytes(graph).values()) == [FULL, 0, FULL]


def test_a_number_behind_a_mask_is_put_in_by_the_kernel_around() -> None:
    # torch does not tag this overload as pointwise.
    b = GraphBuilder()
    x, mask = b.input("x", 8, 6), b.input("mask", 6, dtype=torch.bool)
    masked = b.call(aten.where.ScalarSelf, mask, 0, b.call(aten.mul.Tensor, x, 2.0))
    graph = b.output(b.call(aten.exp.default, masked))
    assert list(fused_bytes(graph).values()) == [FULL, 6, FULL]


def test_what_is_saved_is_written() -> None:
    b = GraphBuilder()
    x = b.input("x", 8, 6)
    kept = b.call(aten.exp.default, x)
    graph = b.output(kept, b.call(aten.neg.default, b.call(aten.view.default, kept, [48])))
    assert list(fused_bytes(graph).values()) == [2 * FULL, FULL]


def test_what_ends_a_kernel() -> None:
    # A product, a collective and an operator over rows; a sum over what lies behind a product, too.
    b = GraphBuilder()
    x = b.input("x", 6, 6)
    size = 6 * 6 * 4
    first = b.call(aten.exp.default, x)
    product = b.call(aten.mm.default, first, x)
    summed = b.call(aten.add.Tensor, product, first)
    rows = b.call(aten._softmax.default, summed, -1, False)
    behind = b.call(aten.neg.default, rows)
    reduced = b.call(convert, behind, "P", "I", 2)
    graph = b.output(b.call(aten.exp.default, reduced))
    traffic = {node.target: num_bytes for node, num_bytes in fused_bytes(graph).items()}
    nodes = list(fused_bytes(graph).values())
    assert product not in fused_bytes(graph)
    assert nodes == [2 * size, 2 * size, size, 2 * size, 2 * size]
    assert traffic[aten._softmax.default] == size
    # A kernel of one operator costs what it costs alone.
    (alone,) = [n for n in graph.nodes if n.target is aten.neg.default]
    assert compute_us(alone, H100, fused_bytes(graph)) == compute_us(alone, H100)


def test_of_a_table_the_rows_that_are_picked_are_read() -> None:
    b = GraphBuilder()
    ids = b.input("ids", 8, dtype=torch.int64)
    small, large, huge = (
        b.input(name, rows, 6) for name, rows in zip("abc", (2, 64, 10**7), strict=True)
    )
    times = [
        compute_us(b.call(aten.embedding.default, table, ids), H100)
        for table in (small, large, huge)
    ]
    assert times[0] < times[1] == times[2]
    picked = [
        b.call(aten.index_select.default, huge, 0, ids),
        b.call(aten.index.Tensor, huge, [ids]),
        b.call(VOCAB_EMBEDDING.overload, huge, ids, 2 * 10**7, 2),
    ]
    assert [compute_us(node, H100) for node in picked] == [times[1]] * 3
    # A row more or less in the operand is read as a whole.
    assert compute_us(b.call(aten.neg.default, huge), H100) > 1000 * times[2]


def test_code_as_written_takes_time_to_draw_and_a_fused_kernel_does_not() -> None:
    b = GraphBuilder()
    x = b.input("x", 64, 64)
    seed = b.input("seed", dtype=torch.int64)
    dropped = b.call(DROPOUT.overload, x, seed, 0.1, 0, 0, 1)
    graph = b.output(b.call(aten.exp.default, dropped))
    slow = replace(H100, random_g_per_s=1e-3)
    assert compute_us(dropped, slow) == 64 * 64
    assert compute_us(dropped, slow, fused_bytes(graph)) < 1
    assert compute_us(dropped, H100) == compute_us(dropped, replace(H100, random_g_per_s=1e6)) < 1
