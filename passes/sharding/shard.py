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
from sp_compiler.passes.sharding.alternatives import passed_over
from sp_compiler.passes.sharding.assemble import Choices, Sharded, assemble, assemble_unsharded
from sp_compiler.passes.sharding.dim_roles import ReplicatedNode, activate
from sp_compiler.passes.sharding.labels import label_dims
from sp_compiler.passes.sharding.outputs import Routed, may_shard, route_outputs
from sp_compiler.passes.sharding.problem import ProblemBuilder
from sp_compiler.passes.sharding.reasons import why_no_rule
from sp_compiler.rules.vocabulary import has_vocabulary
from sp_compiler.solve.placement import solve


def shard(
    program: Program,
    options: CompileOptions,
    fixed: dict[str, Placement] | None = None,
    replicated: Collection[ReplicatedNode] = (),
) -> Sharded:
    """Shard ``program`` over ``options.tp`` ranks.

    Args:
        program: unsharded; see :func:`sp_compiler.passes.outline.outline`.
        options: ``tp``, ``sequence_parallel``, ``nominal_tokens``, ``outputs`` and ``hardware``
            are read.
        fixed: storage placements that an earlier compilation gave to the parameters.
        replicated: operators that run replicated regardless of their rules.

    Raises:
        PassError: the program is already sharded: its shapes are those of one rank.
    """
    if any(region.input_placements for region in program.regions):
        raise PassError(Pass.SHARD, "the program is sharded already; shard what outline() returned")
    # Decisions are made for the example's sizes; they are applied to the program with open sizes,
    # which records only the divisibility that the chosen shards need.
    example = Concretizer(program.sizes)
    routed, fixed = route_outputs(program), fixed or {}
    opened = routed.program
    if options.tp == 1:  # nothing to choose
        concrete = example.program(opened)
        return _with_returned(assemble_unsharded(opened, concrete, activate(concrete), example), {})
    builder = placement_problem(routed, options, fixed, replicated, example)
    problem = builder.problem
    try:
        solution = solve(problem.vertices, builder.prices.conversion_us)
    except SPCompilerError as error:
        raise _blamed_on_hints(program, options, fixed, replicated, error) from error
    for facts in builder.facts:
        for node, rule in facts.rules.items():
            # Lookups in and losses over a vocabulary have strategies without a rule.
            if rule is None and not has_vocabulary(node):
                report_of(Pass.SHARD).decline(node, why_no_rule(node, "it"))
    choices = Choices(problem, solution.choices)
    sharded = _with_returned(
        assemble(opened, builder.program, builder.facts, problem, choices, example, options.tp),
        fixed,
    )
    notes = list(sharded.program.notes)
    if solution.gap:
        notes.append(
            f"the placements may take up to {solution.gap:.2%} longer than the best ones: the "
            "search was cut short"
        )
    return replace(
        sharded,
        program=replace(sharded.program, notes=notes),
        cost_us=solution.cost_us,
        passed_over=passed_over(builder.program, builder, solution),
    )


def placement_problem(
    routed: Routed,
    options: CompileOptions,
    fixed: dict[str, Placement],
    replicated: Collection[ReplicatedNode],
    example: Concretizer | None = None,
) -> ProblemBuilder:
    """Build the problem of placing a program on ``options.tp`` ranks, at least two.

    Open sizes are replaced by the example's: ``example`` makes the copy.
    """
    program = (example or Concretizer(routed.program.sizes)).program(routed.program)
    facts = activate(program, replicated)
    label_dims(program, facts, options.tp)
    builder = ProblemBuilder(
        program,
        facts,
        world_size=options.tp,
        sequence_parallel=options.sequence_parallel,
        nominal_tokens=options.nominal_tokens,
        # Outputs that had to be separated from values between regions are returned in full.
        shard_outputs=lambda index: (
            program.outputs[index] not in routed.refs and may_shard(program, index, options)
        ),
        fixed=fixed,
        hardware=options.device,
    )
    builder.build()
    return builder


def _blamed_on_hints(
    program: Program,
    options: CompileOptions,
    fixed: dict[str, Placement],
    replicated: Collection[ReplicatedNode],
    error: SPCompilerError,
) -> SPCompilerError:
    """Return an error with a minimal set of hints that cannot be satisfied together.

    The remaining hints can be satisfied if any one of them is dropped.
    """

    def impossible(keys: Iterable[str]) -> bool:
        wishes = wishes_of({key: options.hints[key] for key in keys}, program.parameters)
        routed = route_outputs(replace(program, wishes=wishes))
        builder = placement_problem(routed, options, fixed, replicated)
        try:
            solve(builder.problem.vertices, builder.prices.conversion_us)
        except SPCompilerError:
            return True
        return False

    if impossible(()):  # the hints are not to blame
        return error
    # Each hint is dropped once, and stays out if the rest contradict each other without it. This
    # takes one more solution per hint, but only on the way to an error.
    contradicting = dict(options.hints)
    for key in options.hints:
        if impossible(other for other in contradicting if other != key):
            del contradicting[key]
    texts = " and ".join(f"hints[{key!r}]={hint_text(hint)}" for key, hint in contradicting.items())
    return ArgumentError(
        f"{texts} cannot be met together on {options.tp} ranks: some operator reads parameters "
        "placed by them and cannot run with both; drop one, or call plan.explain(name) without it "
        "to see what is possible"
    )


def _with_returned(sharded: Sharded, fixed: dict[str, Placement]) -> Sharded:
    """Also place the parameters that the model returns and no operator reads."""
    # They have no vertex in the problem, but the runtime has to know how they are stored.
    program = sharded.program
    leaves = (*program.outputs, *program.mutated_buffers.values())
    names = [leaf.name for leaf in leaves if isinstance(leaf, Ref) and leaf.kind == "param"]
    returned = {name: fixed.get(name, I) for name in names}
    return replace(sharded, param_placements=returned | sharded.param_placements)
