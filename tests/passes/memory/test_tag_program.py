"""Regions after tagging, of which several may come from one sharded region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.passes.memory.tag_program import TaggedProgram


def test_what_is_known_of_an_operator_holds_in_all_regions_made_of_its_own() -> None:
    program: Any = None
    tagged = TaggedProgram(program, {}, {"Block": "Block", "Block2": "Block", "Head": "Head"})
    found = {("Block", "matmul"): 4, ("Head", "linear"): 5}
    assert tagged.by_operator(found) == {
        ("Block", "matmul"): 4,
        ("Block2", "matmul"): 4,
        ("Head", "linear"): 5,
    }


class _Mixed(nn.Module):
    """Attention whose weights pass through a product with a parameter, if there is one."""

    def __init__(self, mix: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mix = nn.Parameter(torch.eye(2)) if mix else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        weights = (x @ x.transpose(-1, -2)).softmax(-1)
        if self.mix is not None:
            weights = torch.einsum("hg,bgij->bhij", self.mix, weights)
        return (weights @ x).square().mean()


@pytest.mark.parametrize("mix", [True, False])
def test_a_policy_that_finds_no_attention_says_so(mix: bool) -> None:
    x = torch.randn(2, 6, 8)
    found, none = (
        sp_compiler.plan(_Mixed(mix), ((x,), {}), recompute=policy)
        for policy in ("attention", "none")
    )
    notes = [note for note in found.notes if "no attention core was found" in note]
    assert len(notes) == (found.activation_bytes == none.activation_bytes) == mix
    assert all('recompute="selective"' in note for note in notes)
    assert not any("attention core" in note for note in none.notes)
