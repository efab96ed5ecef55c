"""Numbers that a forward reads from tensors during capture, and modes of its caller.

A traced tensor has no values. Numbers that depend only on inputs and buffers can be computed from
the example, and again before every call: they are computed eagerly and recorded as decisions of the
program. The caller's modes, which the capture changes, and the layout of inputs are recorded too.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sp_compiler.base.decisions import Decision, LayoutRead, ModeRead, NumberRead, layout
from sp_compiler.base.errors import CaptureError
from sp_compiler.base.storage import share_elements
from sp_compiler.base.warn import user_line
from sp_compiler.ir.program import Ref
from sp_compiler.trace.attributes.changes import replaced_forward
from sp_compiler.trace.decisions.finite import FiniteTests
from sp_compiler.trace.decisions.rows import ChosenRows, RowChoices
from sp_compiler.trace.decisions.sources import (
    Sources,
    computation,
    extracted,
    is_under_autocast,
    node_of,
    storage_of,
)
from sp_compiler.trace.foreign_random import ForeignDraw, drawing_from_torch
from sp_compiler.trace.tracer_patches import (
    asked_by_model,
    inference_without_gradients,
    modes_answered,
    warned_of_symbols_in_text,
)

_CASTS: dict[object, Callable[..., Any]] = {
    Tensor.item: lambda value: value,
    Tensor.__bool__: bool,
    Tensor.is_nonzero: bool,
    torch.is_nonzero: bool,
    Tensor.__int__: int,
    Tensor.__index__: operator.index,
    Tensor.__float__: float,
    Tensor.__complex__: complex,
    Tensor.__format__: format,
}
"""Functions that turn a tensor into a Python number or text, and the same functions of its item."""
_TESTS: dict[object, Callable[..., Any]] = {
    torch.equal: lambda x, other: x.shape == other.shape and (x == other).all(),
    Tensor.equal: lambda x, other: x.shape == other.shape and (x == other).all(),
    torch.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    Tensor.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    Tensor.__contains__: lambda x, element: (x == element).any(),
}
"""Functions that compute a tensor and read it, each with the computation of that tensor."""
_UNSEEN: dict[object, str] = {
    Tensor.data.__set__: "assigns .data of a tensor; write into it with copy_(), say",  # type: ignore[attr-defined]
    Tensor.__format__: "makes text of a tensor; read its number first, by item()",
}
"""Functions that are not traced: the graph would continue with the value of the example."""

_OF_GRAD_MODE: dict[object, Any] = {
    Tensor.requires_grad.__get__: False,  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__: None,  # type: ignore[union-attr]
}
"""Attributes of a result that show whether gradients are recorded, and their values if not."""

_OF_LAYOUT = (Tensor.is_contiguous, Tensor.stride)
_BY_LAYOUT = (Tensor.as_strided, torch.as_strided)
"""Functions whose result depends on the positions of a tensor's elements in memory."""

# Recognized by name: torch raises them as they are, without a common class of their own.
_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError")


class DataDependentError(Exception):
    """A branch, a loop or a shape of the forward depends on the values in a tensor."""


def is_data_dependent(error: Exception) -> bool:
    """Return whether ``error`` says that the values in a tensor are needed."""
    return isinstance(error, DataDependentError) or type(error).__name__ in _DATA_DEPENDENT


@dataclass
class Reads:
    """Reads during one capture.

    Attributes:
        decisions: numbers read from inputs and buffers, and modes of the caller, in order.
        refused: the line of the first read that depends on anything else, and what it depends on.
        trained: lines that compute with tensors that require a gradient, by the tensors' storage.
    """

    decisions: list[Decision] = field(default_factory=list)
    refused: tuple[str, str] | None = None
    trained: dict[StorageWeakRef, str] = field(default_factory=dict)

    def callers(self, mode: str) -> bool:
        """Return whether a mode of the caller is on, and record that the forward asks."""
        asked = ModeRead(user_line(), "", mode)
        value = asked.read((), {})
        # A mode does not change during a call.
        if not any(isinstance(x, ModeRead) and x.mode == mode for x in self.decisions):
            self.decisions.append(replace(asked, value=repr(value)))
        return value

    def layout(self, source: int, leaf: Tensor, traced: Tensor) -> None:
        """Record that the forward asks for the layout of an input, ``traced`` in the capture.

        Raises:
            CaptureError: its layout in the capture differs.
        """
        if layout(leaf) != layout(traced):
            raise CaptureError(
                f"the forward reads the memory layout of an input ({layout(leaf)}), which the "
                f"capture had to change: {user_line()}; call it with .contiguous()"
            )
        if not any(isinstance(x, LayoutRead) and x.source == source for x in self.decisions):
            self.decisions.append(LayoutRead(user_line(), repr(layout(leaf)), source))

    def note_trained(self, values: Any) -> None:
        """Record the real tensors that require a gradient: export may lose that information."""
        for value in pytree.tree_leaves(values):
            if type(value) in (Tensor, nn.Parameter) and value.requires_grad:
                memory = StorageWeakRef(value.untyped_storage())
                self.trained.setdefault(memory, user_line())

    def text(self) -> str:
        """Return the message about the refused read."""
        assert self.refused is not None
        line, origin = self.refused
        return (
            f"the forward reads a number that depends on {origin}, which is not known before the "
            f"program runs: {line}"
        )


@contextlib.contextmanager
def recorded_reads(
    model: nn.Module, leaves: Sequence[Any], rows: ChosenRows, drawn: ForeignDraw | None
) -> Iterator[Reads]:
    """Context for exporting ``model`` that reads numbers from its real inputs and buffers.

    Args:
        model: its forward is called inside, with traced tensors in place of the real ones.
        leaves: the real inputs, as :func:`sp_compiler.trace.export.flatten_inputs` flattens them.
        rows: how to treat rows that are selected by values of inputs and buffers.
        drawn: draws from other random generators that an earlier export has found.
    """
    reads = Reads()
    buffers, constants = dict(model.named_buffers()), _attributes(model)
    forward = drawing_from_torch(model, model.forward, drawn)

    @functools.wraps(forward)
    def reading(*args: Any, **kwargs: Any) -> Any:
        sources: dict[Node, Ref] = {}
        inputs = pytree.tree_leaves((args, dict(sorted(kwargs.items()))))
        tensors = [(Ref("input", index=index), leaf) for index, leaf in enumerate(inputs)]
        tensors += [(Ref("buffer", name), value) for name, value in model.named_buffers()]
        tensors += [(Ref("param", name), value) for name, value in model.named_parameters()]
        for ref, value in tensors:
            if isinstance(value, Tensor) and (node := node_of(value)) is not None:
                sources[node] = ref
        traced = _attributes(model)
        real = [(traced[key], value) for key, value in constants.items() if key in traced]
        # Export may call the forward more than once; the last call is the one that it keeps.
        reads.decisions.clear()
        try:
            mode = _ReadMode(reads, Sources(sources, real, leaves, buffers), rows)
            answers = modes_answered(reads.callers)
            with mode, warned_of_symbols_in_text(), answers, inference_without_gradients():
                outputs = forward(*args, **kwargs)
            return mode.finite.shown(outputs)
        except Exception as error:
            if not is_data_dependent(error):
                raise
            # Raised as another class: for its own errors, export prints the graph so far.
            raise DataDependentError(str(error)).with_traceback(error.__traceback__) from None

    with replaced_forward(model, reading):
        yield reads


def _attributes(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return the tensors that are plain attributes of modules: constants of the program."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _read_node(func: Any, tensor: Tensor) -> Node | None:
    """Return the node of the number that ``func``, one of the casts, reads from ``tensor``."""
    # The text of a tensor with dims shows all its elements.
    return None if func is Tensor.__format__ and tensor.ndim else node_of(tensor)


def _traced_numbers(data: Any, **kwargs: Any) -> Tensor | None:
    """Return ``torch.tensor(data)`` of traced scalars, without reading them.

    ``None`` unless ``data`` is a list of scalar tensors of one dtype and device.
    """
    if not isinstance(data, (list, tuple)) or not kwargs.keys() <= {"dtype", "device"}:
        return None
    if not all(isinstance(each, Tensor) and not each.ndim for each in data):
        return None
    alike = len({(each.dtype, each.device) for each in data}) == 1
    traced = any(node_of(each) is not None for each in data)
    return torch.stack(tuple(data)).detach().to(**kwargs) if alike and traced else None


def _is_there_already(tensor: Tensor, *given: Any) -> bool:
    """Return whether ``tensor.data = value`` changes nothing: a parameter is assigned to itself, as
    by ``Module.to()`` without a change, or ``tensor.data += 1`` has written in place already."""
    value = given[-1] if given else None
    if value is tensor or not isinstance(value, Tensor) or not share_elements(value, tensor):
        return value is tensor
    first, second = ((x.storage_offset(), *x.shape, *x.stride()) for x in (value, tensor))
    return first == second


def _counts(ids: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """Return ``torch.bincount`` of ids below ``minlength``; larger ones raise in the program.

    ``None`` with weights, or without a ``minlength``, since the size then depends on the ids.
    """
    if weights is not None or not minlength or node_of(ids) is None:
        return None
    ones = torch.ones_like(ids, dtype=torch.int64)
    return ones.new_zeros(minlength).index_add(0, ids.long(), ones)


_COMPUTED: dict[object, Callable[..., Tensor | None]] = {
    torch.tensor: _traced_numbers,
    torch.bincount: _counts,
    Tensor.bincount: _counts,
    # hidden_writes.py handles writes into a detached view, which gets no gradient either.
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]
}
"""Functions that read values, or whose results the tracer does not see, and replacements that
compute the results; these return ``None`` if they cannot."""


class _ReadMode(TorchFunctionMode):
    """Answers reads of numbers that can be computed from inputs and buffers."""

    def __init__(self, reads: Reads, sources: Sources, rows: ChosenRows) -> None:
        super().__init__()
        self._reads = reads
        self._sources = sources
        self.finite = FiniteTests()
        self._rows = RowChoices(rows, self._is_known, self._number)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _TESTS:
            with self:  # a mode is disabled inside its own __torch_function__
                return bool(_TESTS[func](*args, **(kwargs or {})))
        self._reads.note_trained((args, kwargs))
        if func in _CASTS and (node := _read_node(func, args[0])) is not None:
            parts, refusal = self._computed(node)
            if not refusal:
                return _CASTS[func](self._decide(node, parts), *args[1:])
            if (finite := self.finite.answer(args[0])) is not None:
                return _CASTS[func](finite, *args[1:])
            # Torch may still know the value (a constant), or it may be unused.
            self._reads.refused = self._reads.refused or (user_line(), refusal)
        if func in _OF_GRAD_MODE and asked_by_model() and not self._is_given(args[0]):
            value = func(*args)
            records = not value or self._reads.callers("is_grad_enabled")
            return value if records else _OF_GRAD_MODE[func]
        if func in _BY_LAYOUT or (func in _OF_LAYOUT and asked_by_model()):
            self._read_layout(args[0])
        if func in _UNSEEN and not _is_there_already(*args):
            raise CaptureError(f"the forward {_UNSEEN[func]}: {user_line()}")
        computed = _COMPUTED[func](*args, **(kwargs or {})) if func in _COMPUTED else None
        if computed is not None:
            return computed
        if (chosen := self._rows.result(func, args, kwargs or {})) is not NotImplemented:
            return chosen
        result = func(*args, **(kwargs or {}))
        self.finite.record(func, args, result)
        return result

    def _computed(self, node: Node) -> tuple[list[Node], str]:
        """Return the nodes that compute ``node``, and why they cannot run before a call, or ""."""
        parts = computation(node)
        refusal = next(filter(None, map(self._sources.refusal, parts)), "")
        if not refusal and is_under_autocast(parts):
            refusal = "a computation under the model's own autocast"
        return parts, refusal

    def _is_known(self, tensor: Tensor) -> bool:
        node = node_of(tensor)
        return node is not None and not self._computed(node)[1]

    def _number(self, tensor: Tensor) -> Any:
        node = node_of(tensor)
        assert node is not None
        return self._decide(node, computation(node))

    def _is_given(self, tensor: Tensor) -> bool:
        """Return whether it is an input, a buffer or a parameter, which no grad mode affects."""
        return node_of(tensor) in self._sources.refs

    def _read_layout(self, tensor: Tensor) -> None:
        """Record the layouts of inputs that ``tensor`` is a view of: they determine its own."""
        node = node_of(tensor)
        storage = None if node is None else storage_of(node)
        for source, ref in self._sources.refs.items():
            if ref.kind == "input" and storage is not None and storage_of(source) == storage:
                leaf = self._sources.leaves[ref.index]
                self._reads.layout(ref.index, leaf, source.meta["val"])

    def _decide(self, node: Node, parts: Sequence[Node]) -> Any:
        """Read the number, and record it unless an earlier decision already does."""
        fresh = extracted(node, parts, self._sources)
        value = fresh.read(self._sources.leaves, self._sources.buffers)
        for earlier in self._reads.decisions:
            if not isinstance(earlier, NumberRead):
                continue
            # Each layer reads the same number again. Constants are compared by their names in code.
            if earlier.sources == fresh.sources and earlier.module.code == fresh.module.code:
                return value
        # A number computed only from constants is the same in every call.
        if fresh.sources:
            self._reads.decisions.append(replace(fresh, value=repr(value)))
        return value
