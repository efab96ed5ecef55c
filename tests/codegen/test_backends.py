"""Every backend gives what the model gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor import config

from sp_compiler.options import BACKENDS
from tests.helpers import parity
from tests.helpers.inductor import own_cache
from tests.helpers.slow import slow


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("inductor")
    # Together they have so many kernels that compiling the headers once pays.
    with own_cache(folder), config.patch(cpp_cache_precompile_headers=True):
        yield folder


def _cases() -> Iterator[object]:
    for backend in BACKENDS:
        # They run a C++ compiler for every chain of operators. Those of Llama are among those of
        # Mixtral, which tests/benchmarks/test_inductor.py has.
        is_slow = backend != "eager"
        yield slow(backend, "gpt2") if is_slow else (backend, "gpt2")
    yield slow("eager", "llama")


@pytest.mark.parametrize(("backend", "name"), list(_cases()))
def test_outputs_and_gradients(backend: str, name: str) -> None:
    program = parity.assert_parity(parity.case(name, 2, 12), tp=2, backend=backend)
    assert not [note for note in program.notes if "runs uncompiled" in note]
