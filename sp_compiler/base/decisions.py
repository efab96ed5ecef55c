"""Decisions: what a forward reads from its inputs, buffers and caller, and a program assumes.

A forward with ``if mask.any()``, ``int(lengths.max())`` or ``if torch.is_grad_enabled()`` is
captured with what the example call gives. The program is valid for calls that give the same, and
for no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import _disable_current_modes

MODES: Mapping[str, Callable[[], bool]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
}
"""Functions of ``torch`` that tell a mode of the caller, by name."""

_CALLERS: ContextVar[Mapping[str, bool] | None] = ContextVar("callers_modes", default=None)


@contextlib.contextmanager
def callers_modes_kept() -> Iterator[None]:
    """Context in which modes are changed in order to compile, and decisions read the caller's."""
    token = _CALLERS.set(_CALLERS.get() or {name: ask() for name, ask in MODES.items()})
    try:
        yield
    finally:
        _CALLERS.reset(token)


@dataclass(frozen=True, eq=False)
class Decision:
    """Something that the forward read.

    Attributes:
        line: source line that reads it: ``model.py:12 if mask.any():``.
        value: what it read at capture, as text.
    """

    line: str
    value: str

    def __str__(self) -> str:
        return f"{self.line} -> {self.value}"

    def read(self, leaves: Sequence[Any], buffers: Mapping[str, Tensor]) -> Any:
        """Return what the forward would read, given a call's flattened inputs and the buffers."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class NumberRead(Decision):
    """One number of a tensor.

    Attributes:
        module: graph that computes the tensor that is read.
        sources: sources of its placeholders: leaves of the inputs by index, buffers by name.
        writes: whether the module writes in place and must therefore get copies.
    """

    module: GraphModule
    sources: tuple[int | str, ...]
    writes: bool

    def read(
        self, leaves: Sequence[Any], buffers: Mapping[str, Tensor]
    ) -> int | float | complex | bool:
        values = [
            leaves[source] if isinstance(source, int) else buffers[source]
            for source in self.sources
        ]
        # Called while a model is traced, too: what is computed here is no part of that trace.
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            if self.writes:
                values = [value.clone() for value in values]
            return Interpreter(self.module).run(*values).item()


@dataclass(frozen=True, eq=False)
class ModeRead(Decision):
    """One of the modes that the model is called in.

    Attributes:
        mode: its name in :data:`MODES`.
    """

    mode: str

    def read(self, leaves: Sequence[Any], buffers: Mapping[str, Tensor]) -> bool:
        callers = _CALLERS.get()
        return MODES[self.mode]() if callers is None else callers[self.mode]


@dataclass(frozen=True, eq=False)
class LayoutRead(Decision):
    """The order in memory of a tensor that the model is given.

    Attributes:
        source: index of the leaf of the inputs.
    """

    source: int

    def read(self, leaves: Sequence[Any], buffers: Mapping[str, Tensor]) -> str:
        return layout(leaves[self.source])


def layout(tensor: Tensor) -> str:
    """Return how the elements of ``tensor`` lie in memory: equal for all sizes if it is plain."""
    return "contiguous" if tensor.is_contiguous() else f"strides {tuple(tensor.stride())}"


def hold(
    decisions: Sequence[Decision], leaves: Sequence[Any], buffers: Mapping[str, Tensor]
) -> bool:
    """Return whether a forward of these inputs would make the same ``decisions``."""
    # In order, and none behind the first that differs: the forward takes another path from there,
    # on which the later ones need not even be computable.
    return all(repr(each.read(leaves, buffers)) == each.value for each in decisions)
