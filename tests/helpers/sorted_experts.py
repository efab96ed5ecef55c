"""Experts that sort rows, to be changed in one step, and what half batches make of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.ir.captured import Captured
from sp_compiler.passes.half_batches import half_batches
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers import expert_models
from tests.helpers.expert_models import EXPERTS, HIDDEN, Grouped, product

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


def split(make: type[Grouped]) -> tuple[Captured, PassReport]:
    captured = capture(expert_models.model(make), (), BATCH)
    normalize(captured)
    with reporting(PassReport(Pass.HALF_BATCHES)) as report:
        half_batches(captured)
    return captured, report
