"""Losses over a vocabulary that is sharded, with divisible and padded classes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from sp_compiler.compiler import build
from sp_compiler.ir.text import render
from sp_compiler.options import CompileOptions
from sp_compiler.verification.simulate import simulate_step
from tests.helpers import parity
from tests.helpers.slow import slow

_WEIGHTS = torch.rand(512, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _weighed(logits: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
    weight, rows = _WEIGHTS[: logits.shape[-1]], logits.flatten(0, 1)
    return F.cross_entropy(rows, labels.flatten(), weight, ignore_index=3, label_smoothing=0.1)


def _smoothed(logits: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.2, reduction="none")
    return losses.square().mean()


def _soft(logits: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), soft.transpose(1, 2), label_smoothing=0.1)


def _negative_log_likelihood(logits: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
    log_probabilities = F.log_softmax(logits, -1)
    return F.nll_loss(log_probabilities.view(-1, logits.shape[-1]), labels.flatten())


def _divergence(logits: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
    return F.kl_div((logits / 2).log_softmax(-1), soft, reduction="batchmean")


def _router_penalty(logits: Tensor, labels: Tensor, soft: Tensor) -> Tensor:
    """A loss with the square of logsumexp, as PaLM has it."""
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return nll + 1e-2 * logits.logsumexp(-1, keepdim=True).square().mean()


_LOSSES: dict[Loss, str] = {
    _weighed: "vocab_smoothed_nll",
    _smoothed: "vocab_smoothed_nll",
    _soft: "vocab_logsumexp",
    _negative_log_likelihood: "vocab_nll",
    _divergence: "vocab_logsumexp",
    _router_penalty: "vocab_logsumexp",
}


class _Model(nn.Module):
    def __init__(self, loss: Loss, classes: int, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)
        self.loss = loss

    def forward(self, ids: Tensor, soft: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.down(F.gelu(self.up(x)))
        return self.loss(self.head(x), ids, soft)


@pytest.mark.parametrize(
    ("tp", "classes"),
    [(2, 512), *(slow(3, size) for size in (512, 511))],
)
@pytest.mark.parametrize("loss", _LOSSES)
def test_loss_and_gradients(loss: Loss, tp: int, classes: int) -> None:
    """Logits are never gathered: the loss is computed from each rank's classes."""
    torch.manual_seed(0)
    model = _Model(loss, classes).double()
    ids = torch.randint(0, classes, (2, 5))
    soft = torch.rand(2, 5, classes, dtype=torch.float64).softmax(-1)
    program = parity.assert_parity(parity.make_case(model, {"ids": ids, "soft": soft}), tp=tp)
    assert program.param_placements["head.weight"].is_sharded
    texts = [render(region.module.graph) for region in program.program.regions]
    assert any(_LOSSES[loss] in text for text in texts)


class _Sure(nn.Module):
    """Predicts its input with probabilities near 1: each logsumexp is nearly the label's logit."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss
        self.embedding, self.head = nn.Embedding(96, 24), nn.Linear(24, 96, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(1.3 * self.embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.head(self.embedding(ids)), ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        functools.partial(F.cross_entropy, label_smoothing=1e-3),
        lambda logits, ids: -(logits.log_softmax(-1) * F.one_hot(ids, 96)).sum(),
    ],
)
def test_losses_of_16_bits_are_as_true_as_in_eager(
    loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    """On sharded classes too a logsumexp has 32 bits until the label's logit is subtracted."""
    torch.manual_seed(0)
    model, ids = _Sure(loss).to(dtype), torch.arange(96)
    true, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    for each in (true, eager):
        each(ids).backward()
    compiled = build(model, (ids,), {}, CompileOptions(tp=2, hints={"head": Shard(0)}))
    assert compiled.param_placements["head.weight"].is_sharded
    step = simulate_step(compiled, dict(model.named_parameters()), {}, [ids], parity.SEED)
    grad, expected = step.grads["head.weight"], true.head.weight.grad
    assert step.outputs[0].dtype == dtype
    assert grad is not None
    assert expected is not None
    assert eager.head.weight.grad is not None
    error, allowed = (x.double() - expected for x in (grad, eager.head.weight.grad))
    assert float(error.norm()) < 1.5 * float(allowed.norm())
