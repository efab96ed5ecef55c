"""Assembly of the sharded program from the solver's choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from sp_compiler.base.placement import I, Placement, R
from sp_compiler.ir.compiled_program import PassedOver
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.ir.program import Call, Program, Region
from sp_compiler.ir.symbolic import pin
from sp_compiler.passes.sharding.dim_roles import RegionValues, results_of, value_of, value_shape
from sp_compiler.passes.sharding.prices import Key
from sp_compiler.passes.sharding.problem import (
    OperatorSubject,
    OutputSubject,
    Port,
    Problem,
    Subject,
)
from sp_compiler.passes.sharding.rewrite import RegionLowering
from sp_compiler.rules.strategies import Strategy
from sp_compiler.rules.table import record_factors


@dataclass(frozen=True)
class Sharded:
    """A program of local tensors.

    Attributes:
        param_placements: storage placement of every parameter: I or S.
        cost_us: the solver's objective; 0 for one rank, where there is nothing to choose.
        paddable: (region, operator) of operators that could run with padding, and the number of
            units (heads) that would be padded, whatever was chosen.
        passed_over: see :class:`~sp_compiler.ir.compiled_program.CompiledProgram`.
    """

    program: Program
    param_placements: dict[str, Placement]
    cost_us: float = 0.0
    paddable: dict[tuple[str, str], int] = field(default_factory=dict)
    passed_over: Mapping[tuple[str, str], PassedOver | None] = field(default_factory=dict)


class Choices:
    """The solver's choices, by the subject of each vertex.

    Attributes:
        strategies: strategy of each operator.
        placed: placement of each other subject.
        uses: values, and the placements in which some vertex needs them.
    """

    def __init__(self, problem: Problem, choices: Sequence[int]) -> None:
        self.strategies: dict[Node, Strategy] = {}
        self.placed: dict[Subject, Placement] = {}
        self.uses: set[tuple[Key, Placement]] = set()
        for vertex, subject, strategies, choice in zip(
            problem.vertices, problem.subjects, problem.strategies, choices, strict=True
        ):
            option = vertex.options[choice]
            self.uses.update(zip(vertex.needs, option.needs, strict=True))
            if isinstance(subject, OperatorSubject):
                self.strategies[subject.node] = strategies[choice]
            else:  # its options have one placement for all values
                self.placed[subject] = (*option.makes, *option.needs)[0]


def assemble(
    opened: Program,
    program: Program,
    facts: Sequence[RegionValues],
    problem: Problem,
    choices: Choices,
    example: Concretizer,
    world_size: int,
) -> Sharded:
    """Rewrite every region of ``opened`` by the decisions for its copy in ``program``.

    Args:
        opened: the program with its open sizes.
        program: its copy with the example's sizes.
        facts: facts about each region of ``program``.
        example: the map between the two.
    """
    lowered: dict[int, Region] = {}
    for i, (region, source) in enumerate(zip(program.regions, opened.regions, strict=True)):
        chosen = {node: choices.strategies[node] for node in facts[i].rules}
        inputs = [
            _input(program, problem, choices, i, position)
            for position in range(len(region.input_kinds))
        ]
        outputs = [
            _output(program, problem, choices, i, position)
            for position in range(len(region.outputs))
        ]
        lowered[id(source)] = lower(source, facts[i], chosen, inputs, outputs, example, world_size)
    calls = [Call(lowered[id(call.region)], call.path, call.args) for call in opened.calls]
    params = {name: choices.placed[subject] for name, subject in problem.parameters.items()}
    paddable = _paddable(program, problem, world_size)
    return Sharded(replace(opened, calls=calls), params, paddable=paddable)


def _paddable(program: Program, problem: Problem, world_size: int) -> dict[tuple[str, str], int]:
    """Return the units of each operator that was offered a way to run on padded operands."""
    units: dict[tuple[str, str], int] = {}
    regions = program.regions
    for subject, strategies in zip(problem.subjects, problem.strategies, strict=True):
        if not isinstance(subject, OperatorSubject):
            continue
        node, region = subject.node, regions[subject.region]
        cuts = (p for s in strategies for p in s.operands if p.kind == "S")
        padded = next((cut for cut in cuts if cut.padding(world_size)), None)
        if padded is not None:
            key = region.name, node.meta.get("source", node.name)
            units[key] = padded.units or padded.segments[0]
    return units


def assemble_unsharded(
    opened: Program, program: Program, facts: Mapping[int, RegionValues], example: Concretizer
) -> Sharded:
    """Return the program for one rank: all values are unsharded, without conversions."""
    # Through the same rewrite as on several ranks: it writes the metadata that later passes read.
    lowered = {}
    for region, source in zip(program.regions, opened.regions, strict=True):
        values = facts[id(region)]
        chosen = {}
        for node in values.rules:
            operands, made = (I,) * len(tensor_operands(node)), (I,) * len(results_of(node))
            chosen[node] = Strategy(operands, made, whole=tuple(range(len(made))))
        inputs, outputs = [I] * len(region.input_kinds), [I] * len(region.outputs)
        lowered[id(source)] = lower(source, values, chosen, inputs, outputs, example, 1)
    calls = [Call(lowered[id(call.region)], call.path, call.args) for call in opened.calls]
    names = [ref.name for call in calls for ref in call.args if ref.kind == "param"]
    return Sharded(replace(opened, calls=calls), dict.fromkeys(names, I))


def lower(
    region: Region,
    facts: RegionValues,
    chosen: dict[Node, Strategy],
    inputs: list[Placement],
    outputs: list[Placement],
    example: Concretizer,
    world_size: int,
) -> Region:
    """Rewrite ``region`` by the decisions for its copy with the example's sizes."""
    active = {(example.twin(node), index) for node, index in facts.active}
    strategies = {example.twin(node): strategy for node, strategy in chosen.items()}
    for node, strategy in strategies.items():
        # The factors were derived from the example's sizes. They hold only for calls with open
        # sizes that factor the same way, which is recorded here.
        if any(placement.is_sharded for placement in (*strategy.operands, *strategy.results)):
            record_factors(node)
        values = (*map(value_of, tensor_operands(node)), *results_of(node))
        for value, placement in zip(values, (*strategy.operands, *strategy.results), strict=True):
            if placement.segments:  # numbers from the example, which fix the open size
                pin(value_shape(value)[placement.dim])
    return RegionLowering(region, active, strategies, inputs, outputs, world_size).run()


def _input(
    program: Program, problem: Problem, choices: Choices, i: int, position: int
) -> Placement:
    """Return the placement of input ``position`` of region ``i``."""
    region = program.regions[i]
    if region.input_kinds[position] == "param":
        node = region.placeholders[position]
        call = next(call for call in program.calls if call.region is region)
        stored = choices.placed[problem.parameters[call.args[position].name]]
        as_r, as_i = (((i, (node, 0)), kind) in choices.uses for kind in (R, I))
        # If the region reads it as R, its gradient stays a partial sum, and the runtime reduces all
        # such gradients together. If it also needs I, it comes as I and is converted inside.
        return R if stored == I and as_r and not as_i else stored
    # Not active, such as a mask or a table: replicated everywhere.
    crossing = problem.crossings.get(Port("in", i, position))
    return I if crossing is None else choices.placed[crossing]


def _output(
    program: Program, problem: Problem, choices: Choices, i: int, position: int
) -> Placement:
    """Return the placement of output ``position`` of region ``i``."""
    crossing = problem.crossings.get(Port("out", i, position))
    if crossing is not None:
        return choices.placed[crossing]
    # No region reads it: it is returned to the user, if active, or is a buffer's new value.
    region = program.regions[i]
    for index, ref in program.call_outputs.items():
        if ref.output == position and program.calls[ref.index].region is region:
            return choices.placed.get(OutputSubject(index), I)
    return I
