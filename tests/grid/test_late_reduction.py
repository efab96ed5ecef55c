"""Partial gradients that FSDP leaves: summed once, and added to what was there before."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sp_compiler.grid.fully_sharded import _LateReduction
from sp_compiler.grid.same_gradients import SameGradients


def _record(grad: float | None) -> Any:
    """FSDP's record of a parameter, as far as it is read."""
    parameter = SimpleNamespace(grad=None if grad is None else _gradient(grad))
    return SimpleNamespace(sharded_param=parameter, device="cpu", grad_offload_event=None)


def _gradient(value: float) -> Any:
    return SimpleNamespace(_local_tensor=torch.tensor([value]))


def test_what_was_there_is_not_summed_again() -> None:
    """Three parameters: with a gradient before, without, and one whose new gradient FSDP keeps."""

    def doubled(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if grad is None else 2 * grad for grad in grads]

    late = _LateReduction(doubled, SameGradients(list))
    records = [_record(3.0), _record(5.0), _record(None)]
    earlier = [_gradient(1.0), None, _gradient(7.0)]
    late._partial = dict(zip(map(_Identity, records), earlier, strict=True))
    late.finish()
    found = [record.sharded_param.grad for record in records]
    assert [grad._local_tensor.item() for grad in found] == [1.0 + 2 * 3.0, 2 * 5.0, 7.0]
    assert found[0] is earlier[0]
    late.finish()
    assert found[1]._local_tensor.item() == 10.0


def test_what_was_there_outlives_a_backward_that_raised() -> None:
    late = _LateReduction(lambda grads: [*grads], SameGradients(list))
    records = [_record(None), _record(5.0)]
    earlier = [_gradient(1.0), None]
    late._partial = dict(zip(map(_Identity, records), earlier, strict=True))
    late.abandon()
    assert [record.sharded_param.grad for record in records] == earlier
    late.finish()
    assert [record.sharded_param.grad for record in records] == earlier


class _Identity:
    """A record as a key: FSDP's own are hashed by identity."""

    def __init__(self, record: Any) -> None:
        self.__dict__ = record.__dict__
