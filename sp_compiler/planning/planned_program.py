"""A compiled program with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.planning.plan import Plan


@dataclass(eq=False)
class PlannedProgram(CompiledProgram):
    """The result of a compilation.

    A separate class, because a plan is made from a compiled program, and code, costs and the
    runtime do not need one.

    Attributes:
        plan: the report of :func:`sp_compiler.plan`.
        rest: the same program with ``recompute_rest``, with which stages run some microbatches.
    """

    plan: Plan = field(kw_only=True)
    rest: PlannedProgram | None = None

    @classmethod
    def of(cls, compiled: CompiledProgram, plan: Plan) -> PlannedProgram:
        """Return ``compiled`` with ``plan``."""
        return cls(**vars(compiled), plan=plan)

    @staticmethod
    def plan_of(compiled: CompiledProgram) -> Plan:
        """Return the plan of a program that was compiled from a model."""
        # The runtime passes programs on as CompiledProgram.
        assert isinstance(compiled, PlannedProgram)
        return compiled.plan

    def add_notes(self, notes: Sequence[str]) -> None:
        """Add them to the plan too."""
        super().add_notes(notes)
        self.plan = replace(self.plan, notes=(*self.plan.notes, *notes))
