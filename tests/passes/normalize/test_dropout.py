"""Dropout becomes sites of one seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.base.errors import UnsupportedError
from tests.helpers.normalized import body, normalized, outputs, randn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
aten = torch.ops.aten
sp = torch.ops.sp_compiler


def test_dropout_sites_share_one_seed() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(F.dropout(x, 0.1), 0.0), 0.5) + F.dropout(x, 0.5, False)

    captured = normalized(function, randn(4, 5))
    assert [ref.kind for ref in captured.refs] == ["input", "seed"]
    assert body(captured) == [
        "%2 = sp_compiler.dropout(%0, %1, 0.1, 0, 0, 1) : f64[4, 5]",
        "%3 = sp_compiler.dropout(%2, %1, 0.5, 1, 0, 1) : f64[4, 5]",
        "%4 = aten.add.Tensor(%3, %0) : f64[4, 5]",
        "output(%4)",
    ]


def test_stored_dropout_gives_the_same_numbers() -> None:
    x = randn(40, 50)
    regenerated, stored = (
        normalized(lambda x: F.dropout(x, 0.3), x, dropout=kind)
        for kind in ("regenerate", "stored")
    )
    (first,), (second,) = outputs(regenerated, x, seed=7), outputs(stored, x, seed=7)
    torch.testing.assert_close(first, second, rtol=1e-15, atol=0)
    assert 0.2 < float((first == 0).double().mean()) < 0.4
    assert not torch.equal(first, outputs(regenerated, x, seed=8)[0])


def test_certain_dropout_is_zero_with_a_gradient() -> None:
    x = randn(2, 3, grad=True)
    captured = normalized(lambda x: F.dropout(x, 1.0), x)
    (result,) = outputs(captured, x)
    result.sum().backward()
    assert torch.equal(result, torch.zeros(2, 3, dtype=torch.float64))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(2, 3, dtype=torch.float64))


def test_a_mask_that_the_model_reads_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"draw a mask with torch\.rand_like\(x\) >= p"):
        normalized(lambda x: sum(torch.native_dropout(x, 0.5, True)), randn(2, 3))
    own = normalized(lambda x: x * (mask := torch.rand_like(x) >= 0.5) + mask, randn(2, 3))
    assert [ref.kind for ref in own.refs] == ["input", "seed"]
