"""Inspection of the latest compilation by the user."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.codegen.edited import with_code
from sp_compiler.graph_diff.comparable import snapshot_of
from sp_compiler.graph_diff.diff import diff
from sp_compiler.graph_diff.report import GraphDiff
from sp_compiler.ir.snapshot import Snapshot, unknown_stage
from sp_compiler.module.calls import executor_for
from sp_compiler.module.outputs import plain_input
from sp_compiler.module.state import COMPILING, ModuleState
from sp_compiler.planning.plan import Plan
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.trace.arguments import ExampleInputs, checked_inputs
from sp_compiler.trace.export import flatten_inputs
from sp_compiler.verification.edited import check_edited


class Inspection:
    """Plan, code and graphs of the latest compilation, as a base class of the module."""

    _sp_state: ModuleState

    @property
    def plan(self) -> Plan:
        """Cost of the latest compilation; see :func:`sp_compiler.plan`."""
        return PlannedProgram.plan_of(self._sp_state.compiled("plan"))

    @property
    def code(self) -> str:
        """The generated Python that runs, as text."""
        return self._sp_state.compiled("code").code

    def load_code(self, source: str | Path, example_inputs: ExampleInputs) -> None:
        """Run an edited version of :attr:`code` for calls with inputs like these.

        >>> text = module.code.replace("F.relu(up)", "torch.relu(up)")
        >>> module.load_code(text, ((x,), {}))

        The edited code must compute the same results: its outputs and all gradients are compared
        with those of the generated code on simulated ranks in each process, on these inputs and
        random parameters in float64, which takes the memory of the unsharded model. It may save
        other tensors, use other names or communicate differently. Calls that compile another
        program run generated code; the plan and the stages remain those of the generated code.

        Args:
            source: the text, or the path of a file; the same on every rank.
            example_inputs: (args, kwargs) of a call.

        Raises:
            ArgumentError: ``example_inputs`` are not (args, kwargs); or the text is not valid
                Python, lacks a class or method of the generated code or changes its arguments,
                raises an error, computes another result, or the inputs lead to NaN. The module
                continues with its previous code.
            RankMismatchError: the ranks got different texts.
            UnsupportedError: the backend is not "eager": others compile graphs instead of text.
        """
        state = self._sp_state
        if state.options["backend"] != repr("eager"):
            raise UnsupportedError(
                f"load_code: backend={state.options['backend']} compiles graphs into kernels; "
                'compile with backend="eager" to run edited code'
            )
        # A single line is a path, since generated modules have many lines.
        is_text = isinstance(source, str) and "\n" in source
        text = str(source) if is_text else _read(Path(source))
        args, kwargs = checked_inputs(self, example_inputs)
        leaves, structure = flatten_inputs(args, kwargs, state.unordered)
        leaves = [plain_input(leaf) for leaf in leaves]
        with state.group.reporting(), COMPILING:
            # Not the texts themselves: a message would show only their equal beginnings.
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            state.agreement.require_equal(
                "calls load_code()", {"digest of the edited code": digest}
            )
            executor = executor_for(state, leaves, structure)
            generated = executor.compiled
            edited = with_code(generated, text)
            stored = {name: state.parameters[name] for name in generated.param_placements}
            check_edited(generated, edited, stored, state.buffers, leaves)
        replacement = state.executor(edited)
        state.programs = state.programs.mapped(
            lambda each: replacement if each is executor else each
        )
        state.latest = edited

    @property
    def stages(self) -> dict[str, Snapshot]:
        """Graphs of the latest compilation after each pass, by the name of the pass.

        Names are those of :class:`sp_compiler.base.pass_report.Pass`. ``"capture"`` is another name
        for ``"outline"``, the captured model cut into regions; ``"final"`` for ``"tag"``, one
        rank's program with collectives and with tags for recomputation.
        """
        return self._sp_state.compiled("stages").stages

    def diff(self, before: str, after: str) -> GraphDiff:
        """Return what changed between two of :attr:`stages`, such as ``"capture"`` and ``"final"``.

        Raises:
            ArgumentError: no such stage.
            NotCompiledError: nothing is compiled yet.
        """
        # Any two stages, since a user may look for the pass that made a node.
        stages = self._sp_state.compiled("diff").stages
        try:
            return diff(stages[before], stages[after])
        except KeyError as error:
            raise unknown_stage(error.args[0], stages) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"load_code: expected the text of module.code, edited, or a file with it: {error}"
        ) from error


@snapshot_of.register
def _(value: Inspection, example_inputs: ExampleInputs | None) -> Snapshot:
    return snapshot_of(value._sp_state.compiled("diff").stages, None)
