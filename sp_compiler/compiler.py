"""The compiler, top to bottom: from a model and example inputs to the program that runs.

Passes in parentheses do not run in every compilation::

    full model        export, normalize, user passes,
                      (loss_only, expert_parallel, half_batches),
                      outline                                     ``to_program``
    one rank's part   shard, check                                ``Compilation._run_passes``
    each region       (fuse_attention), joint, simplify, chunk, (scale_products), tag,
                      partition, (split_backward), (overlap), check, (async_tp), codegen

- export: one flat graph of ATen operators, by torch.export; normalize: one canonical form for what
  models write in several ways, and dropout masks from a counter;
- loss_only: drop the outputs that a step of a pipeline does not return;
- expert_parallel: divide experts over ranks with different batches;
- half_batches: run layers on two halves of the batch, for overlap in forward;
- outline: the graph as calls of distinct regions, equal layers sharing one;
- shard: a placement for every value, and collectives between placements that differ;
- check: derive placements again from the graphs, and compare calls with the model's;
- fuse_attention: decomposed attention, or attention with dropout, as one operator, on a GPU;
- joint: forward and backward in one graph; simplify: share equal casts and move them before
  gathers, fold redundant operators, and copy for kernels that need contiguous operands;
- chunk: loss head in chunks of rows, attention in chunks of queries, never materialized in full;
- scale_products: scale a small operand of a matmul instead of its result, unless kernels are fused;
- tag: save or recompute, per node; partition: cut the joint graph by the tags, sum in place;
- split_backward: separate the weight gradients, for pipelines; overlap: compute under collectives;
- async_tp: matmuls fused with collectives, which compute while other rows are in transit;
- codegen: a class per region as Python text, or what the backend makes of it.

The first call of a module comes here, as does every later call for which no program is valid;
``runtime.executor`` runs the result. :mod:`sp_compiler.pass_manager` runs the passes: it times each
pass and stores the graphs after it. Only it, ``verification`` and this module import passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import nn

from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.collector import older_objects_skipped
from sp_compiler.base.errors import PlacementError
from sp_compiler.base.log import LOG, log_as_asked
from sp_compiler.base.pass_report import Pass, pass_name
from sp_compiler.base.placement import Placement
from sp_compiler.check import check_calls, check_forward, check_partitioned
from sp_compiler.codegen.backends import LoadedProgram, compile_regions
from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward
from sp_compiler.ir.concretize import Concretizer, concretized
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.hints import wishes_of
from sp_compiler.ir.program import Program, Region
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.dump import dump, dump_folder
from sp_compiler.pass_manager.fallback import fallback_note, refused_operator
from sp_compiler.pass_manager.half_or_full import compile_half_or_full
from sp_compiler.pass_manager.open_sizes import compile_open_or_fixed
from sp_compiler.pass_manager.reproduction import reproducible
from sp_compiler.pass_manager.runner import PassRunner, running_passes
from sp_compiler.pass_manager.user_pass import run_user_pass
from sp_compiler.passes.async_tp import async_tp
from sp_compiler.passes.casts import share_casts
from sp_compiler.passes.chunks.chunk import chunk
from sp_compiler.passes.expert_parallel import expert_parallel
from sp_compiler.passes.fuse_attention import fuse_attention, has_kernel
from sp_compiler.passes.half_batches import half_batches
from sp_compiler.passes.loss_only import loss_only
from sp_compiler.passes.memory.budget import candidates_of, tag_under_budget, with_offloads
from sp_compiler.passes.memory.overlap_room import overlap_room, regions_in_a_row
from sp_compiler.passes.memory.partition import PartitionOptions, partition
from sp_compiler.passes.memory.partition_options import partition_options
from sp_compiler.passes.memory.split_backward import split_backward
from sp_compiler.passes.memory.tag_program import TaggedProgram, tag_program
from sp_compiler.passes.memory_order import order_memory
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import outline
from sp_compiler.passes.overlap import overlap_collectives
from sp_compiler.passes.scale_products import scale_products
from sp_compiler.passes.sharding.explain import explain
from sp_compiler.passes.sharding.shard import Sharded, shard
from sp_compiler.passes.simplify import simplify
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.device_memory import require_fit, within_device
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.trace.export import capture
from sp_compiler.trace.joint import JointGraph, trace_joint

KeptGraphs = Literal["nothing", "stages", "unsharded"]
"""Graphs that a compilation keeps for inspection; each value includes those to its left."""


def build(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CompileOptions,
    *,
    fixed: Mapping[str, Placement] | None = None,
    lift_casts: bool = False,
    open_dims: bool = False,
    keep: KeptGraphs = "stages",
) -> PlannedProgram:
    """Capture and compile ``model`` for the shapes of its example inputs.

    Args:
        model: unmodified, in the mode (train or eval, autocast) to compile for.
        args: example positional arguments.
        kwargs: example keyword arguments.
        options: as for :func:`sp_compiler.compile`.
        fixed: placements of stored parameters that an earlier compilation decided.
        lift_casts: compute a float64 model's casts to float32 in float64.
        open_dims: leave the sizes of the inputs open if possible, else warn. With a memory budget
            sizes are never open, because the budget is met for each size separately.
        keep: whether the result has ``stages``, and also the ``unsharded`` graphs for verification.
    """
    compile_with = partial(_export_and_compile, model, args, kwargs, fixed or {}, lift_casts, keep)
    if options.half_batches != "auto":
        return compile_open_or_fixed(compile_with, options, open_dims)
    return compile_half_or_full(compile_with, options, open_dims)


def _export_and_compile(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fixed: Mapping[str, Placement],
    lift_casts: bool,
    keep: KeptGraphs,
    options: CompileOptions,
    open_dims: bool,
) -> PlannedProgram:
    log_as_asked()
    LOG.info("compiling %s for %d ranks", type(model).__name__, options.tp)
    # At the start: a folder that cannot be written would otherwise fail minutes later.
    folder = dump_folder()
    run = PassRunner(keep_graphs=keep != "nothing" or folder is not None)
    with running_passes(open_dims), older_objects_skipped(), contextlib.ExitStack() as contexts:
        # With open sizes no failure is final: the example's sizes are compiled next.
        if not open_dims:
            contexts.enter_context(reproducible(model, args, kwargs, options, fixed))
        captured = run.once(
            Pass.EXPORT, capture, model, args, kwargs, lift_casts=lift_casts, open_dims=open_dims
        )
        compiled = compile_captured(captured, options, type(model).__name__, fixed, keep, run)
    if folder is not None:
        dump(compiled, folder, str(compiled.plan))
    return compiled


def compile_captured(
    captured: Captured,
    options: CompileOptions,
    name: str,
    fixed: Mapping[str, Placement],
    keep: KeptGraphs,
    run: PassRunner,
) -> PlannedProgram:
    """Run everything after the capture, rewriting ``captured``; ``name``: the model's class."""
    # Normalizing rewrites the capture in place; a proof starts from the graph before it.
    original = captured.copy() if keep == "unsharded" else None
    program = to_program(captured, options, run, fixed)
    compilation = Compilation(program, options, fixed=fixed, run=run)
    compiled, planned_rest = compilation.finish(options), None
    if options.recompute_rest is not None:
        of_rest = replace(options, recompute=options.recompute_rest, recompute_rest=None)
        rest = compilation.finish(of_rest)
        # Stages send the same values whichever runs: both replicate what one check rejected.
        if rest.replicated != compiled.replicated:
            compiled = compilation.finish(options)
        planned_rest = PlannedProgram.of(rest, make_plan(concretized(rest), of_rest, name))
    if program.sizes is not None:
        program.sizes.require_known()
    # A plan has concrete bytes and seconds: those of the example's sizes.
    plan = make_plan(concretized(compiled), options, name)
    require_fit(plan, options)
    # Solved only on request: every alternative that it compares costs a run of the solver.
    example_program = Concretizer(program.sizes).program(program)
    explainer = partial(explain, example_program, options, dict(fixed), compiled.replicated)
    planned = PlannedProgram.of(compiled, replace(plan, explainer=explainer))
    planned.rest = planned_rest
    planned.unsharded = (original, program) if original is not None else None
    return planned


@without_autocast()
def to_program(
    captured: Captured,
    options: CompileOptions,
    run: PassRunner | None = None,
    fixed: Mapping[str, Placement] | None = None,
) -> Program:
    """Normalize ``captured`` in place and outline it into regions, not sharded yet."""
    run = run or PassRunner()
    placed = wishes_of(options.hints, captured.parameters), fixed
    run.once(Pass.NORMALIZE, normalize, captured, options.dropout)
    # After normalizing, so that a user's pass has one form to match; before outlining, so
    # that layers that are rewritten the same way still share a region.
    for user_pass in options.passes:
        run.once(pass_name(user_pass), run_user_pass, captured, user_pass, options.dropout)
    if options.loss_only:
        run.once(Pass.LOSS_ONLY, loss_only, captured)
    if options.ep > 1:
        run.once(Pass.EXPERT_PARALLEL, expert_parallel, captured, options.ep, options.divisible)
    # One rank has no collectives to hide.
    if options.half_batches and options.tp > 1:
        run.once(Pass.HALF_BATCHES, half_batches, captured)
    return run.once(Pass.OUTLINE, outline, captured, *placed, tables_apart=options.tables_apart)


class Compilation:
    """An outlined program that is sharded once and split for any number of memory settings.

    A memory setting is a ``recompute`` policy or budget, and whether pipelines split the backward.
    An operator whose placement the check rejects runs replicated and is noted: slower, never wrong.

    Args:
        program: outlined; not modified.
        options: all are read except ``recompute``, the memory limits and ``split_backward``.
        fixed: storage placements of parameters that an earlier compilation decided.
        checked: whether to run the checks; ``verify`` compares the results of a wrong program.
        run: the runner of the passes that made ``program``.
    """

    def __init__(
        self,
        program: Program,
        options: CompileOptions,
        *,
        fixed: Mapping[str, Placement] | None = None,
        checked: bool = True,
        run: PassRunner | None = None,
    ) -> None:
        self._program = program
        self._options = options
        self._fixed = dict(fixed or {})
        self._checked = checked
        self._replicated: dict[tuple[str, str], None] = {}
        self._run = run or PassRunner.after(Pass.OUTLINE, program)

    @without_autocast()
    def finish(self, options: CompileOptions) -> CompiledProgram:
        """Return the program that runs, with the memory setting of ``options``.

        Raises:
            PlacementError: the check rejects the program although the operator runs replicated.
            ArgumentError: the budget is too small.
        """
        setting = replace(self._options, **options.memory_setting)
        while True:
            try:
                return self._run_passes(setting)
            except PlacementError as error:
                # The typing rules of spmd_types are not the sharding rules. Where the two disagree,
                # the operator runs replicated and sharding starts over around it.
                operator = refused_operator(self._program, error, self._replicated)
                if operator is None or setting.tp == 1:
                    raise
                self._replicated[error.region, operator.name] = None
                notes = [*self._program.notes, fallback_note(operator, error)]
                self._program = replace(self._program, notes=notes)
                self._run.forget_from(Pass.SHARD)

    def _run_passes(self, options: CompileOptions) -> CompiledProgram:
        """Run every pass after outlining, or reuse its result from another memory setting."""
        # run.once(...) is shared by all memory settings, run(...) belongs to this one.
        run, tp = self._run, options.tp
        run.forget_setting()
        replicated = tuple(self._replicated)
        sharded = run.once(Pass.SHARD, shard, self._program, options, self._fixed, replicated)
        # Checks compare sizes; comparing symbolic ones would record guards and narrow the program.
        program, concretizer = sharded.program, Concretizer(sharded.program.sizes)
        options, state_bytes = within_device(options, program, sharded.param_placements)
        self._check_sharded(sharded, concretizer)
        chunked: dict[str, list[JointGraph]] = {}
        for region in program.regions:
            name = region.name
            # After sharding: the gradient of a collective is a collective, which later passes see.
            joint = run.once(Pass.JOINT, trace_joint, self._fused(region), region=name)
            run.once(Pass.SIMPLIFY, share_casts, joint, region=name)
            run.once(Pass.SIMPLIFY, simplify, joint.graph, region=name)
            run.once(Pass.SIMPLIFY, order_memory, joint, region=name)
            # A graph per number of chunks; tag picks one, as policies decide what a chunk saves.
            ways = run.once(Pass.CHUNK, chunk, joint, tp, *options.chunk_counts, region=name)
            chunked[name] = ways
        for way in () if options.fuses else [way for ways in chunked.values() for way in ways]:
            run.once(Pass.SCALE_PRODUCTS, scale_products, way, region=way.name)
        # From here on, per memory setting: a policy writes tags, the partitioner acts on them.
        wanted = partition_options(program, options)
        tagged = self._tag(program, chunked, wanted, options, state_bytes)
        self._check_calls(tagged.program, sharded)
        # Under a budget a region may become several that save differently; ``origins`` has the
        # sharded region of each.
        partitioned: dict[str, Partitioned] = {}
        for region in tagged.program.regions:
            name, joint = region.name, tagged.joints[region.name]
            own = wanted[tagged.origins[name]]
            partitioned[name] = run(Pass.PARTITION, partition, joint, own, region=name)
            if options.split_backward:
                to_split = partitioned[name], region.input_kinds
                partitioned[name] = run(Pass.SPLIT_BACKWARD, split_backward, *to_split, region=name)
        room = overlap_room(tagged, partitioned, options, state_bytes)
        in_a_row = regions_in_a_row(tagged, options)
        regions: list[CompiledRegion] = []
        for region in tagged.program.regions:
            name, origin = region.name, tagged.origins[region.name]
            joint, own, parts = tagged.joints[name], wanted[origin], partitioned[name]
            if own.overlap:
                limits = own.own_parameters, own.sizes, room.get(name), options.device
                ahead = {"in_a_row": name in in_a_row, "fused": own.fused}
                parts = run(Pass.OVERLAP, overlap_collectives, parts, *limits, region=name, **ahead)
            if self._checked:  # the graphs that run, after every pass that could change them
                to_check = concretizer.partitioned(parts), joint.tangent_outputs, tp
                # An error names the sharded region, which can be sharded again.
                run(Pass.CHECK, check_partitioned, region, *to_check, region=origin)
            if options.async_tp and tp > 1:
                # After the check, which has rules for conversions and matmuls, not for both fused.
                to_lower = parts, tp, own.sizes, room.get(name), options.device
                parts = run(Pass.ASYNC_TP, async_tp, *to_lower, region=name)
            paths = tuple(tagged.program.paths(region))
            regions.append(CompiledRegion(region, parts, joint, paths, tp))
        # All regions at once: they are classes of one module that share its bound operators.
        loaded = run(Pass.CODEGEN, compile_regions, tagged.program, regions, options.backend)
        return self._compiled(sharded, tagged, regions, loaded)

    def _check_sharded(self, sharded: Sharded, concretizer: Concretizer) -> None:
        self._check_calls(sharded.program, sharded)
        # Before differentiation: the gradient of a wrong forward agrees with that forward.
        for region in sharded.program.regions if self._checked else ():
            concrete, tp = concretizer.region(region), self._options.tp
            self._run.once(Pass.CHECK, check_forward, concrete, tp, region=region.name)

    def _check_calls(self, program: Program, sharded: Sharded) -> None:
        if self._checked:
            # Not with the program after sharding: a pass could have changed its list of calls.
            to_check = program, self._program, sharded.param_placements
            self._run(Pass.CHECK, check_calls, *to_check)

    def _fused(self, region: Region) -> Region:
        if not has_kernel(region):
            return region
        return self._run.once(Pass.FUSE_ATTENTION, fuse_attention, region, region=region.name)

    def _tag(
        self,
        program: Program,
        joints: Mapping[str, Sequence[JointGraph]],
        wanted: Mapping[str, PartitionOptions],
        options: CompileOptions,
        state_bytes: int,
    ) -> TaggedProgram:
        """Tag all regions in one run: a memory budget is for the entire step."""
        run, tp = self._run, options.tp
        if options.budget_bytes is None:
            return run(Pass.TAG, tag_program, program, joints, wanted, options.recompute, tp)
        candidates = run.once(Pass.TAG, candidates_of, program, joints, wanted, tp)
        if options.offload:
            to_send = candidates, program, joints, wanted, tp
            candidates = run.once(Pass.TAG, with_offloads, *to_send)
        within = options.budget_bytes, state_bytes
        return run(Pass.TAG, tag_under_budget, program, candidates, tp, *within)

    def _compiled(
        self,
        sharded: Sharded,
        tagged: TaggedProgram,
        regions: Sequence[CompiledRegion],
        loaded: LoadedProgram,
    ) -> CompiledProgram:
        program, codes = tagged.program, loaded.codes
        loss_backwards = {
            each.region.name: LossBackward(loss.output, codes[each.region.name].loss_backward)
            for each in regions
            if (loss := each.partitioned.loss) is not None
        }
        return CompiledProgram(
            program,
            dict(codes),
            sharded.param_placements,
            self._options.tp,
            differentiable={each.region.name: each.differentiable for each in regions},
            loss_backwards=loss_backwards,
            reached_from={each.region.name: each.joint.reached_from() for each in regions},
            notes=[*program.notes, *loaded.notes],
            kernels=loaded.kernels,
            replicated=tuple(self._replicated),
            paddable=tagged.by_operator(sharded.paddable),
            passed_over=tagged.by_operator(sharded.passed_over),
            code=loaded.source,
            value_names=loaded.value_names,
            stages=self._run.stages(sharded.program, program),
            regions={each.region.name: each for each in regions},
            reports=self._run.reports,
        )
