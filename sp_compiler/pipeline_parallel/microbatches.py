"""Split a batch into microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sp_compiler.base.errors import ArgumentError, UnsupportedError


def check_weigh(weigh: Any) -> None:
    """Raise :class:`ArgumentError` unless ``weigh`` can be called, or is ``None``."""
    if weigh is not None and not callable(weigh):
        raise ArgumentError(
            f"weigh={weigh!r}: expected a function of a microbatch's inputs that returns its "
            "weight, or None"
        )


def microbatches_of(leaves: Sequence[Any], names: Sequence[str], count: int) -> list[list[Any]]:
    """Split the flattened inputs of a batch into ``count`` equal parts along the first dim.

    The batch is the first dim of the first tensor. Tensors with another first dim (one row of
    position ids), and other leaves, belong to every microbatch.

    Args:
        leaves: leaves from :func:`sp_compiler.trace.export.flatten_inputs`.
        names: names of the leaves, for messages.
        count: number of microbatches.

    Raises:
        ArgumentError: no tensor, or a batch that ``count`` does not divide.
        UnsupportedError: an input requires a gradient.
    """
    sizes = [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves]
    batch = next((size for size in sizes if size is not None), None)
    if batch is None:
        raise ArgumentError("no input is a tensor with a batch dim, which microbatches are cut of")
    # Not padded: rows that are none would count in a mean over tokens.
    if batch % count or not batch:
        first = names[sizes.index(batch)]
        raise ArgumentError(
            f"{first} has a batch of {batch}, which microbatches={count} does not divide: pass a "
            f"multiple of {count}, or another number of microbatches to sp_compiler.pipeline"
        )
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise UnsupportedError(
                f"{name} requires a gradient, which a pipeline does not compute for inputs; detach "
                "it, or compute it inside the model"
            )
    pieces = [
        # Views: a step holds its batch once.
        leaf.split(batch // count) if size == batch else (leaf,) * count
        for leaf, size in zip(leaves, sizes, strict=True)
    ]
    return [[piece[number] for piece in pieces] for number in range(count)]
