"""Text that a compiled model generates is the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.users import compiled, num_compiled
from tests.models import zoo


class Looping(nn.Module):
    """Generates by a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, ids: Tensor, return_dict: bool = True) -> Tensor:
        return self.head(self.embed(ids).cumsum(1))

    @torch.no_grad()
    def generate(self, ids: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            ids = torch.cat((ids, self(ids, return_dict=True)[:, -1].argmax(-1, keepdim=True)), 1)
        return ids


def test_a_loop_over_forward_runs() -> None:
    torch.manual_seed(0)
    eager = Looping()
    module = compiled(lambda: copy.deepcopy(eager))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(module.generate(ids, steps=5), eager.generate(ids, 5))
    assert num_compiled(module) == 2  # the first length, and all others


def test_what_cannot_generate_says_so() -> None:
    with pytest.raises(UnsupportedError, match="Linear has no generate"):
        compiled(lambda: nn.Linear(2, 2)).generate()
    with pytest.raises(UnsupportedError, match="encoder separately"):
        sp_compiler.compile(zoo.build("t5"), tp=1).generate(zoo.inputs("t5")["input_ids"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_generate(name: str) -> None:
    eager = zoo.build(name, layers=1).eval()
    module = sp_compiler.compile(copy.deepcopy(eager), tp=1).eval()
    ids = zoo.inputs(name)["input_ids"][:2, :5]
    options: dict[str, Any] = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    ways: tuple[dict[str, Any], ...] = ({"do_sample": False}, {"do_sample": True})
    for way in ways:
        torch.manual_seed(0)
        expected = eager.generate(ids, **options, **way)
        torch.manual_seed(0)
        assert torch.equal(module.generate(ids, **options, **way), expected)
    assert num_compiled(module) == 2
