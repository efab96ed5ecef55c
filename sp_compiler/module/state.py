"""State of one compiled module besides its parameters."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import NotCompiledError
from sp_compiler.base.placement import I, Placement
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.module_tree import Invocation, Layout, MirrorModule
from sp_compiler.module.source_model import Original
from sp_compiler.module.views import NamedTensors
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.program_cache import ProgramCache
from sp_compiler.runtime.rank_checks import RankAgreement
from sp_compiler.runtime.reductions import DeferredGradients

Build = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Placement] | None, bool],
    CompiledProgram,
]
_INSTANCES = itertools.count()


class ModuleState:
    """Programs of one compiled module, and how its parameters are stored.

    Args:
        root: the module that the user sees, with its tree and its parameters.
        original: the model that was taken over.
        build: compiles; see :class:`~sp_compiler.module.distributed_module.DistributedModule`.
        options: what ``build`` compiles with, by name.
        cache_size: how many programs are kept.
        initial_weights: "compare" or "broadcast", over the ranks, before they have parts.

    Attributes:
        layout: how parameters are stored, shared with the modules of the tree.
        signature: of the model's own forward.
        modules, parameters, buffers: by name.
        programs: one executor for each kind of call.
        deferred: gradients that wait while ``no_sync`` is on.
        agreement: compares the ranks' calls.
        compared: kind and name of the tensors that the ranks were seen to have alike.
        fixed: placements of all parameters that a program uses; ``None`` before the first one.
        latest: the program that ran or was compiled last.
        has_data: whether no parameter or buffer was on the meta device at the last look.
    """

    def __init__(
        self,
        root: MirrorModule,
        original: Original,
        build: Build,
        options: Mapping[str, str],
        cache_size: int,
        initial_weights: str,
    ) -> None:
        self.root = root
        self.original = original
        self.build = build
        self.options = dict(options)
        self.initial_weights = initial_weights
        self.compared: set[str] = set()
        self.layout: Layout = root._sp_layout
        self.signature = inspect.signature(original.forward)
        self.modules: dict[str, nn.Module] = dict(root.named_modules(remove_duplicate=False))
        self.parameters = NamedTensors(self.modules, "_parameters")
        self.buffers = NamedTensors(self.modules, "_buffers")
        self.programs = ProgramCache[Executor](cache_size)
        self.deferred = DeferredGradients()
        # Ranks make their modules in the same order, so the count names one on all of them.
        self.agreement = RankAgreement(self.group, str(next(_INSTANCES)), self.options)
        self.fixed: dict[str, Placement] | None = None
        self.latest: CompiledProgram | None = None
        self.has_data = False

    @property
    def group(self) -> TensorParallelGroup:
        return self.layout.group

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """Let errors inside raise on the other ranks too."""
        board = self.group.board
        return contextlib.nullcontext() if board is None else board.reporting()

    def copied(self, root: MirrorModule, memo: dict[int, Any]) -> ModuleState:
        """State of ``root``, a deep copy of the present root: the same programs, run by its own."""
        result = ModuleState(
            root,
            copy.deepcopy(self.original, memo),
            self.build,
            self.options,
            self.programs.size,
            self.initial_weights,
        )
        result.compared = set(self.compared)
        result.programs = self.programs.mapped(lambda old: result.executor(old.compiled))
        result.fixed = None if self.fixed is None else dict(self.fixed)
        result.latest = self.latest
        result.has_data = self.has_data
        return result

    def executor(self, compiled: CompiledProgram) -> Executor:
        """Runs ``compiled`` on this module: its blocks through their modules, hooks and all."""

        def call_block(
            path: str, invoke: Callable[..., tuple[Any, ...]], values: Sequence[Any]
        ) -> tuple[Any, ...]:
            outputs = self.modules[path](Invocation(invoke), *values)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return Executor(compiled, self.group.communicator, call_block, self.deferred)

    def compiled(self, what: str) -> CompiledProgram:
        """The latest program.

        Raises:
            NotCompiledError: there is none, so the module has no ``what`` yet.
        """
        if self.latest is None:
            raise NotCompiledError(
                f"{what}: nothing is compiled yet; call the module once, or pass example_inputs to "
                "sp_compiler.compile"
            )
        return self.latest

    def stored(self) -> Iterator[tuple[DTensor, Placement]]:
        """Every distributed parameter with its placement."""
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor):
                yield parameter, self.layout.placements.get(name, I)
