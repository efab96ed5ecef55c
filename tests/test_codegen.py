"""The generated code: it computes what the region computes, and reads as it should."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from sp_compiler.passes.compile_region import compile_region
from sp_compiler.passes.recompute import Policy
from sp_compiler.program import Region
from tests.regions import TP1, gpt_region, random_inputs, reference

POLICIES = get_args(Policy)
F64 = torch.float64
BLOCKS = {
    "paper": {},
    "stored masks": {"masks": "stored"},
    "regenerated masks": {"masks": "regenerate"},
    "fused attention": {"attention": "fused"},
}


def check_against_autograd(region: Region, policy: Policy, tolerance: float = 1e-12) -> None:
    """Emitted outputs and gradients equal those of autograd on the region's own graph."""
    compiled = compile_region(region, recompute=policy)
    inputs = random_inputs(region)
    expected = reference(region, inputs)
    outputs, saved = compiled.code.forward(TP1, *[x.detach() for x in inputs])
    torch.testing.assert_close(outputs, tuple(x.detach() for x in expected), rtol=0, atol=tolerance)

    used = [x for x, flows in zip(expected, compiled.differentiable, strict=True) if flows]
    tangents = [torch.randn(x.shape, dtype=x.dtype) for x in used]
    grads = compiled.code.backward(TP1, saved, *tangents)
    wanted = [x for x in inputs if x.requires_grad]
    expected_grads = iter(torch.autograd.grad(used, wanted, tangents, allow_unused=True))
    for x, grad in zip(inputs, grads, strict=True):
        reference_grad = next(expected_grads) if x.requires_grad else None
        if reference_grad is None:
            assert grad is None or not grad.any()
        else:
            scale = reference_grad.abs().max().item() + 1e-3
            torch.testing.assert_close(grad, reference_grad, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_gpt_block_equals_autograd(block: str, policy: Policy) -> None:
    region = gpt_region(2, 8, 32, 4, dtype=F64, **BLOCKS[block])
    check_against_autograd(region, policy)
