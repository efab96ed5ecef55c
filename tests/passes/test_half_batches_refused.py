"""Experts that half batches must not be made of: what each row gets depends on all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.passes.half_batches import half_batches
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers import expert_models
from tests.helpers.expert_models import EXPERTS, HIDDEN, Grouped, product
from tests.helpers.sorted_experts import BATCH, Sorted, ends_of, split


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


class Negative(Sorted):
    """Rows of no expert: sorted in front of all others, and counted nowhere."""

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids, order = torch.where(ids == 2, -1, ids).sort()
        return ids, order


class Scores(Sorted):
    """Keys that are no whole numbers."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        scores = weights.flatten() * (EXPERTS - 1)
        order, ends = self.keys(scores).argsort(), ends_of(scores)
        y = product(F.gelu(product(x[order // 2], self.up, ends)), self.down, ends)
        return self.put_back(y, order, x)

    def keys(self, scores: Tensor) -> Tensor:
        return scores


class Truncated(Scores):
    """Counts of scores, of which the keys are the whole part."""

    def keys(self, scores: Tensor) -> Tensor:
        return scores.to(torch.int64)


class Narrowed(Sorted):
    """A type in which the numbers of more rows would wrap."""

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        return y[order.to(torch.int8).long().argsort()].view(-1, 2, HIDDEN).sum(1)


class Renumbered(Sorted):
    """The numbers of all rows, as a sort of their order returns them."""

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        numbers, places = order.sort()
        return (y[places] * numbers.double()[:, None]).view(-1, 2, HIDDEN).sum(1)


class Matrix(Sorted):
    def ends(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return ends_of(chosen)


class Broadcast(Sorted):
    """A row put into many places."""

    def put_back(self, y: Tensor, order: Tensor, x: Tensor) -> Tensor:
        rows = torch.zeros(len(order), len(order), HIDDEN, dtype=y.dtype)
        rows[order] = y
        return rows.sum(0).view(-1, 2, HIDDEN).sum(1)


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
        (Negative, "grouped_mm_fallback"),
        (Scores, "grouped_mm_fallback"),
        (Truncated, "grouped_mm_fallback"),
        (Narrowed, "_to_copy"),
        (Renumbered, "_to_copy"),
        (Matrix, "histc"),
        (Broadcast, "index_put"),
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
    assert reasons == [f"{operator} mixes the batch, or is not known to keep its samples separate"]


class Routed(expert_models.Layer):
    """A layer that is told its keys, and where the rows of each expert end."""

    def forward(self, x: Tensor, keys: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        order = keys.argsort()
        y = product(F.gelu(product(x[order], self.experts.up, ends)), self.experts.down, ends)
        return x + y[order.argsort()]


class Telling(expert_models.Layer):
    """A layer that tells how many rows each expert has, and their order."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        weights, chosen = self.router(x).softmax(-1).topk(2)
        ids, order = chosen.flatten().sort()
        counts = torch.histc(ids.double(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        return x + self.experts(x, chosen, weights), counts, order


class Whole(expert_models.Model):
    def __init__(self, layer: type[expert_models.Layer]) -> None:
        super().__init__(Grouped)
        self.layers = nn.ModuleList(layer(Grouped()) for _ in range(2))


class CountsOutside(Whole):
    """Experts are chosen by the token; where their rows end is counted once, for all layers."""

    def forward(self, ids: Tensor) -> Tensor:
        x, keys = self.tokens(ids).flatten(0, 1), (ids % EXPERTS).flatten()
        ends = ends_of(keys)
        for layer in self.layers:
            x = layer(x, keys, ends)
        return self.norm(x).square().mean()


class CountsInLoss(Whole):
    def forward(self, ids: Tensor) -> Tensor:
        x, loss = self.tokens(ids).flatten(0, 1), torch.zeros((), dtype=torch.float64)
        for layer in self.layers:
            x, counts, _ = layer(x)
            loss = loss + x.mean() * counts.sum()
        return self.norm(x).square().mean() + loss


class OrderReturned(Whole):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.tokens(ids).flatten(0, 1)
        for layer in self.layers:
            x, _, order = layer(x)
        return self.norm(x).square().mean(), order


@pytest.mark.parametrize(
    ("make", "layer", "operator"),
    [
        (CountsOutside, Routed, "grouped_mm_fallback"),
        (CountsInLoss, Telling, "sum"),
        (OrderReturned, Telling, "sort"),
    ],
)
def test_what_one_half_has_is_not_taken_for_what_the_batch_has(
    make: type[Whole], layer: type[expert_models.Layer], operator: str
) -> None:
    captured = capture(make(layer).double(), (), BATCH)
    normalize(captured)
    before = str(captured.module.graph)
    half_batches(captured)
    assert captured.notes[-1].startswith(f"half batches: {operator} mixes the batch")
    assert str(captured.module.graph) == before
