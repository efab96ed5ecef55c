"""What a user may look at of the latest compilation."""

from __future__ import annotations

from sp_compiler.base.errors import ArgumentError
from sp_compiler.graph_diff.comparable import snapshot_of
from sp_compiler.graph_diff.diff import diff
from sp_compiler.graph_diff.report import GraphDiff
from sp_compiler.ir.snapshot import Snapshot
from sp_compiler.module.state import ModuleState
from sp_compiler.options import ExampleInputs
from sp_compiler.planning.plan import Plan


class Inspection:
    """Plan, code and graphs of the latest compilation, as a base class of the module."""

    _sp_state: ModuleState

    @property
    def plan(self) -> Plan:
        """Cost of the latest compilation; see :func:`sp_compiler.plan`."""
        plan: Plan = self._sp_state.compiled("plan").plan
        return plan

    @property
    def code(self) -> str:
        """The generated Python text that runs."""
        return self._sp_state.compiled("code").code

    @property
    def stages(self) -> dict[str, Snapshot]:
        """Graphs of the latest compilation, pass by pass.

        By the name of the pass (:class:`sp_compiler.base.pass_report.Pass`); ``"capture"`` is
        another name of ``"outline"``, the captured model cut into regions, and ``"final"`` of
        ``"tag"``, one rank's part with collectives and with what backward recomputes.
        """
        return self._sp_state.compiled("stages").stages

    def diff(self, before: str, after: str) -> GraphDiff:
        """Return what changed between two of :attr:`stages`, such as ``"capture"`` and ``"final"``.

        Raises:
            ArgumentError: there is no such stage.
            NotCompiledError: nothing is compiled yet.
        """
        # Not the last one alone: a user looks for the pass that made a node.
        stages = self._sp_state.compiled("diff").stages
        try:
            return diff(stages[before], stages[after])
        except KeyError as error:
            raise ArgumentError(f"stage {error}: expected one of {', '.join(stages)}") from error


@snapshot_of.register
def _(value: Inspection, example_inputs: ExampleInputs | None) -> Snapshot:
    return snapshot_of(value._sp_state.compiled("diff").stages, None)
