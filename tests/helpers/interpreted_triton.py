"""Triton without a GPU: kernels run in its interpreter for NumPy, in a process of their own.

Triton reads where a kernel is defined whether to interpret it, and changes its own modules when it
does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this machine"
)
Run = Callable[..., Any]
"""``run(function, *arguments)``: the function's result in the other process."""

# What the module that Inductor writes around its kernels asks of a GPU, on the CPU.
_HEAD = """
import contextlib
import torch
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

BLOCK = 256
empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
copy_if_misaligned = lambda x: x
assert_size_stride = lambda *_: None
get_raw_stream = lambda device: None
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor


class Launched:
    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, *arguments, stream):
        self.kernel[triton.cdiv(arguments[-1], BLOCK),](*arguments, XBLOCK=BLOCK)
"""


@contextlib.contextmanager
def interpreter() -> Iterator[Run]:
    """Context with a process in which kernels are interpreted."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _interpret) as pool:
        yield lambda *args: pool.submit(*args).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def run_emitted(text: str, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run, in such a process, a module that Inductor has emitted for a GPU.

    Args:
        text: of the module; its kernels are elementwise.
        arguments: of its function ``call``, on the CPU.
    """
    kernels = re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)^'''", text, re.M | re.S)
    assert kernels
    lines = [_HEAD]
    for name, source in kernels:
        assert "triton_heuristics.pointwise(" in source
        lines.append(source[source.index("@triton.jit") :])
        lines.append(f"{name} = Launched({name})")
    runner = text[text.index("class Runner:") : text.index("runner = Runner(")]
    runner = runner.replace("torch.cuda.set_device(0)", "pass")
    lines.append(runner.replace("torch.cuda._DeviceGuard(0)", "contextlib.nullcontext()"))
    with tempfile.TemporaryDirectory() as folder:
        # Triton reads the source of a kernel from its file.
        path = Path(folder, "emitted.py")
        path.write_text("\n".join(lines))
        spec = importlib.util.spec_from_file_location("emitted", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with torch.no_grad():
            return module.Runner([]).call(list(arguments))
