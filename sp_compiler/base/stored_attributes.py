"""Values that a forward stores in attributes of the model's modules, for the caller to read.

``self.aux_loss = ...`` is an output that is not returned. A program returns such tensors after the
model's own outputs, and its caller stores them where eager code would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

How = Literal["set", "append", "update", "refill", "add", "decide"]


@dataclass(frozen=True)
class Result:
    """A tensor that the program returns, by its position after the model's own outputs."""

    index: int


@dataclass(frozen=True)
class Stored:
    """Value that the forward stores in an attribute.

    Attributes:
        path: path of the module, "" for the model itself.
        name: name of the attribute.
        how: the value replaces the attribute ("set"); its items extend a list ("append"), update a
            dict ("update"), or replace all items ("refill"); it is added to a number ("add").
            "decide" is "set" in a program that is valid only for one earlier value.
        leaves: leaves of the value: numbers and text, and a :class:`Result` per tensor.
        spec: pytree structure of the value.
    """

    path: str
    name: str
    how: How
    leaves: tuple[Any, ...]
    spec: TreeSpec

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def after(self, before: Any, results: Sequence[Any]) -> Any:
        """Return the attribute's value after a forward; a list or a dict is changed in place."""
        leaves = [results[leaf.index] if isinstance(leaf, Result) else leaf for leaf in self.leaves]
        value = tree_unflatten(leaves, self.spec)
        if self.how in ("set", "decide"):
            return value
        if self.how == "add":
            return before + value
        if self.how == "refill":
            before.clear()
        (before.extend if isinstance(before, list) else before.update)(value)
        return before

    def tensors(self, value: Any) -> Iterator[Tensor]:
        """Yield the tensors of the attribute after an eager forward, in the order of the program's
        results."""
        if self.how == "append":
            value = value[len(value) - self.spec.num_children :]
        elif self.how == "update":
            # In the order of the program.
            keys = tree_unflatten(list(self.leaves), self.spec)
            value = {key: value[key] for key in keys}
        for leaf, known in zip(tree_leaves(value), self.leaves, strict=True):
            if isinstance(known, Result):
                yield leaf
