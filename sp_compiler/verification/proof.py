"""Proof before the first step: what was just compiled computes what was captured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.warn import warn
from sp_compiler.compiler import to_program
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.concretize import Concretizer, concretized
from sp_compiler.ir.program import Program
from sp_compiler.options import CompileOptions
from sp_compiler.rules.custom import UNPROVEN
from sp_compiler.rules.registry import schema_name
from sp_compiler.verification.blocks import check_blocks, random_like
from sp_compiler.verification.judge import OWN, Reference
from sp_compiler.verification.reference import run_program
from sp_compiler.verification.report import Comparison, VerifyReport
from sp_compiler.verification.variants import variants_by_pass
from sp_compiler.verification.verify import (
    Step,
    Tensors,
    compare_passes,
    draws_numbers,
    run_flat,
    undropped,
)

_SEED = 20260


def prove(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CompileOptions,
    compiled: CompiledProgram,
) -> None:
    """Compare ``compiled`` with the capture of ``model``, on random parameters.

    The flat graphs before sharding are compared as wholes, so that layers that were merged wrongly
    show; from there on each distinct block, forward and backward. Every rank does the same alone.

    Raises:
        PassError: of the pass that broke the numbers, with the block and how far they are off.
    """
    assert compiled.unsharded is not None, "compiled without its unsharded graphs"
    step = _random_step(model, args, kwargs, compiled)
    rows = _quick_rows(step, compiled, *compiled.unsharded)
    compiled.unsharded = None  # only proofs read it, and programs live long
    if not all(row.ok for row in rows):
        # Noise floors, and every pass between, cost several times the check.
        rows = _thorough_rows(step, options, compiled)
    report = VerifyReport(type(model).__name__, options.tp, tuple(rows))
    if not report.ok:
        raise PassError(
            report.first_bad_pass or "",
            f"verify=True: the numbers are wrong from here on\n{report}",
        )
    UNPROVEN.difference_update(_used_operators(compiled))


def prove_rules(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CompileOptions,
    compiled: CompiledProgram,
) -> None:
    """Compare the blocks whose operators have a user's rule that was never compared with numbers.

    Raises:
        PassError: naming the rules that may be wrong.
    """
    operators = UNPROVEN & _used_operators(compiled)
    if not operators or options.tp == 1:
        return
    names = ", ".join(sorted(operators))
    try:
        step = _random_step(model, args, kwargs, compiled)
        rows = _thorough_rows(step, options, compiled, operators)
    except Exception as error:  # whatever an operator of the user says to random operands
        warn(f"the rules of {names} could not be compared with numbers: {error}")
        rows = []
    if not all(row.ok for row in rows):
        report = VerifyReport(type(model).__name__, options.tp, tuple(rows))
        raise PassError(
            Pass.SHARD,
            f"sp_compiler.rule: with the rules of {names} the numbers are wrong\n{report}",
        )
    UNPROVEN.difference_update(operators)


def _used_operators(compiled: CompiledProgram) -> set[str]:
    regions = compiled.program.regions
    return {schema_name(node) for region in regions for node in region.module.graph.nodes}


def _random_step(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], compiled: CompiledProgram
) -> Step:
    step = Step.of(model, args, kwargs)
    open_dims = compiled.program.sizes is not None
    return replace(step, tensors=_random_tensors(step.tensors), open_dims=open_dims)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Say nothing again that the compilation has said, and cast nothing again."""
    with warnings.catch_warnings(), without_autocast():
        warnings.simplefilter("ignore")
        yield


@_quietly()
def _quick_rows(
    step: Step, compiled: CompiledProgram, captured: Captured, program: Program
) -> list[Comparison]:
    """Compare the capture with the outlined program, and that with the generated code."""
    true = Reference.of(partial(undropped, step, partial(run_flat, captured)), floors=False)
    rows = []
    # Numbers that are drawn differ between the two; single blocks are compared all the same.
    if not draws_numbers(program):
        outlined = undropped(step, partial(run_flat, program), true.precision)
        rows.append(true.compare(Pass.OUTLINE, "model", outlined))
    return [*rows, *_block_rows(step, program, {Pass.CODEGEN: concretized(compiled)}, False)]


@_quietly()
def _thorough_rows(
    step: Step,
    options: CompileOptions,
    compiled: CompiledProgram,
    operators: Set[str] | None = None,
) -> list[Comparison]:
    """Compare what every pass left; with ``operators`` only blocks that have one of them."""
    rows: list[Comparison] = []
    captured = step.capture()
    program: Program | None
    if operators is None:
        true = Reference.of(partial(undropped, step, partial(run_flat, captured)))
        rows, program = compare_passes(step, captured, options, true)
    else:
        program = to_program(captured, options)
    if program is None:
        return rows
    variants = variants_by_pass(concretized(compiled))
    return [*rows, *_block_rows(step, program, variants, True, operators)]


def _block_rows(
    step: Step,
    program: Program,
    variants: Mapping[str, CompiledProgram],
    floors: bool,
    operators: Set[str] | None = None,
) -> Iterator[Comparison]:
    tensors = step.tensors.leaves(OWN)
    with torch.no_grad():
        values = (tensors.params, tensors.buffers, tensors.inputs, torch.tensor(_SEED))
        given = run_program(program, *values).call_inputs
    at_example = Concretizer(program.sizes).program(program)
    yield from check_blocks(at_example, variants, given, floors=floors, operators=operators)


def _random_tensors(tensors: Tensors) -> Tensors:
    """Parameters have no memory while a model is compiled; what has values keeps them."""
    generator = torch.Generator().manual_seed(_SEED)

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        return _filled(value, generator)

    params = {name: _filled(value, generator) for name, value in tensors.params.items()}
    buffers = {name: filled(value) for name, value in tensors.buffers.items()}
    return Tensors(params, buffers, list(map(filled, tensors.inputs)))


def _filled(value: Tensor, generator: torch.Generator) -> Tensor:
    # A meta tensor says nothing of the device it will have.
    device = torch.device("cpu") if value.is_meta else value.device
    on_device = torch.empty(value.shape, dtype=value.dtype, device="meta")
    result = random_like(on_device, generator, device).detach().to(value.dtype)
    return result.requires_grad_(value.requires_grad)
