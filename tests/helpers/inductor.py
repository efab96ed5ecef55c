"""Inductor with a cache of its own, and functions as the generated code has them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._subclasses import FakeTensorMode

from sp_compiler.inductor.fused import Fused, TracingRank

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@contextlib.contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Inductor compiles in this process, and finds nothing but what it has put into ``folder``."""
    settings = {
        "compile_threads": 1,
        # Compiling the headers first pays from the fifth kernel on, trying the vector units never.
        "cpp_cache_precompile_headers": False,
        "cpp.vec_isa_ok": True,
    }
    with pytest.MonkeyPatch.context() as patch, config.patch(settings):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield


def fused(function: Callable[..., Any], arguments: Sequence[Any]) -> Fused:
    """``function(tp, *arguments)`` on two ranks, traced for these shapes."""
    result = Fused(function)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
    with mode:
        result(TracingRank(torch.zeros((), dtype=torch.int64), 2), *fakes)
    return result
