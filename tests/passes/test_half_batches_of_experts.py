"""Experts on half batches, each of which sorts its own rows: what is split, and numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.compiler import to_program
from sp_compiler.ir.fx import calls
from sp_compiler.options import CompileOptions
from sp_compiler.trace.export import capture
from tests.helpers import expert_models
from tests.helpers.expert_models import EXPERTS, HIDDEN, Grouped, Picked
from tests.helpers.parity import assert_equal_gradients, compiled, make_case, output_error, simulate
from tests.helpers.slow import slow
from tests.helpers.sorted_experts import BATCH, Sorted, ends_of, split


class Numbered(Sorted):
    """As transformers does it: the places of rows are numbers that are put where they came from."""

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        return y[places].view(-1, 2, HIDDEN).sum(1)


class Scattered(Sorted):
    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        places = torch.zeros_like(order).scatter(0, order, torch.arange(len(order)))
        return y.index_select(0, places).view(-1, 2, HIDDEN).sum(1)


class Put(Sorted):
    """The products' rows are put in their places."""

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        rows = torch.zeros(len(order), HIDDEN, dtype=y.dtype)
        rows[order] = y
        return rows.view(-1, 2, HIDDEN).sum(1)


class Added(Sorted):
    """Rows are added to those of their tokens. The router's choice counts experts unsorted, and
    its keys are small integers."""

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        order = ids.to(torch.int32).argsort(stable=True)
        return ids[order], order

    def ends(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return ends_of(chosen.flatten())

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        tokens = torch.div(order, 2, rounding_mode="floor")
        return torch.zeros_like(x).index_add(0, tokens, y)


class Accumulated(Sorted):
    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        order = ids.argsort()
        return ids[order], order

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        return x.index_put((order // 2,), y, accumulate=True)


class Remainders(Sorted):
    """Experts by a hash of the router's choice; ends that are cast at last, and numbers of tokens
    that are cut off."""

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids, order = (ids * 7 % EXPERTS).clamp(min=0).sort(stable=True)
        return ids, order

    def ends(self, chosen: Tensor, ids: Tensor) -> Tensor:
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        return counts.to(torch.int64).cumsum(0).to(torch.int32)

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        tokens = torch.div(order.to(torch.int32), 2, rounding_mode="trunc")
        return torch.zeros_like(x).index_add(0, tokens, y)


class AllRows(Grouped):
    """Every expert on every row, experts outside of the batch, as Llama 4 does it."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        shares = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
        rows = x.repeat(EXPERTS, 1) * shares.t().reshape(-1, 1)
        y = torch.bmm(F.gelu(torch.bmm(rows.view(EXPERTS, -1, HIDDEN), self.up)), self.down)
        return y.sum(0)


def with_bias() -> Grouped:
    return Grouped(bias=True)


@pytest.mark.parametrize(
    "make",
    [
        Numbered,
        *map(slow, (Picked, with_bias, Added, AllRows, Scattered, Put, Accumulated, Remainders)),
    ],
)
def test_gradients_are_those_of_the_full_batch(make: type[Grouped]) -> None:
    model = expert_models.model(make)
    full = make_case(model, BATCH)
    program = to_program(capture(model, (), BATCH), CompileOptions(tp=2, half_batches=True))
    assert not program.notes
    steps = [
        simulate(each, compiled(each, tp=2, recompute="selective"))
        for each in (full, replace(full, program=program, latest=[]))
    ]
    assert output_error(steps[1], replace(full, outputs=steps[0].outputs)) < 1e-14
    assert_equal_gradients(steps[0], steps[1], 4e-15)


def test_each_half_sorts_its_own_rows() -> None:
    """16 rows of tokens, 32 of experts. The halves' numbers of rows begin at 0 both times."""
    captured, _ = split(Numbered)
    graph = captured.module.graph
    aten = torch.ops.aten
    grouped = torch.ops.transformers.grouped_mm_fallback.default
    for target in (aten.sort.stable, aten.histc.default, aten.index_put.default, grouped):
        found = list(calls(graph, target))
        assert len(found) >= 4, target  # two layers, two halves
        for node in found:
            operands = node.all_input_nodes if target is not grouped else node.all_input_nodes[:1]
            assert {operand.meta["val"].shape[0] for operand in operands} == {16}
    first, second, *_ = calls(graph, aten.index_put.default)
    assert first.args[2] is second.args[2]
    assert first.args[1] != second.args[1]
