"""State of one compiled module in addition to its parameters."""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import NotCompiledError
from sp_compiler.base.placement import I, Placement
from sp_compiler.grid.fully_sharded import FullySharded, compute_dtype
from sp_compiler.grid.same_modes import SameModes
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.hooks.block_hooks import Invocation
from sp_compiler.module.hooks.block_values import BlockForms
from sp_compiler.module.hooks.hooked_module import call_block
from sp_compiler.module.module_tree import Layout, MirrorModule
from sp_compiler.module.source_model import Original
from sp_compiler.module.views import NamedTensors
from sp_compiler.runtime.cuda_graphs.replayed_steps import ReplayedSteps
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.keys.call_key import CallKey
from sp_compiler.runtime.parameter_gradients import local_tensor
from sp_compiler.runtime.program_cache import ProgramCache
from sp_compiler.runtime.rank_checks import RankAgreement
from sp_compiler.runtime.reductions import DeferredGradients, reduce_gradients
from sp_compiler.runtime.weight_gradients import WeightGradients
from sp_compiler.trace.arguments import unordered_keywords

COMPILING = threading.RLock()
"""Held while a program is looked up and compiled: torch captures in one thread at a time."""

Build = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Placement] | None, bool],
    CompiledProgram,
]


class ModuleState:
    """Programs of one compiled module, and the storage of its parameters.

    Args:
        root: the user's module, with its tree and its parameters.
        original: the model that was taken over.
        build: compiles; see :class:`~sp_compiler.module.distributed_module.DistributedModule`.
        options: options with which ``build`` compiles, by name.
        initial_weights: "compare" or "broadcast", over the ranks, before they are sharded.

    Attributes:
        layout: how parameters are stored, shared with the modules of the tree.
        signature: signature of the model's own forward.
        unordered: keyword arguments whose order that forward cannot see; ``None`` for all.
        modules, parameters, buffers: those of ``root``, by name.
        programs: one executor for each kind of call.
        fsdp: the parameters that FSDP2 manages.
        fsdp_options: options for FSDP2 once parameters are placed; ``None`` after that, or if the
            user applies FSDP2.
        absent_dtype: compute dtype of other stages of a pipeline; ``None`` if it is that of their
            parameters.
        loss_only: whether the next call needs only the loss; ``build`` compiles accordingly.
        agreement: compares the ranks' calls.
        modes: compares in which mode ranks with other data call.
        compared: kinds and names of the tensors that were compared over the ranks.
        fixed: placements of all parameters that a program uses; ``None`` before the first program.
        ties: groups of names of parameters that were tied when a program was compiled.
        latest: the last program that ran or was compiled.
        latest_key: key of the last call, without decisions.
        compiled_for: arguments of the last call that was compiled, as text by name, and its key.
        steps: runs calls from recorded graphs; ``None`` if nothing is recorded.
        has_data: whether no parameter or buffer was on the meta device at the last check.
    """

    def __init__(
        self,
        root: MirrorModule,
        original: Original,
        build: Build,
        options: Mapping[str, str],
        initial_weights: str,
    ) -> None:
        self.root = root
        self.original = original
        self.build = build
        self.options = dict(options)
        self.initial_weights = initial_weights
        self.compared: set[str] = set()
        self.layout: Layout = root._sp_layout
        # Read once, since ``forward`` of the model is replaced while it is asleep.
        self.signature = inspect.signature(original.forward)
        self.unordered = unordered_keywords(original.forward)
        # Modules are fixed from now on. Their tensors may be replaced, so only these are looked up
        # in every call.
        self.modules: dict[str, nn.Module] = dict(root.named_modules(remove_duplicate=False))
        self.parameters = NamedTensors(self.modules, "_parameters")
        self.buffers = NamedTensors(self.modules, "_buffers")
        self.programs = ProgramCache[Executor]()
        self.fsdp_options: Mapping[str, Any] | None = None
        self.absent_dtype: torch.dtype | None = None
        self.loss_only = False
        communicator = self.group.communicator
        self.fsdp = FullySharded(self.modules, lambda grads: reduce_gradients(communicator, grads))
        self.deferred.others_wait = self.fsdp.has_unreduced
        self.deferred.drop_others = self.fsdp.drop_unreduced_of
        self.agreement = RankAgreement(self.group, "module", self.options)
        self.modes = SameModes(self.group)
        self.fixed: dict[str, Placement] | None = None
        self.ties: set[tuple[str, ...]] = set()
        self.latest: CompiledProgram | None = None
        self.latest_key: CallKey | None = None
        self.compiled_for: tuple[Mapping[str, str], CallKey | None] = {}, None
        self.has_data = False
        self.steps: ReplayedSteps | None = None

    @property
    def group(self) -> TensorParallelGroup:
        return self.layout.group

    @property
    def deferred(self) -> DeferredGradients:
        return self.layout.deferred

    def replays_steps(self, *, enabled: bool) -> None:
        """Set whether training steps are recorded and replayed."""
        parts = self.parameters, self.buffers, self.deferred, self.agreement
        self.steps = ReplayedSteps(*parts) if enabled else None

    def copied(self, root: MirrorModule, memo: dict[int, Any]) -> ModuleState:
        """Return the state of ``root``, a deep copy of the current root, with the same programs.

        Gradients that are pending are not copied, like those in ``grad``.
        """
        result = ModuleState(
            root,
            copy.deepcopy(self.original, memo),
            self.build,
            self.options,
            self.initial_weights,
        )
        # Tensors that are equal on all ranks are equal in the copies too.
        result.compared = set(self.compared)
        result.programs = self.programs.mapped(lambda old: result.executor(old.compiled))
        result.fixed = None if self.fixed is None else dict(self.fixed)
        result.ties = set(self.ties)
        result.latest = self.latest
        result.compiled_for = self.compiled_for
        result.fsdp_options = self.fsdp_options
        result.has_data = self.has_data
        result.replays_steps(enabled=self.steps is not None)
        return result

    def executor(
        self,
        compiled: CompiledProgram,
        weights: WeightGradients | None = None,
        *,
        gathered: bool = False,
    ) -> Executor:
        """Return an executor of ``compiled`` on this module, which calls blocks through their
        modules and hooks.

        ``gathered``: whether FSDP's parameters are already gathered when the program runs.
        """

        tp, calls = self.group.communicator, compiled.program.calls

        def call(
            index: int,
            invoke: Callable[..., tuple[Any, ...]],
            values: Sequence[Any],
            leaves: Sequence[Any],
        ) -> tuple[Any, ...]:
            block = self.modules[calls[index].path]
            assert isinstance(block, MirrorModule)
            forms = partial(BlockForms.of, tp, compiled, index, leaves)
            autocast = () if self.latest_key is None else self.latest_key.autocast
            return call_block(block, Invocation(invoke, forms, autocast), values)

        # Gathered parameters are like others: their gradients do not involve FSDP.
        managed = frozenset if gathered else self.managed
        return Executor(
            compiled, tp, call, self.deferred, managed, weights,
            leaves_partial=gathered and self.group.data.mesh is not None,
        )  # fmt: skip

    def without_data(self) -> list[str]:
        """Return the names of parameters and buffers on the meta device."""
        tensors = itertools.chain(self.parameters.items(), self.buffers.items())
        return [name for name, value in tensors if value.is_meta]

    @property
    def waits_over_data(self) -> bool:
        """Whether ranks along data axes wait for each other: in FSDP, and to compare weights.

        Without FSDP, one of them may catch an error and continue by itself.
        """
        return self.fsdp_options is not None or self.fixed is None or bool(self.managed())

    def managed(self) -> Mapping[str, Any]:
        """Return FSDP's records of the parameters that it gathers and shards, by name."""
        # The number of hooks tells whether ``fully_shard`` was applied; there is no other sign.
        return self.fsdp.parameters(self.layout.num_hooks)

    def kept_placements(self) -> dict[str, Placement] | None:
        """Return the placements that a compilation must keep; ``None`` before the first one."""
        if self.fixed is None:
            return None
        # FSDP gathers into a buffer of the size that a parameter had when FSDP was applied. A
        # parameter that no program has used yet was replicated over "tp", and must stay so.
        return {**dict.fromkeys(self.managed(), I), **self.fixed}

    def computed_as(self) -> dict[int, tuple[torch.dtype, torch.device]]:
        """Return dtype and device, by ``id``, of managed parameters while their block runs.

        At other times they may have another dtype, by FSDP's mixed precision, and be on another
        device, by its offloading.
        """
        return {
            id(parameter): (compute_dtype(record, parameter.dtype), record.device)
            for name, record in self.managed().items()
            for parameter in (self.parameters[name],)
        }

    def device(self) -> torch.device:
        """Return the device of the model; the CPU if it has no parameters."""
        for name, parameter in self.parameters.items():
            record = self.managed().get(name)
            return local_tensor(parameter).device if record is None else record.device
        return torch.device("cpu")

    def compiled(self, what: str) -> CompiledProgram:
        """Return the latest program.

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
        """Yield every distributed parameter with its placement."""
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor):
                yield parameter, self.layout.placements.get(name, I)
