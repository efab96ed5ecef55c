"""Recomputation by hand, with ``torch.utils.checkpoint``: the plain GPT, as is or on DTensors."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch.utils.checkpoint import checkpoint

from benchmarks.models import Block, PlainGPT

Recompute = Literal["none", "attention", "full"]


def checkpoint_by_hand(model: PlainGPT, recompute: Recompute) -> PlainGPT:
    """Checkpoint nothing, every attention core, or every block of ``model``, in place."""
    for block in model.blocks:
        assert isinstance(block, Block)
        if recompute == "attention":
            attention = block.attention
            attention.core = partial(checkpoint, attention.core, use_reentrant=False)  # type: ignore[method-assign]
        elif recompute == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model
