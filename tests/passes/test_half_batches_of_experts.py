"""Experts on half batches, each of which sorts its own rows: what is split, refused, numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.compiler import to_program
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import calls
from sp_compiler.options import CompileOptions
from sp_compiler.passes.half_batches import half_batches
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers import expert_models
from tests.helpers.expert_models import EXPERTS, HIDDEN, Grouped, Picked, product
from tests.helpers.parity import compiled, make_case, output_error, simulate

BATCH = expert_models.batches(1, rows=4)[0]


def ends_of(ids: Tensor, last: int = EXPERTS - 1) -> Tensor:
    counts = torch.histc(ids.double(), bins=EXPERTS, min=0, max=last)
    return counts.cumsum(0, dtype=torch.int32)


class Sorted(Grouped):
    """Rows that are sorted, one product, and rows that are put back."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, order = self.sort(chosen.flatten())
        y = product(x[order // 2], self.up, self.ends(chosen, ids))
        y = self.between(product(F.gelu(y), self.down, self.ends(chosen, ids)), x)
        return self.put_back(y * weights.flatten()[order, None], order, x)

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids, order = ids.sort()
        return ids, order

    def ends(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return ends_of(ids)

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        return y[order.argsort()].view(-1, 2, HIDDEN).sum(1)


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


class AllRows(Grouped):
    """Every expert on every row, experts outside of the batch, as Llama 4 does it."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        shares = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
        rows = x.repeat(EXPERTS, 1) * shares.t().reshape(-1, 1)
        y = torch.bmm(F.gelu(torch.bmm(rows.view(EXPERTS, -1, HIDDEN), self.up)), self.down)
        return y.sum(0)


def split(make: type[Grouped], **options: bool) -> tuple[Captured, PassReport]:
    captured = capture(expert_models.model(lambda: make(**options)), (), BATCH)
    normalize(captured)
    with reporting(PassReport(Pass.HALF_BATCHES)) as report:
        half_batches(captured)
    return captured, report


def with_bias() -> Grouped:
    return Grouped(bias=True)


@pytest.mark.parametrize(
    "make", [with_bias, Picked, Numbered, Scattered, Put, Added, Accumulated, AllRows]
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
    largest = max(float(grad.abs().max()) for grad in steps[0].grads.values() if grad is not None)
    for key, grad in steps[0].grads.items():
        other = steps[1].grads[key]
        assert grad is not None
        assert other is not None
        assert float((grad - other).abs().max()) <= 4e-15 * largest, key


def test_each_half_sorts_its_own_rows() -> None:
    """16 rows of tokens, 32 of experts. The halves' numbers of rows begin at 0 both times."""
    captured, _ = split(Numbered)
    graph = captured.module.graph
    aten = torch.ops.aten
    for target, operands in (
        (aten.sort.default, [(16,)]),
        (aten.histc.default, [(16,)]),
        (aten.index_put.default, [(16,), (16,), (16,)]),
        (torch.ops.transformers.grouped_mm_fallback.default, None),
    ):
        found = list(calls(graph, target))
        assert len(found) >= 4, target  # two layers, two halves
        for node in found:
            shapes = [tuple(each.meta["val"].shape) for each in node.all_input_nodes]
            assert shapes == (operands or shapes)
            assert shapes[0][0] == 16
    first, second, *_ = calls(graph, aten.index_put.default)
    assert first.args[2] is second.args[2]
    assert first.args[1] != second.args[1]


class Descending(Sorted):
    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids, order = ids.sort(descending=True)
        return ids, order


class OtherEnds(Sorted):
    """Of other keys than those that are sorted."""

    def ends(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return ends_of(chosen.flatten() * 0 + 1)


class WideBins(Sorted):
    """Of several keys in one."""

    def ends(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return ends_of(ids, EXPERTS)


class ByPlace(Sorted):
    """A factor that depends on where a row is sorted."""

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y * torch.arange(len(y)).unsqueeze(1)


class BesideUnsorted(Sorted):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y + x.repeat_interleave(2, 0)


class Neighbours(Sorted):
    """Two rows become one where they are sorted."""

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y + y.view(-1, 2, HIDDEN).sum(1).repeat_interleave(2, 0)


class Dropped(Sorted):
    """Masks are drawn by place."""

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return F.dropout(y, 0.5)


class TwoSorts(Sorted):
    """Ties of equal experts may lie in another order."""

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids.sort()[0], (-ids).argsort()


class Overwritten(Sorted):
    """Two rows of a token are put in one place."""

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        return x.index_put((order // 2,), y)


class TokensChosen(Grouped):
    """Each expert chooses the tokens that suit it best in the batch."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        best = (x @ self.up[:, :, 0].t()).topk(2, dim=0).indices
        return x.index_add(0, best.flatten(), x[best.flatten()])


@pytest.mark.parametrize(
    ("make", "operator"),
    [
        (Descending, "sort"),
        (OtherEnds, "grouped_mm_fallback"),
        (WideBins, "grouped_mm_fallback"),
        (ByPlace, "mul"),
        (BesideUnsorted, "add"),
        (Neighbours, "reshape"),
        (Dropped, "dropout"),
        (TwoSorts, "grouped_mm_fallback"),
        (Overwritten, "index_put"),
        (TokensChosen, "topk"),
    ],
)
def test_what_depends_on_the_order_of_all_rows_is_refused(
    make: type[Grouped], operator: str
) -> None:
    before = capture(expert_models.model(make), (), BATCH)
    normalize(before)
    captured, report = split(make)
    assert str(captured.module.graph) == str(before.module.graph)
    reasons = [each.reason for each in report.declined]
    assert reasons == [f"{operator} mixes the batch, or is not known not to"]
