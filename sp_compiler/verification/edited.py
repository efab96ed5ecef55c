"""Comparison of edited code with the code it replaces, on simulated ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.pass_report import Pass
from sp_compiler.codegen.loading import origin_of
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.fx import carries_gradient
from sp_compiler.verification.judge import Numbers, Precision, Reference, unit_tangent
from sp_compiler.verification.random_values import SPREADS, random_like
from sp_compiler.verification.simulate import simulate_step
from sp_compiler.verification.variants import as_it_runs
from sp_compiler.verification.verify import Tensors

# Every rank compares by itself, and must come to the same result.
_SEED = 51


def check_edited(
    generated: CompiledProgram,
    edited: CompiledProgram,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
) -> None:
    """Compare outputs, new values of buffers and all gradients of both, with random parameters.

    All functions run: an ordinary step may run others than a step under hooks or FSDP2.

    Args:
        parameters: parameters by name; only their global shapes and dtypes are used.
        inputs: flattened inputs, with their values.

    Raises:
        ArgumentError: the edited code fails or computes another result, or the generated code
            computes NaN.
    """
    generated, edited = _running_all(generated), _running_all(edited)
    for spread in SPREADS:
        generator = torch.Generator().manual_seed(_SEED)
        drawn = {
            name: random_like(value, generator, torch.device("cpu"), spread, value.dtype)
            .detach()
            .requires_grad_(value.requires_grad)
            for name, value in parameters.items()
        }
        tensors = Tensors(
            drawn,
            {name: _on_cpu(value) for name, value in buffers.items()},
            list(map(_on_cpu, inputs)),
        )
        # No floors: only the edit can change the rounding, which is negligible in float64.
        reference = Reference.of(partial(_numbers, generated, tensors), floors=False)
        if reference.true.is_defined:
            break
    else:
        raise ArgumentError(
            "example_inputs: the generated code computes NaN from them, which cannot be compared; "
            "pass inputs of an ordinary batch"
        )
    try:
        row = reference.compare(
            Pass.CODEGEN, "model", _numbers(edited, tensors, reference.precision)
        )
    except Exception as error:  # its statements may raise anything
        raise ArgumentError(
            f"the edited code fails: {type(error).__name__}: {error}\n{origin_of(error)}"
        ) from error
    if not row.ok:
        raise ArgumentError(
            f"the edited code computes another result: {row.where} differs by {row.error:.1e} of "
            f"its largest value ({row.tolerance:.0e} is rounding), in {reference.precision.name}"
        )


def _running_all(compiled: CompiledProgram) -> CompiledProgram:
    """Return the program with calls that work alone, whose backward runs all functions of their
    region."""
    regions = {
        name: replace(each, partitioned=replace(each.partitioned, ahead=None, split=None))
        for name, each in compiled.regions.items()
    }
    return replace(as_it_runs(compiled), regions=regions)


def _numbers(compiled: CompiledProgram, tensors: Tensors, precision: Precision) -> Numbers:
    results = []
    output_grads: list[Tensor | None] | None = None
    # A loss has its own backward, in addition to that of all outputs.
    for _ in range(1 + bool(compiled.loss_backwards)):
        own = tensors.leaves(precision)
        with without_autocast():
            step = simulate_step(
                compiled,
                own.params,
                own.buffers,
                own.inputs,
                torch.tensor(_SEED, device="cpu"),
                output_grads,
                precision.entered,
            )
        results.append(step)
        # The second time from all outputs: the loss's own backward omits all others.
        output_grads = [
            unit_tangent(value) if isinstance(value, Tensor) and carries_gradient(value) else None
            for value in step.outputs
        ]
    grads = {
        f"{name}{' from all outputs' if number else ''}": grad
        for number, step in enumerate(results)
        for name, grad in (
            *step.grads.items(),
            *((f"input {index}", grad) for index, grad in enumerate(step.input_grads)),
        )
    }
    return Numbers([*results[0].outputs, *results[0].mutated_buffers.values()], grads)


def _on_cpu(value: Any) -> Any:
    return (
        value.detach().cpu().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
    )
