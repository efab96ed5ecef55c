"""Experts divided over ranks, in one program for all sizes of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from tests.helpers import expert_models, expert_ranks
from tests.helpers.expert_models import Grouped, Picked


@pytest.mark.parametrize("make", [Picked, Grouped])
def test_one_program_serves_other_sizes(make: Callable[[], nn.Module]) -> None:
    model = expert_models.model(make)
    options = replace(CompileOptions.of(1, {}), ep=2)
    example, *_ = expert_models.batches(1)
    program = build(model, (), dict(example), options, open_dims=True)
    assert program.program.sizes is not None, program.plan.notes
    for rows, length in ((3, 4), (2, 7), (5, 3)):
        batches = expert_models.batches(2, rows, length)
        losses, grads = expert_ranks.step(program, model, batches)
        true_losses, true_grads = expert_ranks.truth(model, batches)
        torch.testing.assert_close(losses, true_losses, rtol=1e-12, atol=0)
        largest = max(float(grad.abs().max()) for grad in true_grads.values())
        for name, grad in grads.items():
            error = float((grad - true_grads[name]).abs().max())
            assert error < 1e-12 * largest, name
