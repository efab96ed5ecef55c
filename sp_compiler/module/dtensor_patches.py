"""Patches of PyTorch's DTensor for an ordinary training loop.

``torch.amp.GradScaler`` checks all gradients of one dtype in one operation. DTensor reduces its
result over the ranks according to the *first* gradient's placement: if that one is replicated and
others are sharded, a single rank may skip its step, and the parameters silently diverge. Checking
sharded gradients first makes the result the same on every rank.

``torch.nn.utils.clip_grad_norm_`` returns a DTensor, and ``f"{norm:.3f}"`` of one is a TypeError.

``torch.save`` writes the part of one rank without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import UnsupportedError

_OPERATION = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def check_sharded_gradients_first() -> None:
    """Install this order for the process; a second call does nothing."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    installed = handlers[_OPERATION]
    if isinstance(installed, _ShardedFirst):
        return
    handlers[_OPERATION] = _ShardedFirst(installed)


@functools.cache
def format_as_numbers() -> None:
    """Make a 0-dim DTensor format as a number, like a plain tensor."""
    # torch internals: DTensor inherits Tensor.__format__, which formats plain tensors alone.
    as_before = DTensor.__format__

    def format_number(self: DTensor, spec: str) -> str:
        # Without a spec it stays as it prints: only what was an error means something else now.
        if spec and self.dim() == 0 and not self.is_meta:
            return format(self.item(), spec)
        return as_before(self, spec)

    DTensor.__format__ = format_number  # type: ignore[method-assign, assignment]


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


def refuse_to_pickle(value: DTensor) -> None:
    """Make pickling of a sharded ``value`` an error: a file of rank 0 would have only a part of
    it."""
    if any(not where.is_replicate() for where in value.placements):
        # Of the object, not of its class: copies and what checkpoint libraries make of it are free.
        value.__reduce_ex__ = _raise_partial  # type: ignore[method-assign]


def _raise_partial(protocol: Any) -> NoReturn:
    raise UnsupportedError(
        "a sharded DTensor cannot be pickled (torch.save): the file would have this rank's part "
        "only. Unsharded weights: state = module.full_state_dict() on all ranks, then save it on "
        "rank 0. Sharded checkpoints, optimizers too: torch.distributed.checkpoint.save on all "
        "ranks"
    )
