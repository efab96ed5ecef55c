"""Runs a compiled program on one rank's tensors, forward and backward.

Real ranks and simulated ones run this same code: parameters are looked up by name and may be
DTensors (their local part is used) or one rank's plain tensors.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sp_compiler.base.autocast import cast_back, with_captured_casts
from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.storage import guarded
from sp_compiler.ir.compiled_program import CompiledProgram, Reached
from sp_compiler.ir.program import Call, Ref, Region
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.counter import call_seeds
from sp_compiler.ops.gpu.host_memory import HostTrip
from sp_compiler.runtime.mesh_axes import EXPERT_AXIS, TENSOR_AXIS
from sp_compiler.runtime.parameter_gradients import mark_reduced_by_hooks
from sp_compiler.runtime.reductions import DeferredGradients, ReplicateParameters
from sp_compiler.runtime.region_call import LookAheadRunner, OffloadingRunner, RegionRunner
from sp_compiler.runtime.weight_gradients import (
    DelayedRunner,
    HandOverRunner,
    WeightGradients,
    WeightTarget,
    can_work_for_others,
    hand_over_runner,
)

Invoke = Callable[..., tuple[Any, ...]]
BlockCall = Callable[[int, Invoke, Sequence[Any], Sequence[Any]], tuple[Any, ...]]


@dataclass
class Execution:
    """Flat outputs of one forward, in the program's order, and new values of buffers."""

    outputs: list[Any]
    mutated_buffers: dict[str, Tensor]


class Executor:
    """Executes a :class:`CompiledProgram`.

    Args:
        compiled: the program.
        tp: this rank's communicator.
        call_block: ``call_block(index, invoke, values, flat_inputs)`` runs a call of the program
            that is a layer of the model by returning ``invoke(*values)``, which looks up the
            parameters. By default the call runs directly.
        deferred: holds gradients of replicated parameters while synchronisation is off.
        managed: names of the parameters that FSDP gathers for a block, and whose gradients it
            reduces.
        weights: holds delayed weight gradients until a schedule runs them; needs a program compiled
            with ``split_backward``.
        leaves_partial: whether gradients of replicated parameters are left as partial sums, for
            FSDP to reduce over the data axes first.
    """

    def __init__(
        self,
        compiled: CompiledProgram,
        tp: Communicator,
        call_block: BlockCall | None = None,
        deferred: DeferredGradients | None = None,
        managed: Callable[[], Collection[str]] = frozenset,
        weights: WeightGradients | None = None,
        *,
        leaves_partial: bool = False,
    ) -> None:
        if compiled.world_size != tp.world_size:
            sizes = f"{compiled.world_size} ranks, the group has {tp.world_size}"
            raise ArgumentError(f"the program was compiled for {sizes}")
        self.compiled = compiled
        self.tp = tp
        self.deferred = deferred or DeferredGradients()
        self._call_block = call_block
        self._managed = managed
        self._weights = weights
        self._leaves_partial = leaves_partial
        self._runners = {
            region.name: RegionRunner(
                code=compiled.codes[region.name],
                differentiable=compiled.differentiable[region.name],
                tp=tp,
                parameters=tuple(
                    index for index, kind in enumerate(region.input_kinds) if kind == "param"
                ),
                loss_backward=compiled.loss_backwards.get(region.name),
                padded={
                    index: placement
                    for index, placement in enumerate(region.input_placements)
                    if region.input_kinds[index] == "param" and placement.padding(tp.world_size)
                },
                partial=_partial_gradients(region),
                reached_from=compiled.reached_from.get(region.name, Reached()),
            )
            for region in compiled.program.regions
        }
        # Computed once per program, not in every step.
        self._replicated = _parameters_used_as_r(compiled)
        self._arguments = [_Arguments(compiled, call) for call in compiled.program.calls]
        self._sent = {
            name: sent
            for name, each in compiled.regions.items()
            if (sent := each.partitioned.sent_to_host)
        }
        self._in_a_row = {
            name: parts
            for name, each in compiled.regions.items()
            if (parts := each.partitioned).middle_backward is not parts.step_backward
            # A backend may leave out the functions of calls that work for others.
            and all(hasattr(compiled.codes[name], function) for function in parts.functions)
        }
        self._last_use = compiled.program.last_uses()
        refs = (ref for call in compiled.program.calls for ref in call.args if ref.kind == "seed")
        self._drawing = sorted({ref.index for ref in refs})
        self.needs_seed = bool(self._drawing)

    @property
    def is_managed(self) -> bool:
        """Whether FSDP gathers parameters for the calls."""
        return bool(self._managed())

    def run(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        flat_inputs: Sequence[Any],
        seed: Tensor | None = None,
    ) -> Execution:
        """Run one forward.

        Args:
            params: stored name to parameter, placed as ``compiled.param_placements``.
            buffers: name to buffer.
            flat_inputs: the flattened user inputs.
            seed: the seed of this forward's random numbers; required if ``needs_seed``.

        Raises:
            IndexError: ids of an earlier call were out of range: a device reports this late.
        """
        self.tp.id_checks.settle()
        with with_captured_casts():
            execution = self._run(params, buffers, flat_inputs, seed)
        self.tp.id_checks.send()
        return execution

    def _run(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        flat_inputs: Sequence[Any],
        seed: Tensor | None,
    ) -> Execution:
        program = self.compiled.program
        # Copies of buffers that the caller will write to, because backward may need the old values.
        before = {name: buffers[name].clone() for name in program.mutated_buffers}
        values = ChainMap(before, buffers) if before else buffers  # type: ignore[arg-type]  # read
        seeds = {} if seed is None else call_seeds(seed, self._drawing)
        frame = _Frame(params, values, flat_inputs, seeds, self.compiled)
        frame.managed = self._managed()
        frame.replicated = self._replicate(params, frame.managed)
        for index, call in enumerate(program.calls):
            trip_before = frame.trip
            frame.results[index] = self._call(frame, index, call)
            if trip_before is not None:
                trip_before.left()
            # As early as in eager code: a frame that kept all outputs would keep all activations.
            for dead in self._last_use[index]:
                frame.results[dead] = ()
        outputs = [frame.value(out) if isinstance(out, Ref) else out for out in program.outputs]
        mutated = {name: frame.value(ref).detach() for name, ref in program.mutated_buffers.items()}
        return Execution(guarded(outputs, program.copied), mutated)

    def _call(self, frame: _Frame, index: int, call: Call) -> tuple[Any, ...]:
        arguments = self._arguments[index]
        # What the layer's hooks see: no parameters, no sizes.
        given = [frame.value(ref) for _, ref in arguments.values]

        made: list[Any] = []

        def invoke(*values: Any) -> tuple[Any, ...]:
            # Hooks of the layer may have replaced values; parameters are looked up only now, since
            # fully_shard gathers them in such a hook.
            params, replicated, managed = frame.params, frame.replicated, frame.managed
            if managed:
                values = tuple(cast_back(values, given))
            inputs: list[Any] = [None] * len(call.args)
            for (position, _), value in zip(arguments.values, values, strict=True):
                inputs[position] = value
            for position, ref in arguments.sizes:
                inputs[position] = frame.value(ref)
            owners = []
            for position, name, is_replicated in arguments.parameters:
                owner = params[name]
                if managed and name in managed:
                    _require_gathered(owner, name, call.path)
                    mark_reduced_by_hooks(owner)
                owners.append(owner)
                inputs[position] = replicated.get(name, owner) if is_replicated else owner
            runner = self._runner(frame, index, owners)
            made.extend(runner(inputs, owners))
            if isinstance(runner, (LookAheadRunner, HandOverRunner)):
                # Read right away: a hook that changes an output in place gives it another node.
                frame.last = index, _node_of(made)
            return tuple(made)

        if not call.path or self._call_block is None:
            return invoke(*given)
        outputs = self._call_block(index, invoke, given, frame.flat_inputs)
        return tuple(cast_back(outputs, made)) if frame.managed else outputs

    def _runner(self, frame: _Frame, index: int, owners: Sequence[Tensor]) -> RegionRunner:
        """Return the runner of one call."""
        call = self.compiled.program.calls[index]
        name = call.region.name
        runner = self._runners[name]
        if not torch.is_grad_enabled():
            return runner
        if self._weights is not None:
            targets = self._targets(self._arguments[index], owners)
            return DelayedRunner(**vars(runner), weights=self._weights, targets=targets)
        if self._sent:
            # Also for a call that sends nothing: it fetches for the call before it.
            frame.trip = HostTrip(self._sent.get(name, ()), frame.trip)
            return OffloadingRunner(**vars(runner), trip=frame.trip)
        parts = self._in_a_row.get(name)
        if parts is None or not can_work_for_others(frame.managed):
            return runner
        before = frame.node_before(index, call)
        if parts.split is None:
            return LookAheadRunner(**vars(runner), before=before)
        return hand_over_runner(runner, parts.split.late, owners, before) or runner

    def _targets(self, arguments: _Arguments, owners: Sequence[Tensor]) -> tuple[WeightTarget, ...]:
        """Return where the delayed weight gradients of one call go."""
        return tuple(
            WeightTarget(position, name, owner, is_replicated and self.tp.world_size > 1)
            for (position, name, is_replicated), owner in zip(
                arguments.parameters, owners, strict=True
            )
            if owner.requires_grad
        )

    def _replicate(
        self, params: Mapping[str, Tensor], managed: Collection[str]
    ) -> dict[str, Tensor]:
        """Return invariant parameters as replicated values, through a single autograd
        function."""
        # R and I differ only in their gradients.
        if self.tp.world_size == 1 or not torch.is_grad_enabled():
            return {}
        # Delayed weight gradients are reduced without autograd.
        if self._weights is not None or self._leaves_partial:
            return {}
        if self.deferred.pending and not self.deferred.enabled:
            self.deferred.reduce_frozen(self.tp, params)
        # Another program, say of other sizes, may have deferred gradients of parameters that this
        # one does not use: pending ones are reduced with the next gradients, whichever these are.
        waiting = () if self.deferred.enabled else self.deferred.pending
        # Managed ones are not gathered yet, and FSDP reduces their gradients block by block.
        trained = {
            name: parameter
            for name in dict.fromkeys((*self._replicated, *waiting))
            if name not in managed and (parameter := params[name]).requires_grad
        }
        if not trained:
            return {}
        # One node for all: their gradients arrive together and share one all-reduce.
        values = ReplicateParameters.apply(
            self.tp, self.deferred, tuple(trained), *trained.values()
        )
        return dict(zip(trained, values, strict=True))


class _Frame:
    """The values of one forward."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        flat_inputs: Sequence[Any],
        seeds: Mapping[int, Tensor],
        compiled: CompiledProgram,
    ) -> None:
        self.params = params
        self.buffers = buffers
        self.flat_inputs = flat_inputs
        self.seeds = seeds
        self.compiled = compiled
        self.replicated: dict[str, Tensor] = {}
        self.managed: Collection[str] = ()
        self.trip: HostTrip | None = None  # of the last call
        self.last: tuple[int, Any] = -1, None  # last call that shares work with others, its node
        self.results: dict[int, tuple[Any, ...]] = {}

    def node_before(self, index: int, call: Call) -> Any:
        """Return the autograd node of the call before ``index``, if it calls the same region."""
        last, node = self.last
        # Hooks may have skipped it.
        is_before = last == index - 1
        return (
            node if is_before and self.compiled.program.calls[last].region is call.region else None
        )

    def value(self, ref: Ref) -> Any:
        if ref.kind == "call":
            return self.results[ref.index][ref.output]
        if ref.kind == "param":
            return self.params[self.compiled.param_name(ref.name)]
        if ref.kind == "input":
            return self.flat_inputs[ref.index]
        if ref.kind == "size":
            return self.flat_inputs[ref.index].shape[ref.output]
        if ref.kind == "buffer":
            return self.buffers[ref.name]
        if ref.kind == "constant":
            return self.compiled.program.constants[ref.name]
        if not self.seeds:
            raise ArgumentError("the program draws random numbers: a seed is needed")
        # One per call, not per region: layers that share code must not share masks.
        return self.seeds[ref.index]


class _Arguments:
    """Sources of the inputs of a call, by position.

    Attributes:
        parameters: position, stored name, and whether it is read as R.
        sizes: position and source.
        values: position and source of all others.
    """

    def __init__(self, compiled: CompiledProgram, call: Call) -> None:
        self.parameters: list[tuple[int, str, bool]] = []
        self.sizes: list[tuple[int, Ref]] = []
        self.values: list[tuple[int, Ref]] = []
        for position, ref in enumerate(call.args):
            if ref.kind == "param":
                is_replicated = call.region.input_placements[position].kind == "R"
                self.parameters.append((position, compiled.param_name(ref.name), is_replicated))
            else:
                (self.sizes if ref.kind == "size" else self.values).append((position, ref))


def _parameters_used_as_r(compiled: CompiledProgram) -> tuple[str, ...]:
    """Return stored names, in order of first use, of the parameters that a region reads as R."""
    names: dict[str, None] = {}
    for call in compiled.program.calls:
        for ref, placement in zip(call.args, call.region.input_placements, strict=True):
            if ref.kind != "param":
                continue
            name = compiled.param_name(ref.name)
            stored = compiled.param_placements[name]
            if placement.kind == "R":
                names[name] = None
            if placement != stored and (stored.kind, placement.kind) != ("I", "R"):
                raise ArgumentError(
                    f"parameter {name!r} is stored {stored} but region {call.region.name!r} takes "
                    f"it as {placement}; only I used as R is converted outside of a region"
                )
    return tuple(names)


def _node_of(outputs: Sequence[Any]) -> Any:
    """Return the autograd node of the call that returned ``outputs``, ``None`` if it has none."""
    return next((x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn), None)


def _partial_gradients(region: Region) -> frozenset[int]:
    """Return indices of the parameters that the region reads as R, whose gradients are partial."""
    kinds = zip(region.input_kinds, region.input_placements, strict=True)
    return frozenset(
        index
        for index, (kind, placement) in enumerate(kinds)
        if kind == "param" and placement.kind == "R"
    )


def _require_gathered(owner: Tensor, name: str, path: str) -> None:
    """Raise an error if FSDP has not gathered the parameter ``name`` for the call at ``path``."""
    axes = owner.device_mesh.mesh_dim_names if isinstance(owner, DTensor) else None
    if any(axis not in (TENSOR_AXIS, EXPERT_AXIS) for axis in axes or ()):
        raise UnsupportedError(
            f"parameter {name!r} is used by {path or 'code outside of blocks'!r}, but "
            "fully_shard gathers it only while the module that it was applied to runs; "
            "apply fully_shard to the whole model without that block, or leave it to "
            "sp_compiler.compile(..., mesh=mesh)"
        )
