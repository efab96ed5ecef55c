"""Small models with experts, of which each of two layers chooses two of four for a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers.integrations.moe  # noqa: F401 - registers the grouped product for float64
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, WIDTH, EXPERTS = 6, 12, 4
product: Callable[..., Tensor] = torch.ops.transformers.grouped_mm_fallback


class Grouped(nn.Module):
    """Rows sorted by expert, as in transformers; ``bias`` picks a vector for each row."""

    def __init__(self, bias: bool = False, num_experts: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN) / 3)
        self.up_bias = nn.Parameter(torch.randn(num_experts, WIDTH)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(num_experts, HIDDEN)) if bias else None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, order = chosen.flatten().sort()
        counts = torch.histc(ids.double(), bins=len(self.up), min=0, max=len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        y = product(x[order // 2], self.up, ends)
        if self.up_bias is not None:
            y = y + self.up_bias[ids]
        y = product(F.gelu(y), self.down, ends)
        if self.down_bias is not None:
            y = y + self.down_bias[ids]
        y = (y * weights.flatten()[order, None])[order.argsort()]
        return y.view(*chosen.shape, -1).sum(1)


class Picked(Grouped):
    """A matrix picked for each row."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, rows = chosen.flatten(), x.repeat_interleave(2, 0)
        y = F.gelu(torch.bmm(rows.unsqueeze(1), self.up[ids]))
        y = torch.bmm(y, self.down[ids]).squeeze(1) * weights.flatten()[:, None]
        return y.view(*chosen.shape, -1).sum(1)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), experts

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


class Model(nn.Module):
    """An embedding, two layers of experts, a norm, a mean of squares."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(Layer(make()) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return (self.norm(x) * torch.arange(HIDDEN)).square().mean()


def model(make: Callable[[], nn.Module]) -> Model:
    """In float64."""
    torch.manual_seed(0)
    return Model(make).double()


def batches(count: int, rows: int = 3, length: int = 4) -> list[dict[str, Tensor]]:
    """One batch after the other."""
    generator = torch.Generator().manual_seed(1)
    return [{"ids": torch.randint(16, (rows, length), generator=generator)} for _ in range(count)]
