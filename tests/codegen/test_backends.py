"""Every backend gives what the model gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor import config

from sp_compiler.options import BACKENDS
from tests.helpers import parity
from tests.helpers.inductor import own_cache


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("inductor")
    # Together they have so many kernels that compiling the headers once pays.
    with own_cache(folder), config.patch(cpp_cache_precompile_headers=True):
        yield folder


def _backends() -> Iterator[object]:
    for backend in BACKENDS:
        # It runs a C++ compiler for every chain of operators.
        marks = [pytest.mark.slow] if backend == "inductor" else []
        yield pytest.param(backend, marks=marks)


@pytest.mark.parametrize("backend", list(_backends()))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_outputs_and_gradients(backend: str, name: str) -> None:
    program = parity.assert_parity(parity.case(name, 2, 12), tp=2, backend=backend)
    assert not [note for note in program.notes if "runs as written" in note]
