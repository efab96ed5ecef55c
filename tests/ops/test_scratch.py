"""Temporary memory of kernels is what their records say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.measure import PeakRecorder
from sp_compiler.ir.fx import arguments
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.convert import CONVERT
from sp_compiler.ops.dropout import DROPOUT, DROPOUT_MASK
from sp_compiler.ops.registry import Operator
from sp_compiler.ops.uniform import UNIFORM
from sp_compiler.ops.vocabulary import (
    VOCAB_EMBEDDING,
    VOCAB_EMBEDDING_BACKWARD,
    VOCAB_NLL,
    VOCAB_NLL_BACKWARD,
)
from sp_compiler.ops.vocabulary_losses import (
    VOCAB_LOGSUMEXP,
    VOCAB_LOGSUMEXP_BACKWARD,
    VOCAB_SMOOTHED_NLL,
    VOCAB_SMOOTHED_NLL_BACKWARD,
)
from tests.helpers.fake_group import fake_group
from tests.helpers.own_operators import node_of

_ROWS, _WIDTH, _CLASSES = 64, 96, 500
_IDS = torch.arange(_ROWS)
_LOGITS, _PER_ROW = torch.zeros(_ROWS, _CLASSES), torch.ones(_ROWS)
_WEIGHTS = torch.ones(_CLASSES)


@pytest.mark.parametrize(
    ("operator", "tensors", "rest"),
    [
        (VOCAB_EMBEDDING, [torch.zeros(_CLASSES, _WIDTH), _IDS], (_CLASSES,)),
        (VOCAB_EMBEDDING_BACKWARD, [torch.zeros(_ROWS, _WIDTH), _IDS], (_CLASSES,)),
        (VOCAB_NLL, [_LOGITS, _IDS], (-100, _CLASSES)),
        (VOCAB_NLL_BACKWARD, [_PER_ROW, _LOGITS, _IDS, _PER_ROW], (-100, _CLASSES)),
        (VOCAB_SMOOTHED_NLL, [_LOGITS, _IDS, _WEIGHTS], (-100, _CLASSES, 0.1)),
        (
            VOCAB_SMOOTHED_NLL_BACKWARD,
            [_PER_ROW, _LOGITS, _IDS, _WEIGHTS, _PER_ROW],
            (_CLASSES, 0.1),
        ),
        (VOCAB_LOGSUMEXP, [_LOGITS], (_CLASSES,)),
        (VOCAB_LOGSUMEXP_BACKWARD, [_PER_ROW, _LOGITS, _PER_ROW], (_CLASSES,)),
    ],
    ids=lambda value: value.name if isinstance(value, Operator) else "",
)
def test_scratch(operator: Operator, tensors: list[Tensor], rest: tuple[Any, ...]) -> None:
    """To within a few numbers for each row: those are not declared."""
    node = node_of(operator, tensors, (*rest, 1))
    declared = operator.scratch_bytes(arguments(node), node.meta["val"])
    with PeakRecorder() as recorder:
        result = operator.kernel(Communicator(None, 0, 1), *tensors, *rest)
    peak = recorder.peak_bytes(excluding=tensors)
    returned = sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(result))
    assert 0 <= peak - returned - declared <= 64 * _ROWS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(_ROWS, _WIDTH), (10 * _ROWS, _CLASSES)])
def test_scratch_of_random_numbers(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Of one block, and of a size that has several."""
    rest = ([*size], dtype, 0, 0, 1)
    seed = torch.tensor(3)
    node = node_of(UNIFORM, [seed], rest)
    declared = UNIFORM.scratch_bytes(arguments(node), node.meta["val"])
    with PeakRecorder() as recorder:
        result = UNIFORM.kernel(Communicator(None, 0, 1), seed, *rest)
    assert recorder.peak_bytes(excluding=[seed]) == result.nbytes + declared


@pytest.mark.parametrize("operator", [DROPOUT, DROPOUT_MASK], ids=lambda x: x.name)
@pytest.mark.parametrize(
    "x",
    [
        torch.ones(_ROWS, _WIDTH),
        torch.ones(_WIDTH, _ROWS).t(),  # the result is transposed, too
        torch.ones(_ROWS, 2 * _WIDTH).chunk(2, 1)[1],  # the result is contiguous
    ],
    ids=["contiguous", "transposed", "columns"],
)
def test_scratch_of_dropout(operator: Operator, x: Tensor) -> None:
    seed, rest = torch.tensor(3), (0.1, 0, 0, 1)
    node = node_of(operator, [x, seed], rest)
    node.all_input_nodes[0].meta["val"] = x  # in its own layout
    with PeakRecorder() as recorder:
        result = operator.kernel(Communicator(None, 0, 1), x, seed, *rest)
    declared = operator.scratch_bytes(arguments(node), result)
    assert recorder.peak_bytes(excluding=[x, seed]) == result.nbytes + declared


@pytest.mark.parametrize(
    ("local", "src", "dst"),
    [
        ((8, 12), "S(0)", "R"),
        ((8, 12), "S(1)", "R"),
        ((8, 12), "S(1|23)", "I"),
        ((8, 12), "S(1|16,8)", "R"),
        ((8, 12), "S(0|12,4)", "R"),
        ((16, 12), "P", "S(0)"),
        ((16, 12), "P", "S(1)"),
        ((16, 12), "P", "S(1|8,4)"),
        ((15, 12), "P", "S(0|15)"),
        ((16, 11), "P", "S(1|11)"),
        ((16, 12), "R", "S(1)"),
        ((16, 11), "R", "S(1|11)"),
        ((16, 12), "R", "S(1|8,4)"),
        ((16, 12), "S(1)", "P"),
        ((16, 12), "S(1|23)", "P"),
        ((16, 12), "S(1|16,8)", "P"),
    ],
)
def test_scratch_of_conversions(local: tuple[int, ...], src: str, dst: str) -> None:
    """Padding and all; but for a few numbers that tell which part is a rank's own."""
    x = torch.zeros(local)
    node = node_of(CONVERT, [x], (src, dst, 2))
    declared = CONVERT.scratch_bytes(arguments(node), node.meta["val"])
    with fake_group(2), PeakRecorder() as recorder:
        result = CONVERT.kernel(Communicator(dist.group.WORLD, 0, 2), x, src, dst)
    peak = recorder.peak_bytes(excluding=[x])
    assert result.untyped_storage().nbytes() == node.meta["val"].nbytes
    assert 0 <= peak - declared - node.meta["val"].nbytes <= 32
