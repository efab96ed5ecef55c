"""Vocabulary-parallel lookups and losses against those of torch on one device."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compiler.base.placement import I, P, R, S
from sp_compiler.cost.node_cost import node_collectives
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Collective
from sp_compiler.ops.vocabulary import (
    VOCAB_EMBEDDING,
    VOCAB_EMBEDDING_BACKWARD,
    VOCAB_NLL,
    VOCAB_NLL_BACKWARD,
    vocab_embedding,
    vocab_nll,
)
from tests.helpers.own_operators import Case, assert_registered, assert_right, node_of

_GENERATOR = torch.Generator().manual_seed(0)
_IGNORED = -100
_IDS = torch.tensor([[0, 6, 3], [2, 2, 5]])
_TARGET = torch.tensor([0, 6, _IGNORED, 3, 6])


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=_GENERATOR)


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_embedding(world_size: int, rows: int) -> None:
    """Seven rows are padded to eight."""
    table = S(0, (rows,)) if rows % world_size else S(0)
    inputs = [_randn(rows, 3), _IDS]
    case = Case(
        VOCAB_EMBEDDING,
        lambda weight, ids: F.embedding(ids, weight),
        inputs,
        (rows, world_size),
        (table, R),
        (P,),
    )
    assert_right(case, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradient_of_embedding(world_size: int) -> None:
    def dense(grad: Tensor, ids: Tensor) -> Tensor:
        weight = torch.zeros(8, 3, dtype=torch.float64, requires_grad=True)
        (result,) = torch.autograd.grad(F.embedding(ids, weight), weight, grad.detach())
        return result

    rest = (8 // world_size, world_size)
    inputs = [_randn(2, 3, 3), _IDS]
    case = Case(VOCAB_EMBEDDING_BACKWARD, dense, inputs, rest, (R, R), (S(0),))
    assert_right(case, world_size)


def _losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    nll = F.cross_entropy(logits, target, ignore_index=_IGNORED, reduction="none")
    return nll, logits.detach().logsumexp(-1)


@pytest.mark.parametrize("classes", [8, 7])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss(world_size: int, classes: int) -> None:
    """Of padded columns, which may hold anything, nothing is seen."""
    columns = S(1, (classes,)) if classes % world_size else S(1)
    inputs = [10 * _randn(5, classes), _TARGET]
    rest = (_IGNORED, classes, world_size)
    assert_right(Case(VOCAB_NLL, _losses, inputs, rest, (columns, R), (I, I)), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_of_forbidden_classes(world_size: int) -> None:
    """Logits of minus infinity, on all of a rank or some: no NaN, not even in gradients."""
    logits = _randn(5, 8)
    logits[:, 1:3] = -math.inf
    logits[:, 4:6] = -math.inf
    rest = (_IGNORED, 8, world_size)
    assert_right(Case(VOCAB_NLL, _losses, [logits, _TARGET], rest, (S(1), R), (I, I)), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradient_of_loss(world_size: int) -> None:
    def dense(grad: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor) -> Tensor:
        known = target != _IGNORED
        onehot = F.one_hot(target.where(known, 0), 8)
        return ((logits.softmax(-1) - onehot) * (grad * known).unsqueeze(-1)).detach()

    logits = _randn(5, 8)
    inputs = [_randn(5), logits, _TARGET, logits.logsumexp(-1)]
    rest = (_IGNORED, 8, world_size)
    case = Case(VOCAB_NLL_BACKWARD, dense, inputs, rest, (R, S(1), R, R), (S(1),))
    assert_right(case, world_size)


def test_registered() -> None:
    table, logits = _randn(8, 3).requires_grad_(), _randn(5, 8).requires_grad_()
    assert_registered(VOCAB_EMBEDDING, table, _IDS, 8, 1)
    assert_registered(VOCAB_EMBEDDING_BACKWARD, _randn(2, 3, 3), _IDS, 8, 1)
    assert_registered(VOCAB_NLL, logits, _TARGET, _IGNORED, 8, 1)
    logits = logits.detach()
    saved = (logits, _TARGET, logits.logsumexp(-1))
    assert_registered(VOCAB_NLL_BACKWARD, _randn(5), *saved, _IGNORED, 8, 1)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_ids_outside_of_the_vocabulary_are_refused(wrong: int) -> None:
    """Also where they fall in another rank's part, or in the padding."""
    ids = torch.tensor([0, wrong])
    tp = Communicator(None, 1, 2)
    with pytest.raises(IndexError, match=f"index {wrong} is out of range for an embedding of 8"):
        vocab_embedding(tp, _randn(5, 3), ids, 8)
    with pytest.raises(IndexError, match=f"index {wrong} is out of range for a loss over 8"):
        vocab_nll(tp, _randn(2, 5), ids, _IGNORED, 8)


def test_loss_is_costed_as_two_small_reductions() -> None:
    """One of n numbers, one of 2 n."""
    node = node_of(VOCAB_NLL, [_randn(5, 4), _TARGET], (_IGNORED, 8, 2))
    assert node_collectives(node) == [Collective("all_reduce", 2, 3 * 5 * 8)]
