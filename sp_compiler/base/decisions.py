"""Decisions: numbers that a forward reads from its inputs and buffers, and that a program assumes.

A forward with ``if mask.any()`` or ``int(lengths.max())`` is captured with the number from the
example inputs. The program is valid for calls with the same number, and for no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True, eq=False)
class Decision:
    """One number that the forward read.

    Attributes:
        module: graph that computes the tensor that is read.
        sources: sources of its placeholders: leaves of the inputs by index, buffers by name.
        writes: whether the module writes in place and must therefore get copies.
        line: source line that reads it: ``model.py:12 if mask.any():``.
        value: the number read at capture, as text.
    """

    module: GraphModule
    sources: tuple[int | str, ...]
    writes: bool
    line: str
    value: str

    def __str__(self) -> str:
        return f"{self.line} -> {self.value}"


def read(
    decision: Decision, leaves: Sequence[Any], buffers: Mapping[str, Tensor]
) -> int | float | complex | bool:
    """Return what the forward would read, given a call's flattened inputs and the buffers."""
    values = [
        leaves[source] if isinstance(source, int) else buffers[source]
        for source in decision.sources
    ]
    # Called while a model is traced, too: what is computed here is no part of that trace.
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        if decision.writes:
            values = [value.clone() for value in values]
        return Interpreter(decision.module).run(*values).item()


def hold(
    decisions: Sequence[Decision], leaves: Sequence[Any], buffers: Mapping[str, Tensor]
) -> bool:
    """Return whether a forward of these inputs would make the same ``decisions``."""
    # In order, and none behind the first that differs: the forward takes another path from there,
    # on which the later ones need not even be computable.
    return all(repr(read(each, leaves, buffers)) == each.value for each in decisions)
