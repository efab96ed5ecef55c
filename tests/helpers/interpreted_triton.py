"""Triton without a GPU: kernels run in its interpreter for NumPy, in a process of their own.

Triton reads where a kernel is defined whether to interpret it, and changes its own modules when it
does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from torch import Tensor

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this machine"
)
Run = Callable[..., Any]
"""``run(function, *arguments)``: the function's result in the other process."""


@contextlib.contextmanager
def interpreter() -> Iterator[Run]:
    """Context with a process in which kernels are interpreted."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _interpret) as pool:
        yield lambda *args: pool.submit(*args).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def run_emitted(text: str, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run, in such a process, the function of a module that Inductor has written for a GPU."""
    from benchmarks.interpreted_triton import load

    return load(text)(arguments)
