"""Compiled programs on simulated ranks against the captured graph on one device, in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compiler.capture import capture, flatten_inputs
from sp_compiler.compiled import CompiledProgram
from sp_compiler.config import CompileOptions
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import outline
from sp_compiler.pipeline import compile_program
from sp_compiler.program import Program
from sp_compiler.reference import run_program
from sp_compiler.simulate import SimulatedStep, simulate_step
from tests import zoo

SEED = torch.tensor(1234567)


@dataclass(frozen=True)
class Case:
    """A captured model with its inputs and the true result of one step."""

    program: Program
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: list[Any]
    outputs: list[Any]
    grads: dict[str, Tensor | None]


@functools.lru_cache(maxsize=8)
def case(name: str, batch: int, seq: int, p: float = 0.0, dropout: str = "regenerate") -> Case:
    """Capture a zoo model in float64, with its casts to float32 lifted, and run it on one device."""
    model = zoo.build(name, dropout=p)
    kwargs = zoo.inputs(name, batch, seq)
    captured = capture(model, (), kwargs, lift_casts=True)
    normalize(captured, dropout=dropout)
    program = outline(captured)
    params = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    inputs, _ = flatten_inputs((), kwargs)
    result = run_program(program, params, buffers, inputs, SEED)
    backward(result.outputs)
    grads = {key: value.grad for key, value in params.items()}
    params = {key: value.detach().requires_grad_(value.requires_grad) for key, value in params.items()}
    outputs = [item.detach() if isinstance(item, Tensor) else item for item in result.outputs]
    return Case(program, params, buffers, inputs, outputs, grads)


def backward(outputs: list[Any]) -> None:
    """From the loss if there is one, else from every output with ones, as ``simulate_step`` does."""
    roots = [item for item in outputs if isinstance(item, Tensor) and item.requires_grad]
    losses = [item for item in roots if item.dim() == 0]
    roots = losses[:1] or roots
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def compiled(found: Case, **options: Any) -> CompiledProgram:
    return compile_program(found.program, CompileOptions(**options))


def simulate(found: Case, program: CompiledProgram) -> SimulatedStep:
    return simulate_step(program, found.params, found.buffers, found.inputs, SEED)


def gradient_error(grads: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """The worst max|g - g0| / max(max|g0|, 1e-5 of the largest gradient) of any parameter.

    Gradients that are zero in theory (a key bias) carry the rounding of the largest ones.

    Raises:
        AssertionError: a gradient is there on one side alone.
    """
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    worst = 0.0
    for name, true in expected.items():
        grad = grads.get(name)
        if true is None or not true.any():
            assert grad is None or not grad.any(), f"{name}: a gradient where there is none"
            continue
        assert grad is not None, f"{name}: no gradient"
        assert grad.shape == true.shape, f"{name}: {grad.shape} against {true.shape}"
        scale = max(float(true.abs().max()), 1e-5 * largest)
        worst = max(worst, float((grad - true).abs().max()) / scale)
    return worst


def output_error(step: SimulatedStep, found: Case) -> float:
    """The worst relative difference of any output."""
    worst = 0.0
    for mine, true in zip(step.outputs, found.outputs, strict=True):
        if isinstance(true, Tensor) and true.is_floating_point():
            scale = float(true.abs().max()) or 1.0
            worst = max(worst, float((mine - true).abs().max()) / scale)
    return worst


def assert_parity(found: Case, tolerance: float = 1e-10, **options: Any) -> CompiledProgram:
    """Compile and compare; returns the compiled program for further checks."""
    program = compiled(found, **options)
    step = simulate(found, program)
    assert output_error(step, found) < tolerance
    assert gradient_error(step.grads, found.grads) < tolerance
    return program
