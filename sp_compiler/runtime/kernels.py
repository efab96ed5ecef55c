"""Kernels that a backend makes at the first call, made on all ranks of a group or on none."""

from __future__ import annotations

from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.runtime.rank_checks import RankAgreement


def compile_kernels(agreement: RankAgreement, compiled: CompiledProgram) -> None:
    """Compile what ``compiled`` runs; what fails on one rank runs as written on all of them.

    Text and kernels round differently: replicated values, which nothing reduces, would drift apart
    between a rank that runs the one and a rank that runs the other. The reasons go to the plan.

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
