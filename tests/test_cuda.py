"""Tests that need a GPU; without one all are skipped, and say so."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu
from tests.helpers import host_memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def test_plans_of_memory_hold() -> None:
    for row in gpu.memory("cuda", gpu.SMALL):
        assert row.kept_recorded == row.kept_planned, row
        assert row.peak_recorded == pytest.approx(row.peak_planned, rel=0.03), row
        assert row.peak_allocated is not None
        # Workspaces of libraries come on top, and none of the operators' own is missing.
        assert row.peak_allocated >= row.peak_with_gradients, row


def test_tensors_on_the_host_change_no_bit() -> None:
    """Copies on a stream of their own, there and back, against a step that keeps everything."""
    kept, offloaded = (host_memory.step("cuda", offload) for offload in (False, True))
    assert kept.keys() == offloaded.keys()
    for name, grad in kept.items():
        assert torch.equal(grad, offloaded[name]), name


def test_numbers_are_those_of_the_cpu() -> None:
    for row in gpu.numbers("cuda", gpu.SMALL):
        assert max(row.loss_error, row.gradient_error) < 1e-4, row
