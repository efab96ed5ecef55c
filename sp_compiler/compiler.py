"""The pipeline, top to bottom: from a model and example inputs to the program that runs.

The only module outside ``passes/`` that imports passes.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import nn
from torch._dynamo import config as dynamo_config
from torch.fx import Node

from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.errors import PlacementError
from sp_compiler.base.placement import Placement
from sp_compiler.base.provenance import module_path, source_line
from sp_compiler.base.warn import warn
from sp_compiler.check import check_forward, check_partitioned
from sp_compiler.codegen.backends import BACKENDS
from sp_compiler.codegen.module_text import CompiledRegion
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward
from sp_compiler.ir.concretize import Concretizer, concretized
from sp_compiler.ir.fx import operands, reach
from sp_compiler.ir.hints import wishes_of
from sp_compiler.ir.program import Program, Ref, Region
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ir.snapshot import Snapshot, program_calls
from sp_compiler.options import CompileOptions
from sp_compiler.passes.compile_region import compile_region, differentiate
from sp_compiler.passes.memory.budget import (
    Candidates,
    candidates_of,
    rename_regions,
    split_under_budget,
)
from sp_compiler.passes.memory.partition import SplitOptions
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import outline
from sp_compiler.passes.sharding.explain import explain
from sp_compiler.passes.sharding.shard import shard
from sp_compiler.planning.build import make_plan
from sp_compiler.trace.export import capture
from sp_compiler.trace.joint import JointGraph


def build(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CompileOptions,
    *,
    fixed: Mapping[str, Placement] | None = None,
    lift_casts: bool = False,
    open_dims: bool = False,
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
    """
    if not open_dims or options.budget_bytes is not None:
        return _build(model, args, kwargs, options, fixed, lift_casts, open_dims=False)
    try:
        return _build(model, args, kwargs, options, fixed, lift_casts, open_dims=True)
    except Exception as error:  # of torch too: not all of it can do without sizes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    compiled = _build(model, args, kwargs, options, fixed, lift_casts, open_dims=False)
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
    fixed: Mapping[str, Placement] | None,
    lift_casts: bool,
    *,
    open_dims: bool,
) -> CompiledProgram:
    start = time.perf_counter()
    # With symbols, looking up results of operators takes longer than running them on fakes.
    lookup = dynamo_config.fake_tensor_cache_enabled and not open_dims
    cache_fakes = dynamo_config.patch(fake_tensor_cache_enabled=lookup)
    with warnings.catch_warnings(), cache_fakes:
        # FX would rather have nodes; passes would rather not.
        warnings.filterwarnings("ignore", "Raw Sym", UserWarning)
        captured = capture(model, args, kwargs, lift_casts=lift_casts, open_dims=open_dims)
        return compile_captured(
            captured,
            options,
            fixed=fixed,
            capture_s=time.perf_counter() - start,
            model_name=type(model).__name__,
        )


@without_autocast()
def compile_captured(
    captured: Captured,
    options: CompileOptions,
    *,
    fixed: Mapping[str, Placement] | None = None,
    capture_s: float = 0.0,
    model_name: str = "",
) -> CompiledProgram:
    """Everything after the capture; ``captured`` is normalised in place."""
    clock = _Clock({"capture": capture_s})
    exported = Snapshot("export", {"model": copy_graph(captured.module.graph)})
    program = to_program(captured, options, clock)
    compiled = compile_program(program, options, fixed=fixed)
    compiled.stages = {"export": exported, **compiled.stages}
    compiled.seconds = {**clock.seconds, **compiled.seconds}
    if program.sizes is not None:
        program.sizes.require_known()
    plan = make_plan(concretized(compiled), options, model_name)
    explainer = partial(
        explain,
        Concretizer(program.sizes).program(program),
        options,
        dict(fixed or {}),
        compiled.whole,
    )
    compiled.plan = replace(plan, explainer=explainer)
    return compiled


@without_autocast()
def to_program(captured: Captured, options: CompileOptions, clock: _Clock | None = None) -> Program:
    """Normalise ``captured`` in place and cut it into regions of whole tensors."""
    clock = clock or _Clock({})
    wishes = wishes_of(options.hints, captured.parameters)
    normalize(captured, dropout=options.dropout)
    clock.lap("normalize")
    program = outline(captured, wishes)
    clock.lap("outline")
    return program


def compile_program(
    program: Program,
    options: CompileOptions,
    *,
    fixed: Mapping[str, Placement] | None = None,
    checked: bool = True,
) -> CompiledProgram:
    """Everything after outlining; see :class:`Compilation`."""
    return Compilation(program, options, fixed=fixed, checked=checked).finish(options)


class Compilation:
    """An outlined program that is sharded once and cut for as many memory settings as are wanted.

    An operator whose placement the typing refuses, forward or backward, runs whole on every rank
    and is noted: slower, never wrong. Without ``checked`` a program that the typing refuses is
    compiled nevertheless, so that its numbers can be compared.

    Args:
        program: left as it is.
        options: everything but ``recompute`` and ``budget_bytes`` is read.
        fixed: storage placements of parameters that an earlier compilation decided.
    """

    def __init__(
        self,
        program: Program,
        options: CompileOptions,
        *,
        fixed: Mapping[str, Placement] | None = None,
        checked: bool = True,
    ) -> None:
        self._program = program
        self._options = options
        self._fixed = dict(fixed or {})
        self._checked = checked
        self._whole: dict[tuple[str, str], None] = {}
        self._sharded: _ShardedProgram | None = None

    @without_autocast()
    def finish(self, options: CompileOptions) -> CompiledProgram:
        """The program that runs; its ``recompute`` and ``budget_bytes`` are those of ``options``.

        Raises:
            PlacementError: the typing refuses a program although the operator runs whole.
            ArgumentError: the budget is too small.
        """
        while True:
            try:
                if self._sharded is None:
                    self._sharded = _ShardedProgram(
                        self._program, self._options, self._fixed, self._checked, tuple(self._whole)
                    )
                return self._sharded.finish(options)
            except PlacementError as error:
                self._run_whole(error)

    def _run_whole(self, error: PlacementError) -> None:
        operator = _operator_of(self._program, error, self._whole)
        if operator is None or self._options.tp == 1:
            raise error
        self._whole[error.region, operator.name] = None
        note = (
            f"{operator.target} runs whole on every rank: how it would be sharded could not be "
            f"proven ({module_path(operator) or '(model)'}, {source_line(operator)}): "
            f"{str(error).splitlines()[0]}"
        )
        self._program = replace(self._program, notes=[*self._program.notes, note])
        self._sharded = None


def _operator_of(
    program: Program, error: PlacementError, whole: Collection[tuple[str, str]]
) -> Node | None:
    """The operator of the unsharded program that a refused node came from.

    Where that is none, as for the sum of two gradients, or runs whole already, the nearest of those
    that the node's operands came from.
    """
    known = {
        node.name: node
        for region in program.regions
        for node in region.module.graph.nodes
        if region.name == error.region and node.op == "call_function"
    }
    for node in reach([error.node] if error.node is not None else [], operands):
        name = node.meta.get("root", node.meta.get("source"))
        if name in known and (error.region, name) not in whole:
            return known[name]
    return None


@contextlib.contextmanager
def _of_region(name: str) -> Iterator[None]:
    try:
        yield
    except PlacementError as error:
        error.region = name
        raise


class _ShardedProgram:
    """A sharded program that passed the forward check, and what all its settings share."""

    def __init__(
        self,
        program: Program,
        options: CompileOptions,
        fixed: dict[str, Placement],
        checked: bool,
        whole: tuple[tuple[str, str], ...],
    ) -> None:
        clock = _Clock({})
        self._original = program
        self._options = options
        self._checked = checked
        self._whole = whole
        self._example = Concretizer(program.sizes)
        self._sharded = shard(program, options, fixed, whole)
        self._stages = {
            "capture": Snapshot.of_program("capture", program),
            "shard": Snapshot.of_program("shard", self._sharded.program),
        }
        clock.lap("shard")
        for region in self._sharded.program.regions if checked else ():
            with _of_region(region.name):
                check_forward(self._example.region(region), options.tp)
        clock.lap("check_forward")
        self._seconds = clock.seconds

    @cached_property
    def _joints(self) -> dict[str, JointGraph]:
        return {region.name: differentiate(region) for region in self._sharded.program.regions}

    @cached_property
    def _split_options(self) -> dict[str, SplitOptions]:
        program, options = self._sharded.program, self._options
        own_parameters = program.own_parameters(options.tp)
        overlap = options.overlap and options.tp > 1
        found = {}
        for region in program.regions:
            pairs = zip(program.calls, own_parameters, strict=True)
            own = frozenset.intersection(*(own for call, own in pairs if call.region is region))
            found[region.name] = SplitOptions(
                _loss_output(program, region),
                own,
                overlap,
                program.sizes,
                _runs_last(program, region),
            )
        return found

    @cached_property
    def _ways(self) -> Candidates:
        program, tp = self._sharded.program, self._options.tp
        return candidates_of(program, self._joints, self._split_options, tp)

    def finish(self, options: CompileOptions) -> CompiledProgram:
        clock = _Clock(dict(self._seconds))
        program, stages = self._sharded.program, dict(self._stages)
        origins = {region.name: region.name for region in program.regions}
        if options.budget_bytes is None:
            regions = [self._compile(region, options) for region in program.regions]
        else:
            found = split_under_budget(
                program, self._joints, self._ways, options.tp, options.budget_bytes
            )
            program = found.program
            regions = [
                CompiledRegion(region, split.joint, split.partitioned, tuple(program.paths(region)))
                for region in program.regions
                for split in (found.regions[region.name],)
            ]
            calls = self._sharded.program.calls
            origins = {name: c.region.name for name, c in zip(found.names, calls, strict=True)}
            for name, before in (("capture", self._original), ("shard", self._sharded.program)):
                names = found.names[: len(before.calls)]  # sharding puts calls behind the others
                stages[name] = Snapshot.of_program(name, rename_regions(before, names))
        clock.lap("compile_regions")
        for compiled in regions if self._checked else ():
            region, tangents = compiled.region, compiled.joint.tangent_outputs
            parts = self._example.partitioned(compiled.partitioned)
            with _of_region(origins[region.name]):
                check_partitioned(region, parts, tangents, options.tp)
        clock.lap("check_partitioned")
        _write_tags(regions)
        stages["final"] = Snapshot.of_program("final", program)
        stages["split"] = _split_stage(program, regions)
        loaded = BACKENDS[options.backend](regions)
        clock.lap("codegen")
        return CompiledProgram(
            program,
            dict(loaded.codes),
            self._sharded.param_placements,
            options.tp,
            differentiable={compiled.region.name: compiled.differentiable for compiled in regions},
            loss_backwards={
                name: LossBackward(loss.output, loaded.codes[name].loss_backward)
                for name, loss in ((c.region.name, c.partitioned.loss) for c in regions)
                if loss is not None
            },
            notes=program.notes,
            whole=self._whole,
            code=loaded.source,
            regions={compiled.region.name: compiled for compiled in regions},
            stages=stages,
            seconds=clock.seconds,
            value_names=loaded.value_names,
        )

    def _compile(self, region: Region, options: CompileOptions) -> CompiledRegion:
        assert options.recompute != "auto"  # only with a budget
        program = self._sharded.program
        return compile_region(
            region,
            recompute=options.recompute,
            joint=self._joints[region.name],
            options=self._split_options[region.name],
            paths=program.paths(region),
        )


def _runs_last(program: Program, region: Region) -> bool:
    """Whether ``region`` stands for what comes behind all layers, and for nothing else."""
    (*before, last) = program.calls
    return last.region is region and bool(before) and all(c.region is not region for c in before)


def _loss_output(program: Program, region: Region) -> int | None:
    """The output of ``region`` that is the model's loss, if its other outputs are only returned."""
    losses = [ref for ref in program.outputs if isinstance(ref, Ref) and _is_loss(program, ref)]
    if not losses or program.calls[losses[0].index].region is not region:
        return None
    index = losses[0].index
    passed_on = any(
        ref.kind == "call" and ref.index == index for call in program.calls for ref in call.args
    )
    return None if passed_on else losses[0].output


def _is_loss(program: Program, ref: Ref) -> bool:
    if ref.kind != "call":
        return False
    node = program.calls[ref.index].region.outputs[ref.output]
    return node.meta["val"].dim() == 0 and bool(node.meta.get("requires_grad"))


def _write_tags(regions: Sequence[CompiledRegion]) -> None:
    """Write the decision on each traced node back to the operator of the region it came from."""
    for compiled in regions:
        tags: dict[str, str] = {}
        for node in compiled.joint.graph.nodes:
            tag = node.meta.get("recompute")
            if tag is not None and tags.get(node.meta.get("source")) != "save":
                tags[node.meta.get("source")] = tag
        for node in compiled.region.module.graph.nodes:
            node.meta.pop("recompute", None)  # of another setting
            if node.name in tags:
                node.meta["recompute"] = tags[node.name]


def _split_stage(program: Program, regions: Sequence[CompiledRegion]) -> Snapshot:
    graphs = {}
    for compiled in regions:
        parts = compiled.partitioned
        graphs[f"{compiled.region.name}.forward"] = copy_graph(parts.forward)
        if parts.backward is not None:
            graphs[f"{compiled.region.name}.backward"] = copy_graph(parts.backward)
        if parts.loss is not None:
            graphs[f"{compiled.region.name}.loss_backward"] = copy_graph(parts.loss.backward)
    return Snapshot("split", graphs, program_calls(program))


class _Clock:
    """Seconds spent in each step."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
