"""Lets GradScaler see an overflow of any rank.

``torch.amp.GradScaler`` checks all gradients of one dtype in one operation. DTensor reduces its
verdict over the ranks as the *first* gradient's placement says: when that one is replicated and
others are sharded, a rank alone may skip its step, and the parameters drift apart without a word.
Checking sharded gradients first makes the verdict the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_OPERATION = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def check_sharded_gradients_first() -> None:
    """Install the order for this process; a second call changes nothing."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    installed = handlers[_OPERATION]
    if isinstance(installed, _ShardedFirst):
        return
    handlers[_OPERATION] = _ShardedFirst(installed)


class _ShardedFirst:
    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __call__(
        self, operation: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        grads = cast("Sequence[Tensor]", args[0])
        ordered = sorted(grads, key=_is_replicated)
        return self._handler(operation, (ordered, *args[1:]), kwargs)


def _is_replicated(grad: Tensor) -> bool:
    return isinstance(grad, DTensor) and all(where.is_replicate() for where in grad.placements)
