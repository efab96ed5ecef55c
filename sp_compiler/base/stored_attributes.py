"""Values that a forward leaves in attributes of the model's modules, for the caller to read.

``self.aux_loss = ...`` is an output that does not come through ``return``. A program returns the
tensors behind the model's own outputs; whoever runs it puts them where eager code would have.
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
    """A tensor that the program returns, by its position behind the model's own outputs."""

    index: int


@dataclass(frozen=True)
class Stored:
    """Value that the forward leaves in an attribute.

    Attributes:
        path: of the module, "" for the model itself.
        name: of the attribute.
        how: it becomes the value ("set"); the value's items go behind those of a list ("append"),
            to those of a dict ("update"), or in their place ("refill"); the value is added to a
            number ("add"). "decide" is "set" where the program holds for one value before it.
        leaves: of the value: numbers and text, and a :class:`Result` for each tensor.
        spec: how the leaves make up the value.
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
        """Yield, of the attribute after a forward of eager code, what the program returns of it."""
        if self.how == "append":
            value = value[len(value) - self.spec.num_children :]
        elif self.how == "update":
            # In the order in which the program has them.
            keys = tree_unflatten(list(self.leaves), self.spec)
            value = {key: value[key] for key in keys}
        for leaf, known in zip(tree_leaves(value), self.leaves, strict=True):
            if isinstance(known, Result):
                yield leaf
