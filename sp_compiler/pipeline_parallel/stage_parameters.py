"""The parameters of one rank of a pipeline: those of its own stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.grid.data_parallel import apply_data_parallelism
from sp_compiler.grid.gathered import GatheredParameters
from sp_compiler.grid.stage_overflows import skip_steps_together
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.calls import require_data
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.module.shared_memory import check_memory_apart
from sp_compiler.module.views import NamedTensors
from sp_compiler.pipeline_parallel.axes import PipelineAxis
from sp_compiler.pipeline_parallel.ranks import StageRanks
from sp_compiler.pipeline_parallel.stage_program import Stage
from sp_compiler.pipeline_parallel.ties import TiedParameters, holders_of
from sp_compiler.runtime.mesh_axes import REPLICATE_AXIS

_METHODS = (
    "step(...) trains, eval(...) and eval_loss(...) evaluate; pipeline.module is the nn.Module "
    "with the parameters of this rank's stages"
)


class StageParameters:
    """Access to the parameters of this rank's stages, and their checkpoints.

    Args:
        module: the compiled module with the parameters of all stages.
        axis: the mesh axis of the pipeline.

    Attributes:
        module: the model's module tree with this rank's parameters, for tools that need an
            ``nn.Module``. It cannot be called.
    """

    def __init__(self, module: DistributedModule, axis: PipelineAxis) -> None:
        if axis.size > 1:
            check_memory_apart(module)
        self.module = module
        self._state = module._sp_state
        self._axis = axis
        self._stage_ranks = StageRanks(self._state, axis)
        # Later this rank has only some of them.
        self._names = list(module.state_dict())
        self._trained: tuple[bool, ...] = ()
        self._ties = TiedParameters({}, axis)
        self._gathered: GatheredParameters | None = None
        self._foreign: frozenset[str] = frozenset()
        self._state.layout.calls_root = False
        skip_steps_together(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError(
            "a pipeline cannot be copied: it holds process groups; call sp_compiler.pipeline again "
            "and its load_state_dict(pipeline.state_dict())"
        )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"a pipeline is not called like its model: {_METHODS}")

    if not TYPE_CHECKING:  # it would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            # Such as train(), in the habit of a module. An AttributeError, for hasattr().
            raise AttributeError(f"a pipeline has no attribute {name!r}: {_METHODS}")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter of this rank's stages; a tied parameter once."""
        yield from self.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, for an optimizer."""
        yield from self.module.parameters()

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the part of :meth:`named_parameters` that no earlier rank of the pipeline has.

        Over all ranks of the pipeline, this yields every parameter exactly once.
        """
        for name, parameter in self.named_parameters():
            if min(self._ties.holders.get(name, {self._axis.rank})) == self._axis.rank:
                yield name, parameter

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters of this rank that an earlier rank of the pipeline also has."""
        owned = {name for name, _ in self.owned_parameters()}
        return [parameter for name, parameter in self.named_parameters() if name not in owned]

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Process group of the pipeline, for norms over all stages."""
        return self._axis.group

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers, under the model's names.

        ``torch.distributed.checkpoint.save`` on all ranks writes each of them once.
        """
        state = self.module.state_dict()
        return {name: value for name, value in state.items() if name not in self._foreign}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's own weights, unsharded, on the CPU of rank 0; ``{}`` on other ranks.

        All ranks of the mesh must call it. Apart from the result on rank 0, a rank holds one
        unsharded tensor at a time. Pass the result to ``torch.save``, to the original model's
        ``load_state_dict`` or to ``pipeline.module.save_pretrained(folder, state_dict=...)``.

        Raises:
            ArgumentError: the parameters have no data yet.
            RankMismatchError: another rank of "pp" or "tp" calls something else.
        """
        with self._stage_ranks.reporting():
            require_data(self._state)
            self._stage_ranks.require_all("calls full_state_dict()")
            state = self.module.state_dict(keep_vars=True)
            own = {name: value for name, value in state.items() if name not in self._foreign}
            found = self._stage_ranks.on_first(own)
        # In the model's order, then what was registered later.
        return {
            name: found[name] for name in dict.fromkeys([*self._names, *found]) if name in found
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's parameters and buffers from ``state_dict``, which may have more.

        Raises:
            ArgumentError: a parameter or buffer of this rank is missing.
        """
        # Checkpoints of a grid hold all stages, and a rank reads only its part.
        own = set(self.state_dict())
        missing = own - set(state_dict)
        if missing:
            raise ArgumentError(
                f"the state has no {sorted(missing)[:3]} ({len(missing)} in all), which a stage of "
                "this rank holds"
            )
        self.module.load_state_dict({name: state_dict[name] for name in own}, strict=False)

    def load_pretrained(self, path: str | Path) -> list[str]:
        """Fill the parameters from safetensors files; every rank reads its own part of each.

        See :meth:`~sp_compiler.module.distributed_module.DistributedModule.load_pretrained`. For
        a model built on the meta device, this allocates the memory of this rank's stages.

        Returns:
            Names of tensors in the files that no stage of this rank has.
        """
        return self.module.load_pretrained(path)

    def _keep_own(self, stages: Sequence[Stage], ranks: Sequence[int]) -> None:
        """Drop parameters of other ranks' stages; the first rank has those that no stage uses."""
        named = self._state.parameters
        first = {id(named[name]): name for name in reversed(list(named))}
        used = [frozenset(first[id(named[name])] for name in stage.parameters) for stage in stages]
        unused = frozenset(first.values()).difference(*used)
        holders = holders_of([*used, unused], [*ranks, ranks[0]])
        own = {id(named[name]) for name, who in holders.items() if self._axis.rank in who}
        kept = [position for position, name in enumerate(named) if id(named[name]) in own]
        for module in self.module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in own:
                    module._parameters[name] = None
        # Written by stages of other ranks, and only those ranks have the current values.
        self._foreign = frozenset(
            name
            for stage, rank in zip(stages, ranks, strict=True)
            for name in stage.compiled.program.mutated_buffers
            if rank != self._axis.rank
        )
        self._state.parameters = NamedTensors(self._state.modules, "_parameters")
        # Parameters are part of the key of a program, and there are fewer of them now.
        self._state.programs = self._state.programs.rekeyed(
            lambda key: replace(key, parameters=tuple(key.parameters[i] for i in kept))
        )
        # Checked again: parameters without data may be among those that were dropped.
        self._state.has_data = False
        self._trained = self._trained_now()
        self._ties = TiedParameters(holders, self._axis)

    def _trained_now(self) -> tuple[bool, ...]:
        # Every step asks: module.parameters() would walk through all modules.
        return tuple(parameter.requires_grad for parameter in self._state.parameters.current())

    def _shard_over_data(self, compiled: CompiledProgram, options: Mapping[str, Any]) -> None:
        """Apply FSDP2 to this rank's stages, which then hold only shards between steps."""
        data = self._state.group.data
        if data.names != (REPLICATE_AXIS,):
            options = {**options, "reshard_after_forward": False}
        # FSDP's hook on the root never runs, which is fine: a step gathers what the hook would.
        self._state.layout.calls_root = True
        apply_data_parallelism(self.module, compiled, self._state.group, options)
        self._state.layout.calls_root = False
        # Programs are compiled for the full model; FSDP knows only this rank's part of it.
        policy = options.get("mp_policy")
        self._state.absent_dtype = None if policy is None else policy.param_dtype
        self._gathered = GatheredParameters(self.module, self._state.fsdp)
