"""Which compiled program a call of the module needs, and the bounded store of programs."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from sp_compiler.warn import warn

Value = TypeVar("Value")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Constant:
    """A leaf that is no tensor, as part of a key: equal only to the same value of the same type.

    ``1``, ``1.0`` and ``True`` differ. Values need not be hashable: they are hashed by their text.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.text = f"{type(value).__module__}.{type(value).__qualname__}:{_text(value)}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or self.text != other.text:
            return False
        return isinstance(self.value, _PLAIN) or _equal(self.value, other.value)

    def __repr__(self) -> str:
        return self.text


def _equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):
        return False


def _text(value: Any) -> str:
    """The same text for equal values on every rank; no addresses."""
    if isinstance(value, _PLAIN):
        return repr(value)
    text = repr(value)
    return f"{type(value).__qualname__} object" if " at 0x" in text else text


@dataclass(frozen=True)
class CallKey:
    """What the compiled program depends on.

    Attributes:
        training: mode of every module, in order.
        parameters: dtype and ``requires_grad`` of every parameter, in order.
        autocast: ``(device, dtype)`` of each autocast that is on.
        leaves: shape, dtype, device and ``requires_grad`` of tensors; other leaves as constants.
        structure: how the leaves make up the arguments.
        attributes: (module path, name) and value of what the user set on the model's modules.

    Grad mode is no part of it: a program is compiled with its backward, which is not recorded
    under ``no_grad``.
    """

    training: bytes
    parameters: tuple[tuple[torch.dtype, bool], ...]
    autocast: tuple[tuple[str, torch.dtype], ...]
    leaves: tuple[Any, ...]
    structure: Any
    attributes: tuple[tuple[tuple[str, str], Constant], ...] = ()

    def digest(self) -> str:
        """The same text for equal keys on every rank and in every process."""
        parts = (
            self.training,
            self.parameters,
            self.autocast,
            self.leaves,
            str(self.structure),
            self.attributes,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def parts(self) -> dict[str, str]:
        """All of it as text, by what a person calls it."""
        return {
            "inputs": str(list(self.leaves)),
            "structure": str(self.structure),
            "autocast": str(list(self.autocast)),
            "modules in training mode": _indices(self.training),
            "dtype and requires_grad of parameters": str(list(self.parameters)),
            "attributes": str(dict(self.attributes)),
        }

    def describe(self) -> str:
        """The part of it that most often changes from call to call."""
        attributes = f", attributes {dict(self.attributes)}" if self.attributes else ""
        return f"inputs {list(self.leaves)}, autocast {list(self.autocast)}{attributes}"


def call_key(
    modules: Iterable[nn.Module],
    parameters: Iterable[Tensor],
    leaves: Sequence[Any],
    structure: Any,
    attributes: Mapping[tuple[str, str], Constant] | None = None,
) -> CallKey:
    """The key of a call with these flattened inputs, in the present mode."""
    return CallKey(
        bytes(module.training for module in modules),
        tuple((parameter.dtype, parameter.requires_grad) for parameter in parameters),
        tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ),
        tuple(_leaf(leaf) for leaf in leaves),
        structure,
        tuple((attributes or {}).items()),
    )


def _indices(flags: bytes) -> str:
    chosen = [index for index, flag in enumerate(flags) if flag]
    return "all" if len(chosen) == len(flags) else str(chosen or "none")


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.requires_grad)
    return Constant(leaf)


class ProgramCache(Generic[Value]):
    """The last ``size`` programs used; warns once when it has to throw one away."""

    def __init__(self, size: int = 16) -> None:
        self.size = size
        self._entries: OrderedDict[CallKey, Value] = OrderedDict()
        self._warned = False

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterable[tuple[CallKey, Value]]:
        """From the least to the most recently used."""
        return self._entries.items()

    def get(self, key: CallKey) -> Value | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: CallKey, value: Value) -> None:
        self._entries[key] = value
        if len(self._entries) <= self.size:
            return
        self._entries.popitem(last=False)
        if not self._warned:
            self._warned = True
            warn(
                f"more than {self.size} different kinds of inputs were compiled (last: "
                f"{key.describe()}); programs are thrown away and compiled again. Pad inputs to a "
                "few fixed shapes, and keep Python numbers that change out of the arguments"
            )
