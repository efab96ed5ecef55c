"""Lookups and losses over a vocabulary: sharded where they can be, else the plan says why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler.ir.fx import calls
from sp_compiler.passes.sharding.reasons import why_replicated
from sp_compiler.rules.vocabulary import vocabulary_obstacle, vocabulary_strategies
from sp_compiler.verification.simulate import simulated_ranks
from tests.helpers import parity
from tests.helpers.normalized import normalized, randn
from tests.helpers.one_operator import compiled_step, join, lower, scatter
from tests.helpers.operator_call import Call, Whole, offered

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
aten = torch.ops.aten

_IDS = torch.tensor([1, 0, 3])
_WEIGHTS = randn(8)
_CASES: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...], str]] = [
    (lambda x: F.cross_entropy(x, _IDS), (3, 8), ""),
    (lambda x: F.cross_entropy(x, _IDS, ignore_index=0), (3, 8), ""),
    (lambda x: F.cross_entropy(x, _IDS), (3, 7), ""),
    (lambda x: F.cross_entropy(x, _IDS, label_smoothing=0.1), (3, 8), ""),
    (lambda x: F.cross_entropy(x, _IDS, weight=_WEIGHTS), (3, 8), ""),
    (lambda x: F.cross_entropy(x, _IDS[None]), (1, 8, 3), ""),
    (lambda x: F.cross_entropy(x, _IDS[0]), (8,), "its logits have 1 dims"),
    (lambda x: F.embedding(_IDS, x), (8, 4), ""),
    (lambda x: F.embedding(_IDS, x), (7, 4), ""),
    (lambda x: F.embedding(_IDS, x, scale_grad_by_freq=True), (8, 4), "it scales gradients"),
]


@pytest.mark.parametrize(("function", "size", "why"), _CASES)
def test_why_a_vocabulary_is_replicated(
    function: Callable[[Tensor], Tensor], size: tuple[int, ...], why: str
) -> None:
    graph = normalized(function, randn(*size, grad=True)).module.graph
    (node,) = calls(graph, aten.cross_entropy_loss.default, aten.embedding.default)
    assert vocabulary_obstacle(node).startswith(why)
    assert bool(vocabulary_obstacle(node)) == bool(why)
    assert len(vocabulary_strategies(node, 2, lambda dim: True)) == (not why)
    if why:
        text = why_replicated(node, None, (node.all_input_nodes[0], 0), 1, 2)
        assert f"runs replicated: {why}" in text


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x)[0], _IDS[0])


def test_a_plan_does_not_blame_a_missing_rule() -> None:
    plan = sp_compiler.plan(_Head(), ((randn(3, 8).float(),), {}), tp=2)
    (line,) = [line for line in plan.fallbacks if "cross_entropy" in line]
    assert "return F.cross_entropy(self.head(x)[0], _IDS[0])" in line
    assert line.endswith("its logits have 1 dims, and only rows of logits are sharded by class")


class _ClassesFirst(nn.Module):
    """Logits as ``torch.nn`` documents them for sequences: classes in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


def test_classes_first_are_sharded() -> None:
    model = _ClassesFirst().double()
    labels = torch.tensor([[1, 63, 32], [-100, 0, 31]])
    compiled = parity.assert_parity(
        parity.make_case(model, {"x": randn(2, 3, 8), "labels": labels}), tp=2
    )
    assert compiled.param_placements["head.weight"].is_sharded
    nodes = [node for region in compiled.program.regions for node in region.module.graph.nodes]
    assert any(node.target is torch.ops.sp_compiler.vocab_nll.default for node in nodes)


def test_the_losses_of_many_rows_are_summed_in_float32() -> None:
    """Each is small; in float16 their sum would be inf."""
    logits = torch.linspace(-1, 1, 4 * 65536).view(-1, 4).half()
    target = torch.arange(len(logits)) % 2
    exact = logits.float().requires_grad_()
    expected = F.cross_entropy(exact, target)
    (4096 * expected).backward()
    whole = Whole.of(Call(aten.cross_entropy_loss.default, (logits, target), {}))
    (way,) = [way for way in offered(whole, 2) if way.lowering == "vocabulary"]
    run, generator = compiled_step(lower(whole, way, 2), 2), torch.Generator()
    operands = zip(whole.inputs, way.operands, strict=True)
    parts = [scatter(x, placement, 2, generator) for x, placement in operands]
    scale = scatter(torch.tensor(4096.0).half(), way.results[0], 2, generator)
    with simulated_ranks(2) as tp:
        (loss,), (grad, _) = run(tp, parts, [scale])
    for actual, true, where in (
        (loss, expected, way.results[0]),
        (grad, exact.grad, way.operands[0]),
    ):
        assert true is not None
        found = join(actual, where, tuple(true.shape))
        torch.testing.assert_close(found, true.detach().half(), rtol=5e-3, atol=1e-4)
