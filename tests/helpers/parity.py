"""Compiled programs on simulated ranks against the captured graph on one device, in float64."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sp_compiler.compiler import Compilation
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.hints import Hint, wishes_of
from sp_compiler.ir.program import Program
from sp_compiler.options import CompileOptions, Dropout
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import outline
from sp_compiler.trace.arguments import unordered_keywords
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.judge import backward
from sp_compiler.verification.reference import run_program
from sp_compiler.verification.simulate import SimulatedStep, simulate_step
from tests.models import zoo

SEED = torch.tensor(1234567)


@dataclass(frozen=True)
class Case:
    """A captured model with its inputs and the true result of one step.

    Attributes:
        program: unsharded.
        params: whole parameters.
        buffers: whole buffers.
        inputs: flattened user inputs.
        outputs: flat outputs on one device.
        grads: gradient of every parameter on one device, ``None`` where there is none.
        input_grads: the same of every input.
        latest: the last two compilations of :func:`compiled_in_turn`.
    """

    program: Program
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: list[Any]
    outputs: list[Any]
    grads: dict[str, Tensor | None]
    input_grads: list[Tensor | None]
    latest: list[tuple[CompileOptions, Compilation]] = field(default_factory=list)


@functools.lru_cache(maxsize=32)
def case(
    name: str,
    batch: int,
    seq: int,
    p: float = 0.0,
    dropout: Dropout = "regenerate",
    **fields: Any,
) -> Case:
    """A zoo model in float64, with its casts to float32 lifted; equal arguments share a capture."""
    model = zoo.build(name, dropout=p, **fields)
    return make_case(model, zoo.inputs(name, batch, seq), dropout=dropout)


def make_case(
    model: nn.Module,
    kwargs: dict[str, Any],
    *,
    dropout: Dropout = "regenerate",
    lift_casts: bool = True,
    seed: Tensor = SEED,
    hints: Mapping[str, Hint] | None = None,
) -> Case:
    """Capture a model called with ``kwargs`` and run what was captured on one device."""
    captured = capture(model, (), kwargs, lift_casts=lift_casts)
    normalize(captured, dropout=dropout)
    program = outline(captured, wishes_of(hints or {}, captured.parameters))
    params = {name: _leaf(value) for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())
    inputs, _ = flatten_inputs((), kwargs, unordered_keywords(model.forward))
    leaves = [_leaf(value) if isinstance(value, Tensor) else value for value in inputs]
    result = run_program(program, params, buffers, leaves, seed)
    backward(result.outputs, program.out_spec)
    grads = {key: value.grad for key, value in params.items()}
    input_grads = [value.grad if isinstance(value, Tensor) else None for value in leaves]
    params = {name: _leaf(value) for name, value in params.items()}
    outputs = [item.detach() if isinstance(item, Tensor) else item for item in result.outputs]
    return Case(program, params, buffers, inputs, outputs, grads, input_grads)


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def compiled(found: Case, **options: Any) -> CompiledProgram:
    settings = CompileOptions(**options)
    return Compilation(found.program, settings).finish(settings)


def compiled_in_turn(found: Case, **options: Any) -> CompiledProgram:
    """:func:`compiled`, sharing what two calls in turn share that differ in memory settings."""
    wanted = CompileOptions(**options)
    key = replace(wanted, recompute="none", memory_budget=None, offload=False)
    shared = next((each for options, each in found.latest if options == key), None)
    if shared is None:
        shared = Compilation(found.program, key)
        found.latest[:] = [*found.latest[-1:], (key, shared)]
    return shared.finish(wanted)


def simulate(found: Case, program: CompiledProgram, seed: Tensor = SEED) -> SimulatedStep:
    return simulate_step(program, found.params, found.buffers, found.inputs, seed)


def assert_equal_gradients(step: SimulatedStep, other: SimulatedStep, most: float) -> None:
    """Compare all gradients, in parts of the largest, of which they may differ by ``most``."""
    largest = max(float(grad.abs().max()) for grad in step.grads.values() if grad is not None)
    for key, grad in step.grads.items():
        actual = other.grads[key]
        assert grad is not None
        assert actual is not None
        assert float((grad - actual).abs().max()) <= most * largest, key


def gradient_error(
    grads: dict[str, Tensor | None], expected: dict[str, Tensor | None], floor: float = 1e-5
) -> float:
    """The worst max|g - g0| / max(max|g0|, floor * the largest gradient) of any parameter.

    Gradients that are zero in theory (a key bias) carry the rounding of the largest ones, so
    ``floor`` depends on the type: rounding / floor must be small.

    Raises:
        AssertionError: a gradient is there on one side alone, or is not finite.
    """
    largest = max(
        (
            float(grad.abs().max())
            for grad in expected.values()
            if grad is not None and grad.numel()
        ),
        default=0.0,
    )
    worst = 0.0
    for name, true in expected.items():
        grad = grads.get(name)
        if true is None or not true.any():
            assert grad is None or not grad.any(), f"{name}: a gradient where there is none"
            continue
        assert grad is not None, f"{name}: no gradient"
        assert grad.shape == true.shape, f"{name}: {grad.shape} against {true.shape}"
        assert grad.isfinite().all(), f"{name}: not finite"
        scale = max(float(true.abs().max()), floor * largest)
        worst = max(worst, float((grad - true).abs().max()) / scale)
    return worst


def output_error(step: SimulatedStep, found: Case) -> float:
    """The worst relative difference of any output."""
    worst = 0.0
    for actual, true in zip(step.outputs, found.outputs, strict=True):
        if isinstance(true, Tensor) and true.is_floating_point():
            assert actual.isfinite().all(), "an output is not finite"
            scale = float(true.abs().max()) or 1.0
            worst = max(worst, float((actual - true).abs().max()) / scale)
    return worst


def assert_parity(found: Case, tolerance: float = 1e-10, **options: Any) -> CompiledProgram:
    """Compile and compare; returns the compiled program for further checks."""
    program = compiled(found, **options)
    assert_step(found, program, tolerance)
    return program


def assert_step(found: Case, program: CompiledProgram, tolerance: float = 1e-10) -> None:
    """One step of ``program`` on simulated ranks is that of the captured graph."""
    step = simulate(found, program)
    assert output_error(step, found) < tolerance
    assert gradient_error(step.grads, found.grads) < tolerance
    for actual, true in zip(step.input_grads, found.input_grads, strict=True):
        if true is not None:
            assert actual is not None
            assert float((actual - true).abs().max()) < tolerance * float(true.abs().max())


def assert_equal_to_the_bit(
    grads: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> None:
    """Every parameter has the expected gradient, which is nowhere missing."""
    assert grads.keys() == expected.keys()
    for name, true in expected.items():
        grad = grads[name]
        assert grad is not None, name
        assert true is not None, name
        assert torch.equal(grad, true), name
