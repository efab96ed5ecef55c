"""Decisions: facts that a forward reads from its inputs, buffers and caller, and a program assumes.

A forward with ``if mask.any()``, ``int(lengths.max())`` or ``if torch.is_grad_enabled()`` is
captured with the results of the example call. The program is valid only for calls with the same
results.
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
"""Functions of ``torch`` that return a mode of the caller, by name."""

_CALLERS: ContextVar[Mapping[str, bool] | None] = ContextVar("callers_modes", default=None)


@contextlib.contextmanager
def callers_modes_kept() -> Iterator[None]:
    """Context that changes modes for a compilation, in which decisions still read the caller's."""
    token = _CALLERS.set(_CALLERS.get() or {name: ask() for name, ask in MODES.items()})
    try:
        yield
    finally:
        _CALLERS.reset(token)


@dataclass(frozen=True, eq=False)
class Decision:
    """A fact that the forward has read.

    Attributes:
        line: source line that reads it: ``model.py:12 if mask.any():``.
        value: the value read in the capture, as text.
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
    """One number read from a tensor.

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
        # Also called while a model is traced: this computation is not part of the trace.
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            if self.writes:
                values = [value.clone() for value in values]
            return Interpreter(self.module).run(*values).item()


@dataclass(frozen=True, eq=False)
class ModeRead(Decision):
    """A mode in which the model is called.

    Attributes:
        mode: its name in :data:`MODES`.
    """

    mode: str

    def read(self, leaves: Sequence[Any], buffers: Mapping[str, Tensor]) -> bool:
        callers = _CALLERS.get()
        return MODES[self.mode]() if callers is None else callers[self.mode]


@dataclass(frozen=True, eq=False)
class LayoutRead(Decision):
    """The memory layout of an input.

    Attributes:
        source: index of the leaf of the inputs.
    """

    source: int

    def read(self, leaves: Sequence[Any], buffers: Mapping[str, Tensor]) -> str:
        return layout(leaves[self.source])


def layout(tensor: Tensor) -> str:
    """Return the memory layout of ``tensor`` as text; the same for all sizes if contiguous."""
    return "contiguous" if tensor.is_contiguous() else f"strides {tuple(tensor.stride())}"


def hold(
    decisions: Sequence[Decision], leaves: Sequence[Any], buffers: Mapping[str, Tensor]
) -> bool:
    """Return whether a forward of these inputs would make the same ``decisions``."""
    # In order, up to the first that differs: from there the forward takes another path, on which
    # the later ones may not even be computable.
    return all(repr(each.read(leaves, buffers)) == each.value for each in decisions)
