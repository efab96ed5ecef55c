"""Compilation of kernels at the first call, on all ranks of a group or on none."""

from __future__ import annotations

import functools

from sp_compiler.base.collector import older_objects_skipped
from sp_compiler.ir.compiled_program import CompiledProgram, Kernel
from sp_compiler.runtime.rank_checks import RankAgreement


# Importing Inductor creates as many objects as a compilation.
@older_objects_skipped()
def compile_kernels(agreement: RankAgreement, compiled: CompiledProgram) -> None:
    """Compile the kernels of ``compiled``; a function that fails on one rank runs uncompiled on
    all.

    Generated code and kernels round differently: replicated values would drift apart between a rank
    that runs one and a rank that runs the other. The reasons are added to the plan. Functions that
    the usual training step does not call are compiled in the same way at their first call.

    Raises:
        RankMismatchError: a rank does not arrive, or has not compiled one function in time.
        RankFailureError: a rank has failed.
    """
    for region in compiled.program.regions:
        for kernel in compiled.kernels.get(region.name, ()):
            compile_it = functools.partial(_compile, kernel, agreement, compiled)
            if kernel.is_rare:
                kernel.before_first_call = compile_it
            else:
                compile_it()
    compiled.kernels = {}


def _compile(kernel: Kernel, agreement: RankAgreement, compiled: CompiledProgram) -> None:
    # One by one: ranks with different cache hits stay close together, and none waits longer than
    # another one needs for one function.
    reasons = agreement.exchanged(f"compiles {kernel.name}", kernel.compile())
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    if failed:
        kernel.run_as_written(failed[0])
        compiled.add_notes([f"{kernel.name} runs uncompiled on all ranks: {failed[0]}"])
