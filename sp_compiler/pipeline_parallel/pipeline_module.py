"""The object that :func:`sp_compiler.pipeline` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.placement import Placement
from sp_compiler.base.warn import warn
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.calls import executor_for, require_data
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.module.outputs import plain_input
from sp_compiler.module.state import COMPILING, Build
from sp_compiler.pipeline_parallel.axes import PipelineAxis
from sp_compiler.pipeline_parallel.cutting import (
    Rest,
    adamw_bytes,
    ends_of,
    gathered_adamw_bytes,
)
from sp_compiler.pipeline_parallel.microbatch_recompute import Places, cut, saving_microbatches
from sp_compiler.pipeline_parallel.microbatches import (
    batch_size,
    joined_outputs,
    microbatches_of,
    require_one_way,
    user_outputs,
)
from sp_compiler.pipeline_parallel.ranks import Weigh
from sp_compiler.pipeline_parallel.runner import Feed, StageRunner
from sp_compiler.pipeline_parallel.schedules import Schedule, most_in_flight
from sp_compiler.pipeline_parallel.stage_parameters import StageParameters
from sp_compiler.pipeline_parallel.stage_program import Stage, chain_of, loss_of, stages_of
from sp_compiler.planning.data import ParameterSize
from sp_compiler.planning.plan import Plan
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.runtime.kernels import compile_kernels
from sp_compiler.runtime.reductions import reduce_gradients
from sp_compiler.runtime.weight_gradients import accumulate
from sp_compiler.trace.export import flatten_inputs, input_names


class PipelineModule(StageParameters):
    """A model whose layers are divided among the ranks of a pipeline.

    Every rank has the parameters of its own stages. All ranks must make the same calls: with the
    same batch on the ranks of "pp" and "tp", and with different batches along data axes. Created by
    :func:`sp_compiler.pipeline`.

    Args:
        module: a module that is not compiled yet; parameters that no stage of this rank uses are
            dropped from it.
        axis: the mesh axis of the pipeline.
        schedule: order in which stages run their microbatches.
        stages_per_rank: number of stages on each rank.
        microbatches: number of microbatches per step.
        weigh: function from the inputs of a microbatch to the weight of its loss; ``None`` for
            equal weights.
        memory_bytes: limit for a stage; ``None`` for no limit.
        fsdp: options of FSDP2 over the data axes; ``None`` if there are no data axes.
        build_loss: compiles like the module, but only for the loss.
        return_outputs: whether a step returns the model's outputs.
    """

    def __init__(  # noqa: PLR0913 - what sp_compiler.pipeline has checked
        self,
        module: DistributedModule,
        axis: PipelineAxis,
        schedule: Schedule,
        stages_per_rank: int,
        microbatches: int,
        weigh: Weigh | None,
        memory_bytes: int | None,
        fsdp: Mapping[str, Any] | None,
        *,
        build_loss: Build,
        return_outputs: bool,
    ) -> None:
        super().__init__(module, axis)
        self._schedule = schedule
        self._num_stages = axis.size * stages_per_rank
        self._stages_per_rank = stages_per_rank
        self._microbatches = microbatches
        self._weigh = weigh
        self._memory_bytes = memory_bytes
        self._fsdp = fsdp
        self._paths: tuple[str, ...] = ()
        self._ends: list[int] = []
        # Weak references: the program cache keeps only a few programs.
        self._runners = WeakKeyDictionary[CompiledProgram, StageRunner]()
        # Every compilation goes through the cut, including those for inputs of another size.
        self._build, self._state.build = self._state.build, self._build_to_cut
        self._build_loss = build_loss
        self._return_outputs = return_outputs
        self._state.loss_only = not return_outputs
        self._held: list[frozenset[str]] = []

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for this batch, cut into stages, and drop the parameters of other ranks."""
        self.module.require_runnable_hooks(on_root=True)
        leaves, structure, names = self._flat(args, kwargs)
        batch = batch_size(self.module.forward, args, kwargs)
        parts = microbatches_of(leaves, names, batch, self._microbatches)
        with self._stage_ranks.reporting():
            self._stage_ranks.agree(leaves, structure, names)
            self._stage_ranks.agree_on_weights()
            compiled = self._program_of(parts, structure)
            stages = self._cut(compiled)
            ranks = [self._schedule.rank_of(i, self._axis.size) for i in range(len(stages))]
            self._held = [stage.parameters for stage in stages]
            # Before FSDP2 is applied: parameters of other ranks must not be gathered here.
            self._keep_own(stages, ranks)
            if self._fsdp is not None:
                self._shard_over_data(compiled, self._fsdp)
            self._runners[compiled] = self._runner(stages)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a batch; return its loss on every rank.

        Gradients are added to existing ones; call the optimizer yourself. Along data axes,
        gradients are averaged, and each part of the data has its own loss.

        Args:
            args, kwargs: arguments of the model's forward: the full batch, or with data axes this
                rank's part (see :func:`sp_compiler.data_shard`); the same on all ranks of "pp" and
                "tp".

        Returns:
            The weighted mean of the microbatches' losses, a 0-dim tensor without a graph. With
            ``sp_compiler.pipeline(..., return_outputs=True)`` the model's outputs, as :meth:`eval`.

        Raises:
            ArgumentError: the batch is not divisible by the number of microbatches, or the model
                does not take these arguments.
            UnsupportedError: called under ``no_grad``; an input requires a gradient; parameters
                were frozen or unfrozen since :func:`sp_compiler.pipeline`.
            RankMismatchError: the ranks of "pp" or "tp" got different inputs.
        """
        if not torch.is_grad_enabled():
            raise UnsupportedError(
                "step() computes gradients and was called under no_grad; use eval(...) or "
                "eval_loss(...)"
            )
        parameters = self._state.parameters
        # Already summed over the holders: summing them again would count them once per holder.
        earlier = self._ties.before(parameters)
        deferred = self._state.deferred
        # Microbatches accumulate on each rank; one reduction follows them.
        deferred.enabled = True
        try:
            result = self._run(args, kwargs, train=True, loss_only=not self._return_outputs)
        except BaseException:
            self._ties.restore(parameters, earlier)
            raise
        finally:
            deferred.enabled = False
            deferred.pending.clear()  # a failed step leaves nothing to later ones
        # After the step: torch's schedules run stages at different times, and holders must meet.
        self._ties.after(parameters, earlier)
        return result

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for a batch in evaluation mode, without gradients.

        Args:
            args, kwargs: as for :meth:`step`.

        Returns:
            What the model's forward returns. On every rank it has the loss, the weighted mean of
            the microbatches' losses; other tensors only on ranks of the last stage, and ``None``
            elsewhere. Those of the microbatches are joined along their first dim; scalars are
            averaged like the loss.

        Raises:
            ArgumentError: no batch (this method does not switch the mode); and as for
                :meth:`step`.
            UnsupportedError: an output has neither the batch nor all its tokens as its first dim,
                or is a scalar of integers, or needs parameters that the loss does not; and as for
                :meth:`step`.
        """
        return self._evaluate(args, kwargs, loss_only=False)

    def eval_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch in evaluation mode, without gradients, on every rank.

        Takes less memory than :meth:`eval`, which holds all logits of the batch.

        Args:
            args, kwargs: as for :meth:`step`.

        Raises:
            ArgumentError, UnsupportedError: as for :meth:`step`.
        """
        return self._evaluate(args, kwargs, loss_only=True)

    def _evaluate(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, loss_only: bool) -> Any:
        if not args and not kwargs:
            raise ArgumentError(
                "eval(...) takes a batch and returns the model's outputs; a pipeline has no modes "
                "to switch: step(...) trains, eval(...) evaluates"
            )
        # Per module, since a model may keep some norms in evaluation mode.
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            return self._run(args, kwargs, train=False, loss_only=loss_only)
        finally:
            # Not train(): parts of the model may be in evaluation mode permanently.
            for module, mode in modes:
                module.training = mode

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the layers of every stage, in order; "" for code outside of layers."""
        starts = [0, *self._ends[:-1]]
        return tuple(self._paths[start:end] for start, end in zip(starts, self._ends, strict=True))

    @property
    def plan(self) -> Plan:
        """Cost of the full program on one microbatch; see :func:`sp_compiler.plan`."""
        return self.module.plan

    @property
    def code(self) -> str:
        """The generated Python of the full program; each stage runs a part of it."""
        return self.module.code

    def _flat(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], pytree.TreeSpec, Callable[[], list[str]]]:
        """Return the leaves, their structure, and a function that returns their names."""
        leaves, structure = flatten_inputs(args, kwargs, self._state.unordered)
        names = partial(input_names, self.module, args, kwargs)
        return [plain_input(leaf) for leaf in leaves], structure, names

    def _run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, train: bool, loss_only: bool
    ) -> Any:
        leaves, structure, names = self._flat(args, kwargs)
        batch = batch_size(self.module.forward, args, kwargs)
        parts = microbatches_of(leaves, names, batch, self._microbatches)
        state = self._state
        state.loss_only = loss_only
        with self._stage_ranks.reporting():
            if self._trained != self._trained_now():
                raise UnsupportedError(
                    "requires_grad of a parameter was changed after sp_compiler.pipeline, which "
                    "other stages do not know about: freeze parameters before"
                )
            self._stage_ranks.agree(leaves, structure, names)
            compiled = self._program_of(parts, structure)
            require_data(state)
            if compiled not in self._runners:
                self._runners[compiled] = self._runner(self._cut(compiled))
            draws = any("seed" in region.input_kinds for region in compiled.program.regions)
            seeds = self._stage_ranks.seeds(len(parts)) if draws else [None] * len(parts)
            weights = self._stage_ranks.weights(self._weigh, parts, structure)
            feed, gathered = Feed(parts, seeds, weights), self._gathered
            with contextlib.nullcontext() if not gathered else gathered.gathered(reduce=train):
                # Dropped if it fails: torch's stages still hold data of unfinished microbatches.
                runner = self._runners.pop(compiled)
                runner.run(feed, train=train)
                self._runners[compiled] = runner
                self._reduce_partial()
                # All gradients are reduced, or none: those not reduced are dropped.
                self._stage_ranks.meet_over_data()
            # Before total(), in which other ranks wait: an output that cannot be joined raises.
            rows = batch // len(parts)
            outputs = joined_outputs(compiled, state.group, feed.outputs, weights, parts, rows)
            loss = self._stage_ranks.total(feed.losses)
            return loss if loss_only else user_outputs(compiled, loss, outputs)

    def _program_of(
        self, parts: Sequence[list[Any]], structure: pytree.TreeSpec
    ) -> CompiledProgram:
        """Return the program of these microbatches, which all have the same size."""
        with COMPILING:
            compiled = executor_for(self._state, parts[0], structure).compiled
        require_one_way(compiled.program, parts[1:], self._state.buffers)
        return compiled

    def _reduce_partial(self) -> None:
        """Sum pending gradients over the tensor-parallel ranks, once per step.

        With data axes there are none: FSDP2 reduces the partial sums first, and only this rank's
        shards are summed afterwards.
        """
        pending = self._state.deferred.pending
        names = list(pending)
        sums = [pending.pop(name) for name in names]
        totals = reduce_gradients(self._state.group.communicator, sums)
        for name, total in zip(names, totals, strict=True):
            assert total is not None
            accumulate(self._state.parameters[name], total)

    def _build_to_cut(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fixed: dict[str, Placement] | None,
        open_dims: bool,
    ) -> CompiledProgram:
        # Stages receive into buffers of a fixed size, so no dim stays open.
        build = self._build_loss if self._state.loss_only else self._build
        compiled = build(model, args, kwargs, fixed, False)
        # A program that cannot be cut is refused while the model can still be restored.
        self._cut(compiled)
        return compiled

    def _cut(self, compiled: CompiledProgram) -> list[Stage]:
        # The runtime passes programs on without knowing their plans.
        assert isinstance(compiled, PlannedProgram)
        program, rest = compiled.program, compiled.rest
        loss = loss_of(program)
        if program.stored and not self._ends:
            warn(
                "a pipeline returns only its loss, and does not update attributes that forward "
                f"changes: {', '.join(map(str, program.stored))}; if they should contribute to "
                "the loss, add them to it in forward"
            )
        chain = chain_of(program, loss)
        paths = tuple(program.calls[index].path for index in chain)
        orders = self._schedule.orders(self._axis.size, self._stages_per_rank, self._microbatches)
        calls, sizes = [compiled.plan.calls[index] for index in chain], compiled.plan.parameters
        mixed = None
        if rest is not None:
            places = Places.of(orders, self._num_stages)
            mixed = Rest([rest.plan.calls[index] for index in chain], places)
        limit, state_bytes = self._memory_bytes, self._state_bytes
        if not self._ends:
            # Cut once: parameters cannot move to another rank for every size of the inputs.
            in_flight = most_in_flight(orders, self._num_stages)
            self._ends = ends_of(calls, sizes, in_flight, limit, state_bytes, mixed)
            self._paths = paths
        elif self._paths != paths:
            raise UnsupportedError(
                "these inputs, or this mode, take another path through the model than those that "
                "it was cut for; the parameters of every stage are fixed: pad inputs to one form"
            )
        stages = stages_of(compiled, loss, chain, self._ends)
        self._require_held(stages)
        if rest is None or mixed is None or limit is None:
            return stages
        parts = cut(calls, self._ends), cut(mixed.calls, self._ends)
        saving = saving_microbatches(mixed.places, *parts, sizes, limit, state_bytes)
        rest_stages = stages_of(rest, loss, chain, self._ends)
        return [
            replace(stage, rest=other.compiled, saving=chosen)
            for stage, other, chosen in zip(stages, rest_stages, saving, strict=True)
        ]

    def _require_held(self, stages: Sequence[Stage]) -> None:
        # Empty while the first program is cut, which decides what the stages hold.
        for stage, held in zip(stages, self._held, strict=False):
            if missing := sorted(stage.parameters - held):
                # Otherwise an output that a step leaves out may need them.
                by_inputs = self._state.loss_only or self._return_outputs
                raise UnsupportedError(_not_held(missing, by_inputs=by_inputs))

    def _state_bytes(self, size: ParameterSize) -> float:
        data = self._state.group.data
        if data.mesh is None:
            return adamw_bytes(size)
        return gathered_adamw_bytes(size, data.num_shards(divided=size.divided))

    def _runner(self, stages: Sequence[Stage]) -> StageRunner:
        for stage in stages:
            for compiled in filter(None, (stage.compiled, stage.rest)):
                compile_kernels(self._state.agreement, compiled)
        return StageRunner(stages, self._state, self._axis, self._schedule, self._microbatches)


def _not_held(missing: Sequence[str], *, by_inputs: bool) -> str:
    """Return the text of an error about parameters that no stage holds."""
    if by_inputs:
        return (
            f"these inputs need {missing[:3]}, which the example_inputs did not need and no stage "
            "holds: pass sp_compiler.pipeline an example that needs them"
        )
    return (
        f"an output of the model needs {missing[:3]}, which the loss does not need and no stage "
        "holds: use eval_loss(...), or sp_compiler.pipeline(..., return_outputs=True)"
    )
