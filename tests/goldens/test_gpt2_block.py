"""The code of a real GPT-2, dropout on: unfused attention, fused qkv, biases, collectives."""

from __future__ import annotations

import pytest

from tests.goldens import check_golden
from tests.helpers import parity


@pytest.mark.parametrize("policy", ["none", "selective"])
def test_code_with(policy: str) -> None:
    case = parity.case("gpt2", 2, 8, 0.1)
    check_golden(f"gpt2/code_{policy}.py.txt", parity.compiled(case, tp=2, recompute=policy).code)
