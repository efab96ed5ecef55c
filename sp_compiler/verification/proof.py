"""Verification before the first step that the compiled program computes the same as the capture."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import Placement
from sp_compiler.base.warn import warn
from sp_compiler.compiler import to_program
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.concretize import Concretizer, concretized
from sp_compiler.ir.program import Program, Ref
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.outputs import route_outputs
from sp_compiler.rules.custom import UNPROVEN
from sp_compiler.rules.registry import schema_name
from sp_compiler.verification.blocks import Block, BlockData, check_blocks
from sp_compiler.verification.judge import Reference
from sp_compiler.verification.precision import Remembered
from sp_compiler.verification.random_values import SPREADS, Spread, Values, random_like
from sp_compiler.verification.report import Comparison, VerifyReport
from sp_compiler.verification.sections import Sections, check_sections, check_wiring
from sp_compiler.verification.variants import as_it_runs, variants_by_pass
from sp_compiler.verification.verify import (
    Step,
    Tensors,
    compare_passes,
    run_flat,
    undropped,
)

# Every rank proves by itself, and must come to the same result.
_SEED = 20260


def prove(step: Step, options: CompileOptions, compiled: CompiledProgram) -> None:
    """Compare ``compiled`` with the capture of the model, on random parameters.

    Up to the outline, each distinct part of the capture is compared with its call, which finds
    layers that were merged wrongly. After that, each distinct block is compared. All comparisons
    are of forward and backward. Every rank does the same by itself.

    Raises:
        PassError: names the pass that changed the results, the block and the error.
    """
    assert compiled.unsharded is not None, "compiled without its unsharded graphs"
    step = _sized(step, compiled)
    undefined: list[str] = []
    rows = _quick_rows(step, compiled, *compiled.unsharded, undefined)
    compiled.unsharded = None  # only proofs read it, and programs are long-lived
    if not all(row.ok for row in rows):
        # Noise floors, and comparisons after every pass, cost several times the quick check.
        rows = _thorough_rows(step, options, compiled)
    _refuse_wrong(rows, step, options, "verify=True: the results are wrong from this pass on")
    if undefined:
        warn(
            f"verify=True: random parameters give NaN in {', '.join(undefined)}, whose results "
            "were not compared; sp_compiler.verify compares results with real parameters"
        )
    UNPROVEN.difference_update(_sharded_operators(compiled))


def prove_rules(step: Step, options: CompileOptions, compiled: CompiledProgram) -> None:
    """Compare the blocks whose operators have a user's rule that was not verified yet.

    Raises:
        PassError: names the rules that may be wrong.
    """
    graphs = [region.module.graph for region in compiled.program.regions]
    # Once for all models: a rule that was right on one block is not tested on later ones.
    operators = UNPROVEN & {schema_name(node) for graph in graphs for node in graph.nodes}
    if not operators or options.tp == 1:
        return
    # Sorted, since the order of a set differs between processes, and ranks compare their errors.
    names = ", ".join(sorted(operators))
    try:
        rows = _thorough_rows(_sized(step, compiled), options, compiled, operators)
    except Exception as error:  # a user's operator may raise anything for random operands
        warn(f"the rules of {names} could not be verified numerically: {error}")
        rows = []
    message = f"sp_compiler.rule: with the rules of {names} the results are wrong"
    # Whichever pass the comparisons point to, it followed the rules.
    _refuse_wrong(rows, step, options, message, blamed=Pass.SHARD)
    UNPROVEN.difference_update(operators & _sharded_operators(compiled))


def _refuse_wrong(
    rows: Sequence[Comparison],
    step: Step,
    options: CompileOptions,
    message: str,
    *,
    blamed: str | None = None,
) -> None:
    """Raise an error with all comparisons if one is wrong; it names ``blamed`` or the first bad
    pass."""
    report = VerifyReport(step.name, options.tp, tuple(rows))
    if not report.ok:
        raise PassError(blamed or report.first_bad_pass or "", f"{message}\n{report}")


def _sharded_operators(compiled: CompiledProgram) -> set[str]:
    """Return the operators that are sharded: a rule is verified only where it is used."""
    return {
        schema_name(node)
        for region in compiled.program.regions
        for node in region.module.graph.nodes
        if any(
            isinstance(placement, Placement) and placement.kind in ("S", "P")
            for each in (node, *node.all_input_nodes)
            for placement in pytree.tree_leaves(each.meta.get("placement"))
        )
    }


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Context without repeated warnings of the compilation, and without autocast."""
    with warnings.catch_warnings(), without_autocast():
        warnings.simplefilter("ignore")
        yield


def _sized(step: Step, compiled: CompiledProgram) -> Step:
    return replace(step, open_dims=compiled.program.sizes is not None)


@_quietly()
def _quick_rows(
    step: Step,
    compiled: CompiledProgram,
    captured: Captured,
    program: Program,
    undefined: list[str],
) -> list[Comparison]:
    """Compare the capture with the outlined program, and that with the generated code.

    ``undefined`` is filled with the regions that compute NaN for all spreads of random values.
    """
    at_example = _routed_at_example(program)
    values_of = _values_of(step.tensors, at_example)
    variants: dict[str, CompiledProgram] = {Pass.CODEGEN: as_it_runs(concretized(compiled))}
    sections = Sections(captured, program, at_example)
    distinct = list(sections.distinct(values_of(SPREADS[0])))
    rows = list(check_wiring(sections))
    for region in at_example.regions:
        of_region = [each for each in distinct if at_example.calls[each.call].region is region]
        # Unsharded graphs of one region share most operators, which run once.
        with Remembered():
            rows += check_sections(sections, of_region, values_of)
            # Code cannot be compared with a wrong graph.
            if not all(row.ok for row in rows):
                return rows
            data = partial(_call_data, at_example, values_of)
            block = Block.of(at_example, region, data, floors=False)
        if not block.reference.true.is_defined:
            undefined.append(region.name)
        rows += block.rows(at_example, variants)
        for spread in SPREADS:
            values_of(spread).forget()  # one region's weights at a time
    return rows


@_quietly()
def _thorough_rows(
    step: Step,
    options: CompileOptions,
    compiled: CompiledProgram,
    operators: Set[str] | None = None,
) -> list[Comparison]:
    """Compare the result of every pass; with ``operators``, only blocks that have one of them."""
    # The capture of the compilation was rewritten by its passes, so the model is captured again.
    rows: list[Comparison] = []
    captured = step.capture()
    program: Program | None
    if operators is None:
        # Until there is no NaN, as from roots of negative parameters on both sides.
        for spread in SPREADS:
            filled = replace(step, tensors=_random_tensors(step.tensors, spread))
            true = Reference.of(partial(undropped, filled, partial(run_flat, captured)))
            if true.true.is_defined:
                break
        rows, program = compare_passes(filled, captured, options, true)
    else:
        program = to_program(captured, options)
    if program is None or not all(row.ok for row in rows):
        return rows
    variants = variants_by_pass(concretized(compiled), joint=operators is None)
    at_example = _routed_at_example(program)
    data = partial(_call_data, at_example, _values_of(step.tensors, at_example))
    return [*rows, *check_blocks(at_example, variants, data, operators=operators)]


def _routed_at_example(program: Program) -> Program:
    """Return ``program`` at the example's sizes, with separate outputs of the model, so that its
    blocks have the same outputs as the sharded ones."""
    return Concretizer(program.sizes).program(route_outputs(program).program)


def _call_data(
    program: Program, values_of: Callable[[Spread], Values], index: int, spread: Spread
) -> BlockData:
    """Return the inputs of call ``index``: random values, or those of a real step, such as a causal
    mask."""
    call, values = program.calls[index], values_of(spread)
    tangents = [
        values.tangent(Ref("call", index=index, output=output), node.meta["val"])
        for output, node in enumerate(call.region.outputs)
    ]
    inputs = [
        # An example's value may be zero, which would hide errors in values it is multiplied with.
        values.random(ref, node.meta["val"])
        if node.meta["requires_grad"] and not values.is_random(ref)
        else values.of(ref)
        for node, ref in call.inputs
    ]
    return BlockData(inputs, tangents)


def _values_of(tensors: Tensors, program: Program) -> Callable[[Spread], Values]:
    """Return values by spread, each made once and shared by all blocks."""
    return functools.cache(
        partial(Values, program, tensors.params, tensors.buffers, tensors.inputs)
    )


def _random_tensors(tensors: Tensors, spread: Spread) -> Tensors:
    """Return random parameters, since they have no memory while a model is compiled, and random
    values for other tensors without memory; all others keep their values."""
    generator = torch.Generator().manual_seed(_SEED)

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        return _filled(value, generator, spread)

    params = {name: _filled(value, generator, spread) for name, value in tensors.params.items()}
    buffers = {name: filled(value) for name, value in tensors.buffers.items()}
    return Tensors(params, buffers, list(map(filled, tensors.inputs)))


def _filled(value: Tensor, generator: torch.Generator, spread: Spread) -> Tensor:
    # A meta tensor does not tell its later device.
    device = torch.device("cpu") if value.is_meta else value.device
    result = random_like(value, generator, device, spread, value.dtype).detach()
    return result.requires_grad_(value.requires_grad)
