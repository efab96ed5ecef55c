"""Reductions whose partial results would not be what one device computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.rules.table import rule_for
from tests.helpers import parity
from tests.helpers.operator_call import Call, Whole, offered

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("dtype", "is_offered"),
    [(torch.float64, True), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
)
def test_a_mean_is_a_sum_of_parts_unless_the_sum_overflows(
    dtype: torch.dtype, is_offered: bool
) -> None:
    """3000 numbers of 100 add up to more than float16 holds; their mean is 100."""
    x = torch.full((4, 3000), 100.0, dtype=dtype)
    assert bool(x.sum(-1).isinf().all()) is (dtype is torch.float16)
    whole = Whole.of(Call(aten.mean.dim, (x, [-1]), {}))
    rule = rule_for(whole.node)
    assert rule is not None
    assert bool(rule.averaged) is is_offered
    ways = [way.lowering for way in offered(whole, 2)]
    assert ("sum" in ways) is is_offered


@pytest.mark.parametrize("dim", [0, -1])
def test_the_dim_of_a_single_number(dim: int) -> None:
    """torch takes it, though there is none; nothing is sharded and nothing raises."""
    whole = Whole.of(Call(aten.logsumexp.default, (torch.tensor(3.0), [dim]), {}))
    rule = rule_for(whole.node)
    assert rule is not None
    assert rule.results == ((),)


class _SumOfOne(nn.Module):
    """A sum over a dim of size 1 between two dims of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.down(self.up(x).relu())
        return self.head(x).unsqueeze(1).sum(1, keepdim=True)


def test_a_dim_of_one_that_is_summed_is_no_part_of_rows() -> None:
    """Tokens are flattened to rows, in which that dim would be lost."""
    torch.manual_seed(0)
    ids = torch.arange(8).view(2, 4)
    parity.assert_parity(parity.make_case(_SumOfOne().double(), {"ids": ids}), tp=2)
