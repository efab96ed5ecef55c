"""How a batch is cut into microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compiler import ArgumentError, UnsupportedError
from sp_compiler.pipeline_parallel.microbatches import batch_size, microbatches_of


def test_microbatches() -> None:
    ids, position = torch.arange(12).reshape(4, 3), torch.arange(3)[None]
    first, second = microbatches_of([ids, position, 7], lambda: ["ids", "position", "n"], 4, 2)
    assert torch.equal(first[0], ids[:2])
    assert torch.equal(second[0], ids[2:])
    assert first[1] is second[1] is position
    assert first[2] == second[2] == 7
    with pytest.raises(ArgumentError, match="ids has a batch of 4, which microbatches=3"):
        microbatches_of([ids], lambda: ["ids"], 4, 3)
    with pytest.raises(UnsupportedError, match="x requires a gradient"):
        microbatches_of([torch.zeros(4, requires_grad=True)], lambda: ["x"], 4, 2)


def test_the_batch_is_that_of_the_first_tensor_in_the_order_of_forwards_parameters() -> None:
    def forward(scale: float, ids: Tensor, alpha: Tensor, *more: Tensor, **named: Any) -> None: ...

    ids, alpha = torch.zeros(4, 3), torch.zeros(5)
    assert batch_size(forward, (7.0, ids, alpha), {}) == 4
    assert batch_size(forward, (), {"alpha": alpha, "ids": ids, "scale": 7.0}) == 4
    assert batch_size(forward, (torch.zeros(()),), {"alpha": alpha, "ids": {"text": ids}}) == 4
    with pytest.raises(ArgumentError, match=r"no input is a tensor with a batch.*: pass"):
        batch_size(forward, (7.0, 2, 3), {})
    with pytest.raises(ArgumentError, match=r"the batch: missing .* 'alpha'; .* forward takes"):
        batch_size(forward, (7.0, ids), {})
