"""Dropout in whole models: the same masks on any number of ranks, however it is recomputed."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor

from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.dropout import dropout, dropout_mask
from sp_compiler.options import Dropout
from tests.helpers import parity
from tests.helpers.slow import slow

_P = 0.1
_MODES = ("regenerate", "stored")
_SETTINGS = [
    (1, "full", True),
    (2, "none", True),
    (2, "attention", True),
    (4, "selective", False),
    (4, "full", False),
]
_SLOW = ("plain", "bert", "t5", "encoder_seqfirst", "lora")
_MODELS = ["gpt2", *map(slow, _SLOW)]
# That kept masks are the drawn ones is compared for every model below.
_CASES = [
    # Norms behind the sublayers, and tokens first: the rest is compared below, on two ranks.
    *(slow(name, "regenerate") for name in ("bert", "encoder_seqfirst")),
    slow("gpt2", "stored"),
    ("gpt2", "regenerate"),
]


def _case(name: str, mode: str) -> parity.Case:
    # One layer has dropout in all places; that two draw other masks is seen in one of the models.
    return parity.case(name, 3, 13, _P, cast(Dropout, mode), layers=2 if name == "gpt2" else 1)


@pytest.mark.parametrize(("name", "mode"), _CASES)
def test_every_number_of_ranks_and_recompute(name: str, mode: str) -> None:
    """Attention with dropout inside (gpt2's fused one) becomes an explicit core."""
    found = _case(name, mode)
    for tp, recompute, sequence_parallel in _SETTINGS:
        program = parity.compiled_in_turn(
            found, tp=tp, recompute=recompute, sequence_parallel=sequence_parallel, dropout=mode
        )
        parity.assert_step(found, program)


@pytest.mark.parametrize("name", _MODELS)
def test_stored_masks_are_the_regenerated_ones(name: str) -> None:
    steps = []
    for mode in _MODES:
        found = _case(name, mode)
        steps.append(parity.simulate(found, parity.compiled(found, tp=2, dropout=mode)))
    regenerated, stored = steps
    assert parity.gradient_error(stored.grads, regenerated.grads) < 1e-12
    assert float((_loss(stored) - _loss(regenerated)).abs().max()) < 1e-12


def test_every_seed_has_its_own_masks() -> None:
    found = _case("gpt2", "regenerate")
    program = parity.compiled(found, tp=2)
    again, other = (parity.simulate(found, program, parity.SEED + shift) for shift in (0, 1))
    assert torch.equal(_loss(again), _loss(parity.simulate(found, program)))
    assert float((_loss(again) - _loss(other)).abs()) > 1e-3


def _loss(step: Any) -> Tensor:
    return next(item for item in step.outputs if isinstance(item, Tensor))


Mask = tuple[int, int, list[Tensor]]
"""Site, seed of the call, and what each rank keeps."""


def _masks(monkeypatch: pytest.MonkeyPatch, tp: int) -> list[Mask]:
    """Masks that a forward of gpt2 draws, in order."""
    found = parity.case("gpt2", 8, 32, _P)
    program = parity.compiled(found, tp=tp, recompute="none")
    drawn: list[Mask] = []

    def spy(
        self: Communicator, x: Tensor, seed: Tensor, p: float, site: int, dim: int, world_size: int
    ) -> Tensor:
        assert p == _P
        kept = dropout_mask(self, x, seed, p, site, dim, world_size)
        parts = kept._local_tensors if isinstance(kept, LocalTensor) else {0: kept}
        seeds = seed._local_tensors[0] if isinstance(seed, LocalTensor) else seed
        drawn.append((site, int(seeds), [parts[rank] for rank in sorted(parts)]))
        return dropout(self, x, seed, p, site, dim, world_size)

    monkeypatch.setattr(Communicator, "dropout", spy)
    parity.simulate(found, program)
    monkeypatch.undo()
    assert len(drawn) == 2 * (1 + 2 * 3)  # forward and backward of embedding and two blocks
    return drawn[: len(drawn) // 2]


@pytest.mark.slow
def test_masks_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right rate; independent between ranks, sites and layers; those of one rank, cut."""
    sharded, whole = _masks(monkeypatch, 2), _masks(monkeypatch, 1)
    assert len({(site, seed) for site, seed, _ in sharded}) == len(sharded)
    for (_, _, parts), (_, _, (kept,)) in zip(sharded, whole, strict=True):
        assert len(parts) == 2
        _assert_rate(kept)
        _assert_independent(*parts)
        if kept.dim() == 4:  # attention: heads are cut
            assert torch.equal(torch.cat(parts, 1), kept)
        else:  # rows of tokens are
            assert torch.equal(torch.cat(parts), kept.flatten(0, 1))
    same_shape = [kept.flatten() for _, _, (kept,) in whole if kept.dim() == 3]
    for number, first in enumerate(same_shape):
        for second in same_shape[:number]:
            _assert_independent(first, second)


def _assert_rate(kept: Tensor) -> None:
    """Within five standard deviations."""
    count = kept.numel()
    dropped = count - int(kept.sum())
    assert abs(dropped - _P * count) < 5 * math.sqrt(count * _P * (1 - _P))


def _assert_independent(first: Tensor, second: Tensor) -> None:
    """As many elements are dropped in both as chance has it."""
    both = int((~first & ~second).sum())
    expected = first.numel() * _P * _P
    assert abs(both - expected) < 5 * math.sqrt(expected)
