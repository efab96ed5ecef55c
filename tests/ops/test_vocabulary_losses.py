"""Losses with weights and smoothed labels, and logsumexp, against those of torch on one device."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compiler.base.placement import I, Placement, R, S
from sp_compiler.cost.node_cost import node_collectives
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import Collective
from sp_compiler.ops.vocabulary_losses import (
    VOCAB_LOGSUMEXP,
    VOCAB_LOGSUMEXP_BACKWARD,
    VOCAB_SMOOTHED_NLL,
    VOCAB_SMOOTHED_NLL_BACKWARD,
    vocab_smoothed_nll,
)
from tests.helpers.own_operators import Case, assert_registered, assert_right, node_of

_GENERATOR = torch.Generator().manual_seed(0)
_IGNORED = -100
_TARGET = torch.tensor([0, 6, _IGNORED, 3, 6])
_RANKS = pytest.mark.parametrize("world_size", [1, 2, 4])
_CLASSES = pytest.mark.parametrize("classes", [8, 7])


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=_GENERATOR)


def _columns(dim: int, classes: int, world_size: int) -> Placement:
    """Seven columns are padded to eight."""
    return S(dim, (classes,)) if classes % world_size else S(dim)


@_RANKS
@_CLASSES
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_loss(world_size: int, classes: int, smoothing: float) -> None:
    weight = _randn(classes).abs()

    def dense(logits: Tensor, target: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(
            logits, target, weight, reduction="none", label_smoothing=smoothing
        )
        return losses, logits.detach().logsumexp(-1)

    columns = _columns(1, classes, world_size)
    inputs = [10 * _randn(5, classes), _TARGET, weight]
    rest = (_IGNORED, classes, smoothing, world_size)
    case = Case(VOCAB_SMOOTHED_NLL, dense, inputs, rest, (columns, R, R), (I, I))
    assert_right(case, world_size)


@_RANKS
def test_weighed_loss_of_forbidden_classes(world_size: int) -> None:
    """Logits of minus infinity: no NaN where nothing is smoothed."""
    logits = _randn(5, 8)
    logits[:, 1:3] = -math.inf
    weight = _randn(8).abs()

    def dense(logits: Tensor, target: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(logits, target, weight, reduction="none")
        return losses, logits.detach().logsumexp(-1)

    rest = (_IGNORED, 8, 0.0, world_size)
    inputs = [logits, _TARGET, weight]
    case = Case(VOCAB_SMOOTHED_NLL, dense, inputs, rest, (S(1), R, R), (I, I))
    assert_right(case, world_size)


@_RANKS
def test_gradient_of_loss(world_size: int) -> None:
    logits, weight = _randn(5, 8), _randn(8).abs()

    def dense(grad: Tensor, logits: Tensor, target: Tensor, *_: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        losses = F.cross_entropy(leaf, target, weight, reduction="none", label_smoothing=0.1)
        (result,) = torch.autograd.grad(losses, leaf, grad.detach())
        return result

    inputs = [_randn(5), logits, _TARGET.clamp(min=0), weight, logits.logsumexp(-1)]
    rest = (8, 0.1, world_size)
    places = (R, S(1), R, R, R)
    case = Case(VOCAB_SMOOTHED_NLL_BACKWARD, dense, inputs, rest, places, (S(1),))
    assert_right(case, world_size)


@_RANKS
@_CLASSES
def test_logsumexp_of_rows_without_any_class(world_size: int, classes: int) -> None:
    logits = 10 * _randn(3, classes)
    logits[0] = -torch.inf
    logits[1, :2] = -torch.inf
    case = Case(
        VOCAB_LOGSUMEXP,
        lambda x: x.logsumexp(-1),
        [logits],
        (classes, world_size),
        (_columns(1, classes, world_size),),
        (I,),
    )
    assert_right(case, world_size)


@_RANKS
@_CLASSES
@pytest.mark.parametrize("leading", [(5,), (2, 3), ()])
def test_logsumexp(world_size: int, classes: int, leading: tuple[int, ...]) -> None:
    columns = _columns(len(leading), classes, world_size)
    inputs = [10 * _randn(*leading, classes)]
    case = Case(
        VOCAB_LOGSUMEXP, lambda x: x.logsumexp(-1), inputs, (classes, world_size), (columns,), (I,)
    )
    assert_right(case, world_size)


@_RANKS
def test_gradient_of_logsumexp(world_size: int) -> None:
    logits = _randn(2, 3, 8)
    inputs = [_randn(2, 3), logits, logits.logsumexp(-1)]

    def dense(grad: Tensor, logits: Tensor, _: Tensor) -> Tensor:
        return (grad.unsqueeze(-1) * logits.softmax(-1)).detach()

    places = (R, S(2), R)
    case = Case(VOCAB_LOGSUMEXP_BACKWARD, dense, inputs, (8, world_size), places, (S(2),))
    assert_right(case, world_size)


def test_registered() -> None:
    logits, weight = _randn(5, 8).requires_grad_(), _randn(8).abs()
    assert_registered(VOCAB_SMOOTHED_NLL, logits, _TARGET, weight, _IGNORED, 8, 0.1, 1)
    assert_registered(VOCAB_LOGSUMEXP, logits, 8, 1)
    logits = logits.detach()
    logsumexp, target = logits.logsumexp(-1), _TARGET.clamp(min=0)
    saved = (logits, target, weight, logsumexp)
    assert_registered(VOCAB_SMOOTHED_NLL_BACKWARD, _randn(5), *saved, 8, 0.1, 1)
    assert_registered(VOCAB_LOGSUMEXP_BACKWARD, _randn(5), logits, logsumexp, 8, 1)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_targets_outside_of_the_vocabulary_are_refused(wrong: int) -> None:
    target = torch.tensor([0, wrong])
    with pytest.raises(IndexError, match=f"index {wrong} is out of range for a loss over 8"):
        vocab_smoothed_nll(
            Communicator(None, 1, 2), _randn(2, 5), target, _randn(8), _IGNORED, 8, 0.1
        )


def test_two_small_reductions_are_costed() -> None:
    """One of n numbers, one of 3 n or n."""
    rest = (_IGNORED, 8, 0.1, 2)
    node = node_of(VOCAB_SMOOTHED_NLL, [_randn(5, 4), _TARGET, _randn(8)], rest)
    assert node_collectives(node) == [Collective("all_reduce", 2, 4 * 5 * 8)]
    node = node_of(VOCAB_LOGSUMEXP, [_randn(5, 4)], (8, 2))
    assert node_collectives(node) == [Collective("all_reduce", 2, 2 * 5 * 8)]
