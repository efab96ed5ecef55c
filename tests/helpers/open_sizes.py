"""Programs that leave the sizes of their inputs open, and what they must be right for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.options import CompileOptions
from sp_compiler.trace.export import flatten_inputs
from tests.helpers import parity

EXAMPLE = (2, 12)
# Dividing and not, equal sizes, sizes that are those of the model (8 and 32), one row a rank.
OTHERS = ((2, 16), (3, 17), (4, 4), (8, 8), (5, 7), (2, 32))


def open_program(model: nn.Module, kwargs: dict[str, Any], **options: Any) -> CompiledProgram:
    found = build(model, (), kwargs, CompileOptions(**options), lift_casts=True, open_dims=True)
    assert found.program.sizes is not None, found.plan.notes
    return found


def reason(program: CompiledProgram, kwargs: dict[str, Any]) -> str | None:
    assert program.program.sizes is not None
    return program.program.sizes.rejection(flatten_inputs((), kwargs)[0])


def assert_right(program: CompiledProgram, model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Against the model captured for exactly these inputs."""
    assert reason(program, kwargs) is None
    found = parity.make_case(model, kwargs)
    step = parity.simulate(found, program)
    assert parity.output_error(step, found) < 1e-10
    assert parity.gradient_error(step.grads, found.grads) < 1e-10


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randn(
        batch, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seq)
    )
