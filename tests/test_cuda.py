"""Tests that need a GPU; without one all are skipped, and say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sp_compiler
from benchmarks import gpu
from benchmarks.measure import loss_of
from tests.helpers import host_memory
from tests.models import zoo

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


@pytest.mark.parametrize("name", ["gpt2", "llama", "plain"])
def test_replayed_steps_have_the_same_bits(name: str) -> None:
    """Losses and parameters after some steps, the recorder of tests/runtime put to the truth."""
    plain, replayed = (_train(name, cuda_graphs=on) for on in (False, True))
    assert replayed[0] == plain[0]
    for parameter, value in plain[1].items():
        assert torch.equal(replayed[1][parameter], value), parameter


def _train(name: str, *, cuda_graphs: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = zoo.build(name, layers=2, dropout=0.1, dtype=torch.float32).cuda()
    module: Any = sp_compiler.compile(model, tp=1, cuda_graphs=cuda_graphs)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(7)
    losses = []
    # Backwards of the other kernels add in any order.
    with sdpa_kernel(SDPBackend.MATH):
        for step in range(8):
            # Two batches a step, the last of another length.
            for seed, length in ((2 * step, 12), (2 * step + 1, 12 + 4 * (step == 7))):
                inputs = {
                    key: value.cuda() for key, value in zoo.inputs(name, 2, length, seed).items()
                }
                loss = loss_of(module(**inputs))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, {key: value.detach().clone() for key, value in module.named_parameters()}
