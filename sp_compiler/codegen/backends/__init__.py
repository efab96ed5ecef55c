"""Backends: each file turns the regions of a program into functions that run.

``backend=`` takes the file's name. Its ``compile_regions(regions) -> LoadedProgram`` reads
``partitioned.forward`` and ``.backward`` of each region, and keeps the order of the starts and
waits of collectives, what is saved, and these signatures::

    forward(tp, *inputs) -> outputs, saved
    backward(tp, saved, *tangents) -> one gradient or None per input
    loss_backward(tp, saved, tangent)    # where ``partitioned.loss`` is not None
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.ir.compiled_program import Kernel


@dataclass(frozen=True)
class LoadedProgram:
    """What runs.

    Attributes:
        source: text for people, which is what runs where the backend runs text.
        codes: by name of the region, an object with the functions.
        value_names: by name of the region, what ``source`` calls the values of its graphs' nodes.
        notes: for the plan: what the backend does not compile, and why.
        kernels: by name of the region, what it compiles only when the program first runs.
    """

    source: str
    codes: Mapping[str, Any]
    value_names: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...] = ()
    kernels: Mapping[str, Sequence[Kernel]] = field(default_factory=dict)


def compile_regions(regions: Sequence[CompiledRegion], backend: str) -> LoadedProgram:
    """Let ``backend``, the name of a file beside this one, make functions of ``regions``."""
    # By name, for a backend may need packages that others do without.
    module = importlib.import_module(f"{__name__}.{backend}")
    loaded: LoadedProgram = module.compile_regions(regions)
    return loaded
