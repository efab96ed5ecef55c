"""Compilation of kernels at the first call, on all ranks of a group or on none."""

from __future__ import annotations

from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.runtime.rank_checks import RankAgreement


def compile_kernels(agreement: RankAgreement, compiled: CompiledProgram) -> None:
    """Compile the kernels of ``compiled``; a function that fails on one rank runs as generated on
    all.

    Generated code and kernels round differently: replicated values would drift apart between a rank
    that runs one and a rank that runs the other. The reasons are added to the plan.

    Raises:
        RankMismatchError: a rank does not come, or has not compiled one function in time.
        RankFailureError: a rank has failed.
    """
    notes: list[str] = []
    for region in compiled.program.regions:
        for kernel in compiled.kernels.get(region.name, ()):
            # One by one: ranks that find different parts in their caches stay close together, and
            # none waits for longer than another takes for one function.
            reasons = agreement.exchanged(f"compiles {kernel.name}", kernel.compile())
            failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
            if failed:
                kernel.run_as_written(failed[0])
                notes.append(f"{kernel.name} runs as written, on all ranks: {failed[0]}")
    compiled.kernels = {}
    compiled.add_notes(notes)
