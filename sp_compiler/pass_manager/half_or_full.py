"""Programs that run layers on half batches, or on full ones, whichever pays off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sp_compiler.base.errors import ArgumentError
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.open_sizes import compile_open_or_fixed
from sp_compiler.passes.half_batches import halves_pay
from sp_compiler.passes.memory.budget import BudgetError
from sp_compiler.planning.planned_program import PlannedProgram


def compile_half_or_full(
    compile_with: Callable[..., PlannedProgram], options: CompileOptions, open_dims: bool
) -> PlannedProgram:
    """Compile with half batches and without; return the program that pays off, or fits into memory.

    Raises:
        ArgumentError: neither fits.
    """
    halves: PlannedProgram | None = None
    try:
        halves = compile_with(replace(options, half_batches=True), open_dims=False)
    except ArgumentError as error:
        # Any error in an argument other than a lack of memory is raised by full batches, too.
        refusal = error
    full_options = replace(options, half_batches=False)
    try:
        full = compile_open_or_fixed(compile_with, full_options, open_dims)
    except ArgumentError as error:
        if halves is not None:
            return halves
        raise _asking_for_less(refusal, error) from None
    if halves is not None and halves_pay(halves.plan, full.plan, options.budget_bytes):
        return halves
    return full


def _asking_for_less(one: ArgumentError, other: ArgumentError) -> ArgumentError:
    """Return the error that names the smaller sufficient budget, else ``other``."""
    if isinstance(one, BudgetError) and isinstance(other, BudgetError):
        return min(one, other, key=lambda error: error.least_bytes)
    return other
