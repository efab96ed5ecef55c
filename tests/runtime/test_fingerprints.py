"""Fingerprints of tensors that ranks compare, whatever their layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_compiler.runtime.fingerprints import fingerprint, leading_digest

_X = torch.arange(12.0).view(3, 4)
_Z = torch.complex(_X, _X + 1)
# More than what is mixed at a time.
_LONG = torch.zeros(1 << 19, dtype=torch.int64).index_fill_(0, torch.tensor(3), 1)


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        (_X.t(), _X.t().contiguous(), _X),
        (_Z.conj(), _Z.conj().resolve_conj(), _Z),
        (_Z.conj().imag, -_Z.imag, _Z.imag),
        (_X.to_sparse(), _X, _X.t()),
        (_LONG, _LONG.clone(), _LONG.roll(1 << 18)),
    ],
    ids=["strides", "conjugate", "negative", "sparse", "long"],
)
def test_equal_values_have_one_fingerprint(value: Tensor, same: Tensor, other: Tensor) -> None:
    assert int(fingerprint(value)) == int(fingerprint(same)) != int(fingerprint(other))


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(9, 7).bfloat16().t(),
        torch.zeros(1 << 10, 1 << 10)[:, ::2],
        torch.zeros(2, 1 << 20),
        torch.zeros((), dtype=torch.bool),
    ],
    ids=["small", "rows", "part of a row", "scalar"],
)
def test_the_leading_values_decide(value: Tensor) -> None:
    index = (0,) * value.ndim
    other = value.clone()
    other[index] = 1
    assert leading_digest(value) == leading_digest(value.clone()) != leading_digest(other)


def test_no_values_have_a_digest() -> None:
    assert leading_digest(torch.zeros(0, 4)) == 0
