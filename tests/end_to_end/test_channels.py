"""Operators on images and bags between two projections: sharded by channels with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.base.placement import Placement, S
from tests.helpers import parity
from tests.helpers.open_sizes import assert_right, open_program

pytestmark = pytest.mark.slow


class Images(nn.Module):
    """Two convolutions of one pixel, between which nothing mixes channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(24, 48, 1), nn.ConvTranspose2d(48, 24, 1)
        self.norm = nn.BatchNorm2d(48).eval()
        self.slopes = nn.Parameter(torch.rand(48))

    def forward(self, x: Tensor) -> Tensor:
        h = F.prelu(self.norm(self.up(x)), self.slopes)
        h = F.max_pool2d(F.pad(h, (1, 1, 1, 1), mode="reflect"), 2)
        h = F.avg_pool2d(F.interpolate(h, scale_factor=2, mode="bilinear"), 2)
        patches = F.unfold(h, 2, stride=1)
        h = h * F.adaptive_avg_pool2d(h, 1) + patches.cumprod(-1).mean((1, 2))[:, None, None, None]
        return self.down(h).square().mean()


class Bags(nn.Module):
    """Categories as sums of rows, and the distances of heads of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(30, 96, mode="sum")
        self.near, self.far, self.out = nn.Linear(96, 96), nn.Linear(96, 96), nn.Linear(12, 12)

    def forward(self, ids: Tensor, factors: Tensor) -> Tensor:
        rows = self.bags(ids, per_sample_weights=factors)
        ends = torch.arange(0, ids.numel() + 1, ids.shape[1])
        last = F.embedding_bag(ids.flatten(), self.bags.weight, ends, include_last_offset=True)
        rows = rows + last
        near, far = (
            made(rows).unflatten(-1, (12, 8)).transpose(0, 1) for made in (self.near, self.far)
        )
        scores = torch.cdist(near, far).logcumsumexp(-1).prod(-1)
        return self.out(scores.transpose(0, 1)).square().mean()


class Wave(nn.Module):
    """Transposed convolutions whose inputs have as many channels as their results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.ConvTranspose1d(16, 16, 3), nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x))).square().mean()


def _wave(batch: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 16, 6, dtype=torch.float64)}


def _images(batch: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 24, 6, 8, dtype=torch.float64)}


def _bags(batch: int) -> dict[str, Any]:
    ids = torch.randint(0, 30, (batch, 5))
    return {"ids": ids, "factors": torch.rand(batch, 5, dtype=torch.float64)}


_CASES = [
    (Images, _images, "up.weight", S(0), 2),
    (Images, _images, "down.weight", S(1), 3),
    (Bags, _bags, "bags.weight", S(1), 4),
    (Wave, _wave, "up.weight", S(1), 2),
]


@pytest.mark.parametrize(("kind", "inputs", "name", "placement", "tp"), _CASES)
def test_channels_stay_sharded(
    kind: type[nn.Module], inputs: Any, name: str, placement: Placement, tp: int
) -> None:
    torch.manual_seed(0)
    case = parity.make_case(kind().double(), inputs(4))
    compiled = parity.compiled(case, tp=tp)
    assert not compiled.notes
    assert not compiled.replicated
    assert compiled.param_placements[name] == placement
    step = parity.simulate(case, compiled)
    assert parity.output_error(step, case) < 1e-10
    assert parity.gradient_error(step.grads, case.grads) < 1e-10


def test_bags_on_one_rank() -> None:
    """Without a gradient, torch returns the sizes of bags in another shape."""
    bags = nn.EmbeddingBag(6, 4, include_last_offset=True).double()
    call = torch.tensor([0, 5, 3]), torch.tensor([0, 1, 3])
    expected = bags(*call)
    (gradient,) = torch.autograd.grad(expected.square().sum(), bags.weight)
    module = sp_compiler.compile(bags, tp=1)
    rows = module(*call)
    torch.testing.assert_close(rows, expected)
    (found,) = torch.autograd.grad(rows.square().sum(), list(module.parameters()))
    torch.testing.assert_close(found, gradient)


def test_images_in_other_batches() -> None:
    torch.manual_seed(0)
    model = Images().double()
    program = open_program(model, _images(4), tp=2)
    for batch in (2, 5):
        assert_right(program, model, _images(batch))
