"""Every backend gives what the model gives."""

from __future__ import annotations

import pytest

from sp_compiler.options import BACKENDS
from tests.helpers import parity


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_outputs_and_gradients(backend: str, name: str) -> None:
    parity.assert_parity(parity.case(name, 2, 12), tp=2, backend=backend)
