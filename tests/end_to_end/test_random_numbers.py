"""Random numbers in whole models: the same on any number of ranks, however they are recomputed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.ir.fx import calls
from sp_compiler.ops.uniform import UNIFORM
from tests.helpers import parity
from tests.helpers.slow import slow


def _drop_path(x: Tensor, p: float) -> Tensor:
    """Stochastic depth as timm writes it: the branch of some samples is left out."""
    kept = x.new_empty((x.shape[0], *[1] * (x.dim() - 1))).bernoulli_(1 - p)
    return x * kept.div_(1 - p)


class _Block(nn.Module):
    """Jitter of the router's input, noise on the gate, stochastic depth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y * torch.empty_like(y).uniform_(0.9, 1.1)
        gate = F.gumbel_softmax(self.gate(y), tau=2.0)[..., :1]
        z = F.gelu(self.up(y))
        z = z + 0.1 * torch.randn_like(z)
        return x + _drop_path(gate * self.down(z), 0.3)


class _Noisy(nn.Module):
    """Labels of some samples dropped, as diffusion transformers do, and sampled tokens."""

    def __init__(self, width: int = 12, classes: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        dropped = torch.rand(ids.shape[0], device=ids.device) < 0.3
        noise = torch.randint(0, 24, ids.shape, device=ids.device)
        x = self.tokens(torch.where(dropped[:, None], noise, ids))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        sampled = torch.multinomial(logits.detach().softmax(-1), 1)
        policy = logits.log_softmax(-1).gather(-1, sampled).mean()
        return F.cross_entropy(logits, labels.flatten()) - 0.1 * policy


@functools.cache
def _case() -> parity.Case:
    torch.manual_seed(0)
    ids = torch.randint(0, 24, (4, 6))
    return parity.make_case(_Noisy().double(), {"ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("tp", "recompute"),
    [
        (3, "full"),
        slow(2, "selective"),
        slow(1, "full"),
        slow(4, "none"),
        slow(4, "attention"),
    ],
)
def test_every_number_of_ranks_and_recompute(tp: int, recompute: str) -> None:
    """Recomputed random numbers would differ from forward's, were they drawn again."""
    parity.assert_parity(_case(), tp=tp, recompute=recompute)


@pytest.mark.slow
def test_verify_gives_both_sides_the_same_numbers() -> None:
    """They are drawn in eval mode too, where ``verify`` compares with the model itself."""
    ids = torch.randint(0, 24, (4, 6))
    report = sp_compiler.verify(_Noisy(), ((), {"ids": ids, "labels": ids}), tp=2)
    assert report.ok, str(report)
    assert [row.stage for row in report.table[:3]] == ["export", "normalize", "shard"]


def test_a_rank_draws_its_own_part() -> None:
    """Of rows of tokens beside a norm, of columns inside the MLP."""
    program = parity.compiled(_case(), tp=2)
    (block,) = {call.region.name: call.region for call in program.program.calls[1:2]}.values()
    drawn = [node.meta["placement"] for node in calls(block.module.graph, UNIFORM.overload)]
    assert {str(placement) for placement in drawn} >= {"S(0)", "S(2)"}


def test_every_seed_has_its_own_numbers() -> None:
    program = parity.compiled(_case(), tp=2)
    losses = [parity.simulate(_case(), program, parity.SEED + shift).outputs[0] for shift in (0, 1)]
    assert abs(float(losses[0] - losses[1])) > 1e-4
