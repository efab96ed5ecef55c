"""Choose a placement for every value of a program and rewrite it to one rank's part.

Requires ``meta["val"]`` and ``meta["requires_grad"]`` on every node; establishes local shapes,
``meta["placement"]`` and conversion nodes. The input program is not modified.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from sp_compiler.base.errors import ArgumentError, PassError, SPCompilerError
from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.placement import I, Placement
from sp_compiler.ir.concretize import Concretizer
from sp_compiler.ir.hints import hint_text, wishes_of
from sp_compiler.ir.program import Program, Ref
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.assemble import Choices, Sharded, assemble, assemble_unsharded
from sp_compiler.passes.sharding.dim_roles import WholeNode, activate, label_dims
from sp_compiler.passes.sharding.outputs import Routed, may_shard, route_outputs
from sp_compiler.passes.sharding.problem import ProblemBuilder
from sp_compiler.rules.vocabulary import has_vocabulary
from sp_compiler.solve.placement import solve


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
        raise PassError(Pass.SHARD, "the program is sharded already; shard what outline() returned")
    # What is decided is decided for the example's sizes; what is made of it has the open ones.
    example = Concretizer(program.sizes)
    routed, fixed = route_outputs(program), fixed or {}
    opened = routed.program
    if options.tp == 1:
        concrete = example.program(opened)
        return _with_returned(assemble_unsharded(opened, concrete, activate(concrete), example), {})
    builder = placement_problem(routed, options, fixed, whole, example)
    problem = builder.problem
    try:
        solution = solve(problem.vertices, builder.prices.conversion_us)
    except SPCompilerError as error:
        raise _blamed_on_hints(program, options, fixed, whole, error) from error
    for facts in builder.facts:
        for node, rule in facts.rules.items():
            # Lookups in and losses over a vocabulary are sharded by a way of their own.
            if rule is None and not has_vocabulary(node):
                report_of(Pass.SHARD).decline(node, "no sharding rule, or one that was refused")
    choices = Choices(problem, solution.choices)
    sharded = _with_returned(
        assemble(opened, builder.program, builder.facts, problem, choices, example, options.tp),
        fixed,
    )
    notes = list(sharded.program.notes)
    if solution.gap:
        notes.append(
            f"the placements may take up to {solution.gap:.2%} longer than the best ones: the "
            "search for those was cut short"
        )
    return replace(sharded, program=replace(sharded.program, notes=notes), cost_us=solution.cost_us)


def placement_problem(
    routed: Routed,
    options: CompileOptions,
    fixed: dict[str, Placement],
    whole: Collection[WholeNode],
    example: Concretizer | None = None,
) -> ProblemBuilder:
    """Build the problem of placing a program on ``options.tp`` ranks, at least two.

    It is that of the example's sizes, which ``example`` puts in place of open ones.
    """
    program = (example or Concretizer(routed.program.sizes)).program(routed.program)
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
            program.outputs[index] not in routed.refs and may_shard(program, index, options)
        ),
        fixed=fixed,
    )
    builder.build()
    return builder


def _blamed_on_hints(
    program: Program,
    options: CompileOptions,
    fixed: dict[str, Placement],
    whole: Collection[WholeNode],
    error: SPCompilerError,
) -> SPCompilerError:
    """Return an error with the hints that cannot be met together.

    Without any of them, all others can.
    """

    def impossible(keys: Iterable[str]) -> bool:
        kept = wishes_of({key: options.hints[key] for key in keys}, program.parameters)
        routed = route_outputs(replace(program, wishes=kept))
        builder = placement_problem(routed, options, fixed, whole)
        try:
            solve(builder.problem.vertices, builder.prices.conversion_us)
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


def _with_returned(sharded: Sharded, fixed: dict[str, Placement]) -> Sharded:
    """Also place the parameters that the model returns and no operator reads."""
    program = sharded.program
    leaves = (*program.outputs, *program.mutated_buffers.values())
    names = [leaf.name for leaf in leaves if isinstance(leaf, Ref) and leaf.kind == "param"]
    returned = {name: fixed.get(name, I) for name in names}
    return replace(sharded, param_placements=returned | sharded.param_placements)
