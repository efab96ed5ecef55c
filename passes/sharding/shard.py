"""Choose a placement for every value of a program and rewrite it to one rank's part.

Requires ``meta["val"]`` and ``meta["requires_grad"]`` on every node; establishes local shapes,
``meta["placement"]`` and conversion nodes. The input program is not modified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compiler.base.errors import ArgumentError, PassError, SPCompilerError
from sp_compiler.base.placement import I, Placement, R
from sp_compiler.ir.concretize import AtHints
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.ir.hints import hint_text, wishes_of
from sp_compiler.ir.program import Call, Program, Ref, RefKind, Region
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ir.symbolic import pin, symbol_of, symbols_in
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.dim_roles import (
    RegionValues,
    WholeNode,
    activate,
    label_dims,
    results_of,
    shape_of,
    value_of,
)
from sp_compiler.passes.sharding.problem import Problem, ProblemBuilder
from sp_compiler.passes.sharding.rewrite import RegionLowering
from sp_compiler.rules.strategies import Strategy
from sp_compiler.rules.table import record_factors
from sp_compiler.solve.placement import solve


@dataclass(frozen=True)
class Sharded:
    """A program of local tensors.

    Attributes:
        param_placements: storage placement of every parameter: I or S.
        output_placements: of each model output that a call produces; others are absent.
        cost_us: the solver's objective.
    """

    program: Program
    param_placements: dict[str, Placement]
    output_placements: dict[int, Placement]
    cost_us: float


def shard(
    program: Program,
    options: CompileOptions,
    fixed: dict[str, Placement] | None = None,
    whole: Collection[WholeNode] = (),
) -> Sharded:
    """Shard ``program`` over ``options.tp`` ranks.

    Args:
        program: unsharded; see :func:`sp_compiler.passes.outline.outline`.
        options: ``tp``, ``sequence_parallel``, ``nominal_tokens``, ``outputs`` are read.
        fixed: storage placements that an earlier compilation gave to the parameters.
        whole: operators that run whole on every rank, whatever their rule says.

    Raises:
        PassError: the program is sharded already: its shapes are those of one rank.
    """
    if any(region.input_placements for region in program.regions):
        raise PassError("shard", "the program is sharded already; shard what outline() returned")
    # What is decided is decided for the example's sizes; what is made of it has the open ones.
    hints = AtHints(program.sizes)
    if options.tp == 1:
        opened, _ = _route_outputs(program)
        program = hints.program(opened)
        return _with_returned(_unsharded(opened, program, activate(program), hints), {})
    builder = placement_problem(program, options, fixed or {}, whole, hints)
    problem = builder.problem
    try:
        solution = solve(problem.vertices, builder.conversion_cost)
    except SPCompilerError as error:
        raise _blamed_on_hints(program, options, fixed or {}, whole, error) from error
    facts = {id(region): mine for region, mine in zip(builder.regions, builder.facts, strict=True)}
    assembled = _Assembly(
        builder.opened,
        builder.program,
        facts,
        problem,
        solution.choices,
        hints,
        options.tp,
    )
    sharded = _with_returned(assembled.run(), fixed or {})
    notes = [*sharded.program.notes, *([_search_note(solution.gap)] if solution.gap else [])]
    return replace(sharded, program=replace(sharded.program, notes=notes), cost_us=solution.cost_us)


def _search_note(gap: float) -> str:
    return (
        f"the placements may take up to {gap:.2%} longer than the best ones: the search for those "
        "was cut short"
    )


def placement_problem(
    program: Program,
    options: CompileOptions,
    fixed: dict[str, Placement],
    whole: Collection[WholeNode],
    hints: AtHints | None = None,
) -> ProblemBuilder:
    """The built problem of placing ``program`` on ``options.tp`` ranks, at least two.

    It is that of the example's sizes, which ``hints`` put in place of open ones.
    """
    hints = hints or AtHints(program.sizes)
    opened, routed = _route_outputs(program)
    program = hints.program(opened)
    facts = activate(program, whole)
    for region in program.regions:
        label_dims(region, facts[id(region)], options.tp)
    builder = ProblemBuilder(
        program,
        facts,
        world_size=options.tp,
        sequence_parallel=options.sequence_parallel,
        nominal_tokens=options.nominal_tokens,
        shard_outputs=lambda index: (
            program.outputs[index] not in routed and _may_shard(program, index, options)
        ),
        fixed=fixed,
    )
    builder.opened = opened
    builder.build()
    return builder


def _blamed_on_hints(
    program: Program,
    options: CompileOptions,
    fixed: dict[str, Placement],
    whole: Collection[WholeNode],
    error: SPCompilerError,
) -> SPCompilerError:
    """Which hints cannot be met together: without any of them, all others can."""

    def impossible(keys: Iterable[str]) -> bool:
        kept = wishes_of({key: options.hints[key] for key in keys}, program.parameters)
        builder = placement_problem(replace(program, wishes=kept), options, fixed, whole)
        try:
            solve(builder.problem.vertices, builder.conversion_cost)
        except SPCompilerError:
            return True
        return False

    if impossible(()):
        return error
    guilty = dict(options.hints)
    for key in options.hints:
        if impossible(other for other in guilty if other != key):
            del guilty[key]
    texts = " and ".join(f"hints[{key!r}]={hint_text(hint)}" for key, hint in guilty.items())
    return ArgumentError(
        f"{texts} cannot be met together on {options.tp} ranks: some operator reads parameters "
        "placed by them and has no way to run with both; drop one, or ask plan.explain(name) "
        "without it what is possible"
    )


def _unsharded(
    opened: Program, program: Program, facts: dict[int, RegionValues], hints: AtHints
) -> Sharded:
    """One rank: every value is whole, nothing is converted."""
    lowered = {}
    for region, source in zip(program.regions, opened.regions, strict=True):
        mine = facts[id(region)]
        chosen = {
            node: Strategy((I,) * len(tensor_operands(node)), (I,) * len(results_of(node)))
            for node in mine.rules
        }
        inputs, outputs = [I] * len(region.input_kinds), [I] * len(region.outputs)
        lowered[id(source)] = _lowered(source, mine, chosen, inputs, outputs, hints, 1)
    calls = [Call(lowered[id(call.region)], call.path, call.args) for call in opened.calls]
    names = [ref.name for call in calls for ref in call.args if ref.kind == "param"]
    outputs_of = {
        index: I
        for index, ref in enumerate(program.outputs)
        if isinstance(ref, Ref) and ref.kind == "call"
    }
    return Sharded(replace(opened, calls=calls), dict.fromkeys(names, I), outputs_of, 0.0)


def _with_returned(sharded: Sharded, fixed: dict[str, Placement]) -> Sharded:
    """Also place the parameters that the model returns and no operator reads."""
    program = sharded.program
    leaves = (*program.outputs, *program.mutated_buffers.values())
    names = [leaf.name for leaf in leaves if isinstance(leaf, Ref) and leaf.kind == "param"]
    returned = {name: fixed.get(name, I) for name in names}
    return replace(sharded, param_placements=returned | sharded.param_placements)


def _lowered(
    region: Region,
    facts: RegionValues,
    chosen: dict[Node, Strategy],
    inputs: list[Placement],
    outputs: list[Placement],
    hints: AtHints,
    world_size: int,
) -> Region:
    """Rewrite ``region`` as was decided on its twin with the example's sizes."""
    active = {(hints.twin(node), index) for node, index in facts.active}
    strategies = {hints.twin(node): strategy for node, strategy in chosen.items()}
    for node, strategy in strategies.items():
        if any(placement.is_sharded for placement in (*strategy.operands, *strategy.results)):
            record_factors(node)
        values = (*map(value_of, tensor_operands(node)), *results_of(node))
        for value, placement in zip(values, (*strategy.operands, *strategy.results), strict=True):
            if placement.segments:  # which are of the example's sizes, whatever their sum is
                pin(shape_of(value)[placement.dim])
    return RegionLowering(region, active, strategies, inputs, outputs, world_size).run()


def _may_shard(program: Program, index: int, options: CompileOptions) -> bool:
    """With a loss in the graph nobody reads the logits whole, unless asked to."""
    if options.outputs != "auto":
        return options.outputs == "shard"
    shapes = [_output_value(program, ref).meta["val"].shape for ref in _call_outputs(program)]
    ref = program.outputs[index]
    return len(_output_value(program, ref).meta["val"].shape) > 1 and any(
        len(shape) == 0 for shape in shapes
    )


def _call_outputs(program: Program) -> list[Ref]:
    return [ref for ref in program.outputs if isinstance(ref, Ref) and ref.kind == "call"]


def _output_value(program: Program, ref: Ref) -> Node:
    return program.calls[ref.index].region.outputs[ref.output]


def _route_outputs(program: Program) -> tuple[Program, list[Ref]]:
    """Let model outputs that other regions read too be placed freely; also returns those.

    A region called once returns such a value twice; those of a repeated region pass through a
    region of their own at the end.
    """
    read = {
        (ref.index, ref.output) for call in program.calls for ref in call.args if ref.kind == "call"
    }
    count = Counter(id(call.region) for call in program.calls)
    moved: dict[Ref, Ref] = {}
    passed: list[Ref] = []
    for ref in dict.fromkeys(_call_outputs(program)):
        repeated = count[id(program.calls[ref.index].region)] > 1
        if repeated:
            passed.append(ref)
        elif (ref.index, ref.output) in read:
            program = _return_twice(program, ref)
            outputs = program.calls[ref.index].region.outputs
            moved[ref] = Ref("call", index=ref.index, output=len(outputs) - 1)
    calls = list(program.calls)
    if passed:
        region, sizes = _pass_through(program, passed)
        calls.append(Call(region, "", (*passed, *sizes)))
        moved |= {ref: Ref("call", index=len(calls) - 1, output=k) for k, ref in enumerate(passed)}
    outputs = [moved.get(ref, ref) if isinstance(ref, Ref) else ref for ref in program.outputs]
    return replace(program, calls=calls, outputs=outputs), list(moved.values())


def _return_twice(program: Program, ref: Ref) -> Program:
    old = program.calls[ref.index].region
    graph = copy_graph(old.module.graph)
    (returned,) = graph.find_nodes(op="output")
    returned.args = ([*returned.args[0], returned.args[0][ref.output]],)
    region = replace(old, module=GraphModule(old.module, graph, class_name=old.name))
    calls = [replace(c, region=region) if c.region is old else c for c in program.calls]
    return replace(program, calls=calls)


def _pass_through(program: Program, refs: list[Ref]) -> tuple[Region, list[Ref]]:
    """A region that returns ``refs``, and the refs of the open sizes that it takes behind them."""
    graph = Graph()
    nodes = []
    for number, ref in enumerate(refs):
        source = _output_value(program, ref)
        node = graph.placeholder(f"output_{number}")
        node.meta = {k: v for k, v in source.meta.items() if k in ("val", "requires_grad")}
        nodes.append(node)
    sizes = {
        symbol_of(node): (node, ref)
        for call in program.calls
        for node, ref in zip(call.region.placeholders, call.args, strict=True)
        if ref.kind == "size"
    }
    symbols = symbols_in(nodes) if sizes else set()
    taken = [found for symbol, found in sizes.items() if symbol in symbols]
    for source, _ in taken:
        graph.placeholder(source.name).meta = dict(source.meta)
    graph.output(nodes)
    kinds: list[RefKind] = [*["call"] * len(refs), *["size"] * len(taken)]  # type: ignore[list-item]
    region = Region(
        name="Outputs",
        module=GraphModule(torch.nn.Module(), graph, class_name="Outputs"),
        input_kinds=tuple(kinds),
        input_names=tuple(node.name for node in graph.find_nodes(op="placeholder")),
    )
    return region, [ref for _, ref in taken]


class _Assembly:
    """Builds the sharded program from the solver's choices."""

    def __init__(
        self,
        opened: Program,
        program: Program,
        facts: dict[int, RegionValues],
        problem: Problem,
        choices: list[int],
        hints: AtHints,
        world_size: int,
    ) -> None:
        self.opened = opened
        self.hints = hints
        self.program = program
        self.facts = facts
        self.problem = problem
        self.world_size = world_size
        self.strategies: dict[Node, Strategy] = {}
        self.placed: dict[tuple, Placement] = {}  # type: ignore[type-arg]
        for vertex, subject, found, choice in zip(
            problem.vertices, problem.subjects, problem.strategies, choices, strict=True
        ):
            option = vertex.options[choice]
            if found:
                self.strategies[subject[1]] = found[choice]
            else:
                self.placed[subject] = (*option.makes, *option.needs)[0]
        self.uses = {
            (value, placement)
            for vertex, choice in zip(problem.vertices, choices, strict=True)
            for value, placement in zip(vertex.needs, vertex.options[choice].needs, strict=True)
        }

    def run(self) -> Sharded:
        lowered = {
            id(source): self._lower(i, region, source)
            for i, (region, source) in enumerate(
                zip(self.program.regions, self.opened.regions, strict=True)
            )
        }
        calls = [Call(lowered[id(c.region)], c.path, c.args) for c in self.opened.calls]
        params = {
            name: self.placed["param", number] for name, number in self.problem.param_class.items()
        }
        outputs = {
            index: calls[ref.index].region.output_placements[ref.output]
            for index, ref in enumerate(self.program.outputs)
            if isinstance(ref, Ref) and ref.kind == "call"
        }
        return Sharded(replace(self.opened, calls=calls), params, outputs, 0.0)

    def _lower(self, i: int, region: Region, source: Region) -> Region:
        facts = self.facts[id(region)]
        chosen = {node: self.strategies[node] for node in facts.rules}
        inputs = [self._input(i, position, region) for position in range(len(region.input_kinds))]
        outputs = [self._output(i, k) for k in range(len(region.outputs))]
        return _lowered(source, facts, chosen, inputs, outputs, self.hints, self.world_size)

    def _input(self, i: int, position: int, region: Region) -> Placement:
        node = region.placeholders[position]
        kind = region.input_kinds[position]
        if kind == "param":
            name = next(
                call.args[position].name for call in self.program.calls if call.region is region
            )
            stored = self.placed["param", self.problem.param_class[name]]
            as_r, as_i = (((i, (node, 0)), kind) in self.uses for kind in (R, I))
            return R if stored == I and as_r and not as_i else stored
        number = self.problem.boundary_class.get(("in", i, position))
        return I if number is None else self.placed["boundary", number]

    def _output(self, i: int, k: int) -> Placement:
        number = self.problem.boundary_class.get(("out", i, k))
        if number is not None:
            return self.placed["boundary", number]
        for index, ref in enumerate(self.program.outputs):
            if not isinstance(ref, Ref) or ref.kind != "call":
                continue
            region = self.program.calls[ref.index].region
            if region is self.program.regions[i] and ref.output == k:
                return self.placed.get(("output", index), I)
        return I
