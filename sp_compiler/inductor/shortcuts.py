"""Work that Inductor repeats and that need not be: the code that it writes stays the same."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Context in which Inductor compiles with all shortcuts of this module."""
    with vector_units_tried_once(), types_listed_once(), equal_bounds_kept():
        yield


@contextlib.contextmanager
def types_listed_once() -> Iterator[None]:
    """Context in which Inductor lists the types that operators return once.

    It has one object for them, and fills that anew for every operator of every loop that it
    writes. The 50 operators of a mask make that a fifth of its Python time.
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
    """Context in which the intersection of a range of numbers with an equal one is that range.

    Inductor asks for it at every reuse of a value, and lets SymPy find the minimum of two equal
    numbers, for as long as the rest of the writing takes.
    """
    from torch.utils._sympy.value_ranges import ValueRanges

    intersection = ValueRanges.tighten

    def tighten(this: ValueRanges[Any], other: ValueRanges[Any]) -> ValueRanges[Any]:
        return this if this == other else intersection(this, other)

    with mock.patch.object(ValueRanges, "tighten", tighten):
        yield


@contextlib.contextmanager
def vector_units_tried_once() -> Iterator[None]:
    """Context in which Inductor tries the vector units of a CPU once for its cache on disk.

    It does so in every process: for each unit another process loads a library, which for a program
    whose kernels are in the cache takes as long as everything else. Here what has passed is noted
    in the cache, by the unit's code and flags, the compiler and torch.
    """
    from torch._inductor.cpu_vec_isa import VecISA, _get_isa_dry_compile_fingerprint
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    check = VecISA.check_build

    def check_once(unit: VecISA, code: str) -> bool:
        facts = _get_isa_dry_compile_fingerprint(unit.build_arch_flags()) + code
        note = Path(cache_dir(), f"vector_unit_{hashlib.sha256(facts.encode()).hexdigest()}")
        if note.exists():
            return True
        passes = check(unit, code)
        if passes:
            note.touch()
        return passes

    with mock.patch.object(VecISA, "check_build", check_once):
        yield
