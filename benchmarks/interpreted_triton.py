"""Inductor's code for a GPU, run without one: Triton interprets the kernels with NumPy.

Triton reads when it is imported whether to interpret: set ``TRITON_INTERPRET=1`` before.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.pretended_gpu import until_written
from sp_compiler.inductor.lowering import Traced

# Inserted after the module's imports: replacements on the CPU for functions that need a GPU.
_HEAD = '''
import contextlib
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import math as tl_math

BLOCKS = {"XBLOCK": 256, "YBLOCK": 16, "ZBLOCK": 4, "R0_BLOCK": 8}


def empty_strided_cuda(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype)


def get_raw_stream(device):
    return None


class Products:
    """Those of cuBLAS, by the names that torch has for them."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def convolution(self, *args, **kwargs):
        # In the layout of cuDNN: the CPU's own kernels put channels last.
        return torch.convolution(*args, **kwargs).contiguous()


class Library:
    """Functions of CUDA's library by those of Triton."""

    def __getattr__(self, name):
        return getattr(tl, name)

    def tanh(self, x):
        return 2 * tl.sigmoid(2 * x) - 1

    def log1p(self, x):
        sum = 1 + x  # what is rounded off in it is made good
        return tl.where(sum == 1, x, tl.log(sum) * (x / (sum - 1)))

    def isnan(self, x):
        return x != x

    def pow(self, x, y):
        return tl.exp2(tl.log2(x) * y)


class Helpers:
    """Those of Inductor, but for what the interpreter would compute element by element."""

    def __getattr__(self, name):
        return getattr(inductor_helpers, name)

    def max2(self, x, dim):
        found = tl.max(x, dim)
        if not x.dtype.is_floating():
            return found
        # Else without those that are none.
        return tl.where(tl.max((x != x).to(tl.int32), dim) != 0, float("nan"), found)


extern_kernels, libdevice = Products(), Library()
inductor_helpers, triton_helpers = triton_helpers, Helpers()


class Launched:
    """A kernel that runs for all of its blocks."""

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, *arguments, stream):
        names = self.kernel.arg_names
        if len(arguments) > len(names):  # a template, of attention: its grid comes last
            self.kernel[arguments[len(names) :]](*arguments[: len(names)])
            return
        given = dict(zip(names, arguments))
        blocks = {name: BLOCKS[name] for name in names if name in BLOCKS}
        grid = [
            triton.cdiv(given[f"{dim}numel"], blocks[block]) if block in blocks else 1
            for dim, block in (("x", "XBLOCK"), ("y", "YBLOCK"), ("z", "ZBLOCK"))
        ]
        self.kernel[tuple(grid)](*arguments, **blocks)
'''


def load(text: str) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Return the function of a module that Inductor has written for a GPU; it takes and returns
    tensors on the CPU."""
    imports = text[: text.index("async_compile = ")].splitlines()
    lines = [*(line for line in imports if "get_raw_stream" not in line), _HEAD]
    written = r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)^'''"
    for name, source in re.findall(written, text, re.MULTILINE | re.DOTALL):
        _, _, kernel = source.partition("triton_helpers.set_driver_to_gpu()\n")
        # A template has no such line, and needs nothing that comes before its kernel.
        kernel = kernel or source[source.index("@triton_heuristics") :]
        # The functions of a template have the same names in each kernel.
        for inner in re.findall(r"^def (\w+)\(", kernel, re.MULTILINE):
            if inner != name:
                kernel = re.sub(rf"\b{inner}\b", f"{name}_{inner}", kernel)
        tuned = r"^@triton_heuristics\.\w+\(.*?^\)\n(?=@triton\.jit)"
        lines.append(re.sub(tuned, "", kernel, flags=re.MULTILINE | re.DOTALL))
        lines.append(f"{name} = Launched({name})")
    runner = text[text.index("class Runner:") : text.index("runner = Runner(")]
    runner = runner.replace("torch.cuda.set_device(0)", "pass")
    lines.append(runner.replace("torch.cuda._DeviceGuard(0)", "contextlib.nullcontext()"))
    # Triton reads the source of a kernel from its file, as soon as the kernel is defined.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "written.py")
        path.write_text("\n".join(lines), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("written", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    call = module.Runner([]).call

    def run(arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        # The caller's modes, such as that of simulated ranks, must not see a kernel.
        with torch.no_grad(), _disable_current_modes():
            return call(list(arguments))

    return run


def compile_graph(traced: Traced) -> Callable[[list[Any]], Sequence[Any]]:
    """Return interpreted kernels, in place of
    :func:`sp_compiler.inductor.lowering.compile_graph`."""
    # Simulated ranks compile in their mode, which would see Inductor's fake tensors.
    with _disable_current_modes():
        return load(until_written(traced, _text))


def _text(graph: GraphLowering) -> str:
    text, _ = graph.codegen()
    return text.value
