"""A model for ``torch.compile`` with this backend, and one step of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sp_compiler.torch_compile.backend import sp_compiler_backend
from tests.models import zoo

HIDDEN = 8


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Two blocks, a buffer that counts the calls, and what a test switches on."""

    num_calls: Tensor

    def __init__(self, p: float = 0.0, breaks: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, HIDDEN)
        self.blocks = nn.ModuleList([Block(p), Block(p)])
        self.head = nn.Linear(HIDDEN, 16, bias=False)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.breaks = breaks
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def counting_net(**kwargs: Any) -> Any:
    torch.manual_seed(2)
    return Net(**kwargs).double()


def random_ids(batch: int = 2, seq: int = 4) -> Tensor:
    return torch.randint(0, 16, (batch, seq), generator=torch.Generator().manual_seed(1))


def compiled_by_dynamo(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=sp_compiler_backend, options={"tp": 1, **options})


def loss_and_gradients(
    model: nn.Module, call: Any, *args: Any, **kwargs: Any
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients, whole ones, of one forward and backward of ``call``."""
    model.zero_grad()
    loss = zoo.loss_of(call(*args, **kwargs))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}
