"""The compiler, top to bottom: from a model and example inputs to the program that runs.

::

    capture, normalize, the user's own, outline              one device, the full model
    shard, check                                             one rank's part of it
    joint, simplify, chunk, tag, partition, overlap, check, codegen   each distinct block

:func:`to_program` is the first line of these and ``Compilation._run_passes`` the others, a pass per
line; the code around them captures the model, retries after a refused placement and keeps the
graphs. For pipelines that delay gradients of weights, "split backward" comes after "partition".

Retries, user passes, reports and stages are handled by :mod:`sp_compiler.pass_manager`; besides it
and ``verification`` this is the only module outside ``passes/`` that imports passes.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import nn
from torch._dynamo import config as dynamo_config
from torch.fx import GraphModule

from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.errors import PlacementError
from sp_compiler.base.log import LOG, log_as_asked
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import Placement
from sp_compiler.base.warn import warn
from sp_compiler.check import check_forward, check_partitioned
from sp_compiler.codegen.backends import LoadedProgram, compile_regions
from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward
from sp_compiler.ir.concretize import Concretizer, concretized
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.hints import wishes_of
from sp_compiler.ir.program import Program
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.options import CompileOptions, pass_name
from sp_compiler.pass_manager.dump import dump, dump_folder
from sp_compiler.pass_manager.fallback import fallback_note, refused_operator
from sp_compiler.pass_manager.runner import PassRunner
from sp_compiler.pass_manager.user_pass import run_user_pass
from sp_compiler.passes.chunks.chunk import OpenRowsError, chunk
from sp_compiler.passes.memory.budget import candidates_of, tag_under_budget
from sp_compiler.passes.memory.overlap_room import overlap_room_bytes
from sp_compiler.passes.memory.partition import partition
from sp_compiler.passes.memory.split_backward import split_backward
from sp_compiler.passes.memory.split_options import split_options
from sp_compiler.passes.memory.tag import POLICIES
from sp_compiler.passes.memory.tag_program import tag_program
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import outline
from sp_compiler.passes.overlap import overlap_backward
from sp_compiler.passes.sharding.explain import explain
from sp_compiler.passes.sharding.shard import Sharded, shard
from sp_compiler.passes.simplify import simplify
from sp_compiler.planning.build import make_plan
from sp_compiler.trace.export import capture
from sp_compiler.trace.joint import JointGraph, trace_joint

Kept = Literal["nothing", "stages", "unsharded"]
"""What a compilation keeps of the graphs that it made, each with what stands before it."""


def build(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CompileOptions,
    *,
    fixed: Mapping[str, Placement] | None = None,
    lift_casts: bool = False,
    open_dims: bool = False,
    keep: Kept = "stages",
) -> CompiledProgram:
    """Capture and compile ``model`` for the shapes of its example inputs.

    Args:
        model: unmodified, in the mode (train or eval, autocast) to compile for.
        args: example positional arguments.
        kwargs: example keyword arguments.
        options: of :func:`sp_compiler.compile`.
        fixed: storage placements of parameters that an earlier compilation decided.
        lift_casts: keep a float64 model's casts to float32 in float64.
        open_dims: leave the sizes of the inputs open where that is possible, else warn. A memory
            budget is kept for each size by itself, so with one they are not left open.
        keep: whether the result has ``stages``, and also the ``unsharded`` graphs, to compare
            numbers with.
    """
    fixed = fixed or {}
    compile_with = partial(
        _build, model, args, kwargs, fixed=fixed, lift_casts=lift_casts, keep=keep
    )
    # A budget splits blocks by bytes, which no open size tells.
    if not open_dims or options.budget_bytes is not None:
        return compile_with(options, open_dims=False)
    whole_head = replace(options, loss_chunks=1)
    may_cut = options.loss_chunks != "auto" or POLICIES[options.recompute].chunks_losses
    try:
        # Tried, not asked: what torch.export and its shape guards can leave open is known
        # afterwards.
        return compile_with(options if may_cut else whole_head, open_dims=True)
    except Exception as error:  # of torch too: not all of it can do without sizes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        asks_rows = isinstance(error, OpenRowsError)
    compiled = compile_with(options, open_dims=False)
    forwards = [each.partitioned.forward for each in compiled.regions.values()]
    if asks_rows and not any("chunk" in node.meta for graph in forwards for node in graph.nodes):
        # Chunks that save little are not made, and only they need to know the sizes.
        return build(
            model, args, kwargs, whole_head,
            fixed=fixed, lift_casts=lift_casts, open_dims=True, keep=keep,
        )  # fmt: skip
    warn(
        "every size of the inputs is compiled by itself, for the model cannot be compiled with "
        f"sizes left open: {reason}"
    )
    return compiled


def _build(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CompileOptions,
    fixed: Mapping[str, Placement],
    lift_casts: bool,
    open_dims: bool,
    keep: Kept,
) -> CompiledProgram:
    log_as_asked()
    LOG.info("compiling %s for %d ranks", type(model).__name__, options.tp)
    # Asked for at the start: a folder that cannot be written would be found out minutes later.
    folder = dump_folder()
    run = PassRunner(keep_graphs=keep != "nothing" or folder is not None)
    with _running_passes(open_dims):
        captured = run.once(
            Pass.EXPORT, capture, model, args, kwargs, lift_casts=lift_casts, open_dims=open_dims
        )
        # Normalizing rewrites the capture in place; a proof begins with what it was before.
        original = _copied(captured) if keep == "unsharded" else None
        program = to_program(captured, options, run)
        compiled = Compilation(program, options, fixed=fixed, run=run).finish(options)
        if program.sizes is not None:
            program.sizes.require_known()
        with without_autocast():
            # Bytes and times are numbers, so those of the example's sizes.
            plan = make_plan(concretized(compiled), options, type(model).__name__)
        at_example = Concretizer(program.sizes).program(program)
        # Bound now and solved when somebody asks: each way that it compares is one more solution.
        explainer = partial(explain, at_example, options, dict(fixed), compiled.replicated)
        compiled.plan = replace(plan, explainer=explainer)
        compiled.unsharded = (original, program) if original is not None else None
    if folder is not None:
        dump(compiled, folder)
    return compiled


@contextlib.contextmanager
def _running_passes(open_dims: bool) -> Iterator[None]:
    # With symbols, looking up results of operators takes longer than running them on fakes.
    lookup = dynamo_config.fake_tensor_cache_enabled and not open_dims
    cache_fakes = dynamo_config.patch(fake_tensor_cache_enabled=lookup)
    with warnings.catch_warnings(), cache_fakes:
        # FX would rather have nodes; passes would rather not.
        warnings.filterwarnings("ignore", "Raw Sym", UserWarning)
        yield


def build_settings(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Sequence[CompileOptions],
) -> list[CompiledProgram]:
    """Compile ``model`` for each of ``settings``, which differ in ``tp`` and ``recompute`` alone.

    It is captured once, which takes most of the time, and sharded once for each run of equal
    ``tp``.
    """
    programs: list[CompiledProgram] = []
    with _running_passes(open_dims=False):
        program = to_program(capture(model, args, kwargs), settings[0])
        for _, group in itertools.groupby(settings, key=lambda options: options.tp):
            same_tp = list(group)
            compilation = Compilation(program, same_tp[0])
            for options in same_tp:
                compiled = compilation.finish(options)
                with without_autocast():
                    compiled.plan = make_plan(compiled, options, type(model).__name__)
                programs.append(compiled)
    return programs


def _copied(captured: Captured) -> Captured:
    # Nodes alone are copied: the tensors that they name are what the model holds.
    graph = copy_graph(captured.module.graph)
    module = GraphModule(captured.module, graph)
    return replace(captured, module=module, refs=list(captured.refs))


@without_autocast()
def to_program(
    captured: Captured, options: CompileOptions, run: PassRunner | None = None
) -> Program:
    """Cut ``captured``, which is normalised in place, into regions that are not sharded yet."""
    run = run or PassRunner()
    wishes = wishes_of(options.hints, captured.parameters)
    run.once(Pass.NORMALIZE, normalize, captured, options.dropout)
    # On the one flat graph, in normal form: what a user wants to match has one spelling there, and
    # layers that are rewritten alike still become one region.
    for user_pass in options.passes:
        run.once(pass_name(user_pass), run_user_pass, captured, user_pass, options.dropout)
    return run.once(Pass.OUTLINE, outline, captured, wishes, tables_apart=options.tables_apart)


class Compilation:
    """An outlined program that is sharded once and split for as many memory settings as are wanted.

    An operator whose placement the typing refuses, forward or backward, runs replicated and is
    noted: slower, never wrong. Without ``checked`` a program that the typing refuses is compiled
    nevertheless, so that its numbers can be compared.

    Args:
        program: left as it is.
        options: everything but ``recompute`` and ``budget_bytes`` is read.
        fixed: storage placements of parameters that an earlier compilation decided.
        checked: whether a program that the typing refuses is refused.
        run: has run the passes that made ``program``.
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
        """The program that runs; its ``recompute`` and ``budget_bytes`` are those of ``options``.

        Raises:
            PlacementError: the typing refuses a program although the operator runs replicated.
            ArgumentError: the budget is too small.
        """
        setting = replace(
            self._options, recompute=options.recompute, memory_budget=options.memory_budget
        )
        while True:
            try:
                return self._run_passes(setting)
            except PlacementError as error:
                # The typing rules judge what the sharding rules have made, and are written apart
                # from them. Where the two differ, the operator runs replicated, and all is placed
                # anew around it.
                operator = refused_operator(self._program, error, self._replicated)
                if operator is None or setting.tp == 1:
                    raise
                self._replicated[error.region, operator.name] = None
                notes = [*self._program.notes, fallback_note(operator, error)]
                self._program = replace(self._program, notes=notes)
                self._run.forget_from(Pass.SHARD)

    def _run_passes(self, options: CompileOptions) -> CompiledProgram:
        """Every pass after outlining; what was run once for all memory settings stays."""
        run, tp = self._run, options.tp
        run.forget_setting()
        replicated = tuple(self._replicated)
        sharded = run.once(Pass.SHARD, shard, self._program, options, self._fixed, replicated)
        program, example = sharded.program, Concretizer(sharded.program.sizes)
        # Before it is differentiated: the gradient of a wrong forward would agree with it.
        for region in program.regions if self._checked else ():
            concrete = example.region(region)
            run.once(Pass.CHECK, check_forward, concrete, tp, region=region.name)
        # One for all memory settings: to differentiate takes longer than to cut.
        joints: dict[str, JointGraph] = {}
        chunked: dict[str, list[JointGraph]] = {}
        for region in program.regions:
            name = region.name
            # Differentiated once it is sharded: the gradient of a collective is a collective of its
            # own, which the simplifier and the policies then see.
            joints[name] = run.once(Pass.JOINT, trace_joint, region, region=name)
            run.once(Pass.SIMPLIFY, simplify, joints[name].graph, region=name)
            # Several ways, of which the tags choose one: what a chunk saves depends on the policy.
            counts = options.chunk_counts
            chunked[name] = run.once(Pass.CHUNK, chunk, joints[name], tp, counts, region=name)
        # From here on per memory setting: a policy writes tags, the partitioner acts on them.
        wanted = split_options(program, options)
        # All regions together: a memory budget is one for the whole step.
        if options.budget_bytes is None:
            tagged = run(Pass.TAG, tag_program, program, chunked, wanted, options.recompute, tp)
        else:
            ways = run.once(Pass.TAG, candidates_of, program, chunked, wanted, tp)
            budget_bytes = options.budget_bytes
            tagged = run(Pass.TAG, tag_under_budget, program, ways, tp, budget_bytes)
        # A budget may split a region into several that save differently; ``origins`` has the
        # sharded region that each came from.
        split: dict[str, Partitioned] = {}
        for region in tagged.program.regions:
            name, want = region.name, wanted[tagged.origins[region.name]]
            joint = tagged.joints[name]
            split[name] = run(Pass.PARTITION, partition, joint, want.loss_output, region=name)
            if options.split_backward:
                needs = split[name], region.input_kinds
                split[name] = run(Pass.SPLIT_BACKWARD, split_backward, *needs, region=name)
        room_bytes = overlap_room_bytes(tagged, split, options)
        regions: list[CompiledRegion] = []
        for region in tagged.program.regions:
            name, origin = region.name, tagged.origins[region.name]
            joint, want, parts = tagged.joints[name], wanted[origin], split[name]
            if want.overlap:
                limits = want.own_parameters, want.sizes, room_bytes.get(name, 0), options.device
                parts = run(Pass.OVERLAP, overlap_backward, parts, *limits, region=name)
            if self._checked:  # the graphs that run, behind everything that could change them
                contract = example.partitioned(parts), joint.tangent_outputs, tp
                run(Pass.CHECK, check_partitioned, region, *contract, region=origin)
            paths = tuple(tagged.program.paths(region))
            regions.append(CompiledRegion(region, parts, joint, paths, tp))
        # All regions at once: they are classes of one module, with one list of bound operators.
        loaded = run(Pass.CODEGEN, compile_regions, regions, options.backend)
        return self._compiled(sharded, tagged.program, regions, loaded)

    def _compiled(
        self,
        sharded: Sharded,
        program: Program,
        regions: Sequence[CompiledRegion],
        loaded: LoadedProgram,
    ) -> CompiledProgram:
        """The result: ``program`` is ``sharded`` as its tags split it."""
        return CompiledProgram(
            program,
            dict(loaded.codes),
            sharded.param_placements,
            self._options.tp,
            differentiable={each.region.name: each.differentiable for each in regions},
            loss_backwards=_loss_backwards(regions, loaded.codes),
            notes=[*sharded.program.notes, *loaded.notes],
            replicated=tuple(self._replicated),
            code=loaded.source,
            value_names=loaded.value_names,
            stages=self._run.stages(sharded.program, program),
            regions={each.region.name: each for each in regions},
            reports=self._run.reports,
        )


def compile_program(
    program: Program,
    options: CompileOptions,
    *,
    fixed: Mapping[str, Placement] | None = None,
    checked: bool = True,
) -> CompiledProgram:
    """Everything after outlining, for one memory setting; see :class:`Compilation`."""
    return Compilation(program, options, fixed=fixed, checked=checked).finish(options)


def _loss_backwards(
    regions: Sequence[CompiledRegion], codes: Mapping[str, Any]
) -> dict[str, LossBackward]:
    losses = {each.region.name: each.partitioned.loss for each in regions}
    return {
        name: LossBackward(loss.output, codes[name].loss_backward)
        for name, loss in losses.items()
        if loss is not None
    }
