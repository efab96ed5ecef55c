"""Backends: each file turns the regions of a program into functions that run.

``backend=`` takes the file's name. Its ``compile_regions(regions) -> LoadedProgram`` reads
``partitioned.forward`` and ``.backward`` of each region, and keeps the order of the starts and
waits of collectives, what is saved, and these signatures::

    forward(tp, *inputs) -> outputs, saved
    backward(tp, saved, *tangents) -> one gradient or None per input
    loss_backward(tp, saved, tangent)    # where ``partitioned.loss`` is not None

``partitioned.functions`` has further graphs where consecutive calls of a region work for each other
(:class:`~sp_compiler.ir.forward_backward.LookAhead`), or where a backward is split
(:class:`~sp_compiler.ir.forward_backward.SplitBackward`). A backend without functions of these
names runs each call alone; pipeline schedules that split the backward need the latter.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.codegen.wiring import wiring
from sp_compiler.ir.compiled_program import Kernel
from sp_compiler.ir.program import Program


@dataclass(frozen=True)
class LoadedProgram:
    """Functions that run.

    Attributes:
        source: text for users; it is the code that runs if the backend runs text.
        codes: by region name, an object with the functions.
        value_names: by region name, the names in ``source`` of its graphs' nodes.
        notes: remarks for the plan: code that the backend does not compile, with the reason.
        kernels: by region name, functions that are compiled only when the program first runs.
    """

    source: str
    codes: Mapping[str, Any]
    value_names: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...] = ()
    kernels: Mapping[str, Sequence[Kernel]] = field(default_factory=dict)


def compile_regions(
    program: Program, regions: Sequence[CompiledRegion], backend: str
) -> LoadedProgram:
    """Compile the ``regions`` of ``program`` with ``backend``, the name of a file in this folder.

    The source ends with a comment that chains the regions' calls, whatever the backend.
    """
    # By name, because a backend may need packages that others do not.
    module = importlib.import_module(f"{__name__}.{backend}")
    loaded: LoadedProgram = module.compile_regions(regions)
    source = loaded.source + wiring(program, regions, loaded.value_names)
    report_of(Pass.CODEGEN).rewrote(source.count("\n"), kind="line")
    return replace(loaded, source=source)
