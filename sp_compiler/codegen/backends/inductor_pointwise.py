"""Chains of operators between matmuls, compiled by Inductor; matmuls run uncompiled."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compiler.codegen.backends import LoadedProgram, inductor
from sp_compiler.codegen.module_text import CompiledRegion


def compile_regions(regions: Sequence[CompiledRegion]) -> LoadedProgram:
    """Load the classes of all regions; as :func:`.inductor.compile_regions`, without matmuls."""
    return inductor.compile_regions(regions, products=False)
