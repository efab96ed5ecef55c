"""Shortcuts for work that Inductor repeats needlessly; the code that it generates is the same."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Context in which Inductor compiles with all shortcuts of this module."""
    with (
        vector_units_tried_once(),
        header_compiled_once(),
        keys_unexplained(),
        triton_hashed_where_it_runs(),
        types_listed_once(),
        equal_bounds_kept(),
    ):
        yield


@contextlib.contextmanager
def types_listed_once() -> Iterator[None]:
    """Context in which Inductor lists the types that operators return only once.

    It has one object for them, and refills that for every operator of every loop that it
    generates. With the 50 operators of a mask, that is a fifth of its Python time.
    """
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    fill = DtypePropagationOpsHandler.__init__
    filled = False

    def fill_once(types: DtypePropagationOpsHandler) -> None:
        nonlocal filled
        if not filled:
            fill(types)
            filled = True

    with mock.patch.object(DtypePropagationOpsHandler, "__init__", fill_once):
        yield


@contextlib.contextmanager
def equal_bounds_kept() -> Iterator[None]:
    """Context in which the intersection of a range of values with an equal one is that range.

    Inductor asks for it at every reuse of a value, and lets SymPy find the minimum of two equal
    numbers, which takes as long as the rest of code generation.
    """
    from torch.utils._sympy.value_ranges import ValueRanges

    intersection = ValueRanges.tighten

    def tighten(this: ValueRanges[Any], other: ValueRanges[Any]) -> ValueRanges[Any]:
        return this if this == other else intersection(this, other)

    with mock.patch.object(ValueRanges, "tighten", tighten):
        yield


@contextlib.contextmanager
def vector_units_tried_once() -> Iterator[None]:
    """Context in which Inductor tests the vector units of a CPU once for its cache on disk.

    It does so in every process: for each unit another process loads a library, which for a program
    whose kernels are in the cache takes as long as everything else. Here a passed test is recorded
    in the cache, by the unit's code and flags, the compiler and torch.
    """
    from torch._inductor.cpu_vec_isa import VecISA, _get_isa_dry_compile_fingerprint

    check = VecISA.check_build

    def check_once(unit: VecISA, code: str) -> bool:
        facts = _get_isa_dry_compile_fingerprint(unit.build_arch_flags()) + code
        note = _note("vector_unit", facts)
        if note.exists():
            return True
        passes = check(unit, code)
        if passes:
            note.touch()
        return passes

    with mock.patch.object(VecISA, "check_build", check_once):
        yield


@contextlib.contextmanager
def header_compiled_once() -> Iterator[None]:
    """Context in which Inductor preprocesses torch's header once for its cache on disk.

    It does so in every process, with the flags of a vector unit, to find the compiled form of the
    header. Here the place of that is recorded in the cache, by the flags, the compiler and torch,
    whose files the header includes.
    """
    from torch._inductor import codecache
    from torch._inductor.codecache import write_atomic
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    compile_header = codecache._precompile_header

    def compile_once(header: str, command: str, **settings: Any) -> str:
        torch_version = torch.__version__, torch.version.git_version
        facts = header, command, get_compiler_version_info(get_cpp_compiler()), torch_version
        note = _note("header", repr(facts))
        if note.exists() and Path(place := note.read_text(encoding="utf-8")).exists():
            return place
        place = compile_header(header, command, **settings)
        # Atomically: another process may read it meanwhile.
        write_atomic(str(note), place)
        return place

    with mock.patch.object(codecache, "_precompile_header", compile_once):
        yield


@contextlib.contextmanager
def keys_unexplained() -> Iterator[None]:
    """Context in which Inductor explains the key of a graph only to a log or ``TORCH_TRACE``.

    The explanation hashes every part of the graph separately, and takes as long as the key.
    """
    from torch._inductor.codecache import FxGraphCachePickler

    explain = FxGraphCachePickler.debug_lines
    log = logging.getLogger("torch._inductor.codecache")

    def explain_if_read(pickler: FxGraphCachePickler, details: Any) -> list[str]:
        is_read = log.isEnabledFor(logging.DEBUG) or "TORCH_TRACE" in os.environ
        return explain(pickler, details) if is_read else []

    with mock.patch.object(FxGraphCachePickler, "debug_lines", explain_if_read):
        yield


@contextlib.contextmanager
def triton_hashed_where_it_runs() -> Iterator[None]:
    """Context in which Inductor hashes Triton, half a gigabyte, only for a device that runs it.

    It does so in every process, and does without the hash where there is no such device: the key
    of a graph is the same.
    """
    from torch._inductor.runtime import triton_compat

    if torch.accelerator.is_available():
        yield
        return
    with mock.patch.object(triton_compat, "triton_key", return_value="read by nobody"):
        yield


def _note(kind: str, facts: str) -> Path:
    """Return the file of Inductor's cache that records something about these ``facts``."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), f"{kind}_{hashlib.sha256(facts.encode()).hexdigest()}")
