"""The key of a call: all facts that its program depends on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from sp_compiler.base.autocast import Autocast, autocast_state
from sp_compiler.ir.text import describe_tensor, dtype_name

Attribute = tuple[str, str]
"""Path of a module and name of an attribute."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


class Constant:
    """A leaf other than a tensor, as part of a key: equal only to the same value of the same type.

    ``1``, ``1.0`` and ``True`` differ. Values are hashed by their text, so they need not be
    hashable.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.text = f"{type(value).__module__}.{type(value).__qualname__}:{_text(value)}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or self.text != other.text:
            return False
        return self.is_plain or _equal(self.value, other.value)

    def __repr__(self) -> str:
        return self.text

    @property
    def is_plain(self) -> bool:
        """Whether it cannot be changed in place."""
        return isinstance(self.value, _PLAIN)

    def whole(self) -> str:
        """Return the value as text, with its type if that is no built-in one."""
        kind, _, text = self.text.partition(":")
        return text if kind.startswith("builtins.") else self.text

    def short(self) -> str:
        """Return the beginning of the value as text."""
        if isinstance(self.value, Tensor):
            return f"a tensor {describe_tensor(self.value)}"
        text = self.text.partition(":")[2]
        return text if len(text) <= 40 else f"{text[:40]} ..."


def _equal(first: Any, second: Any) -> bool:
    # Arrays compare elementwise or raise; then only identity counts.
    if first is second:
        return True
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):
        return False


def _text(value: Any) -> str:
    """Return text that is the same for equal values on every rank, without addresses."""
    if isinstance(value, torch.device):
        return value.type  # each rank has a device of its own
    if isinstance(value, (set, frozenset)):  # in an order that differs between processes
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor) and not value.is_meta:
        # Without the index of its device, and without its history.
        return f"{value.device.type} {value.detach().cpu()!r}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_text(key)}: {_text(each)}' for key, each in value.items())}}}"
    # An address differs between ranks; equality of the objects themselves still decides.
    text = repr(value)
    return f"{type(value).__qualname__} object" if " at 0x" in text else text


@dataclass(frozen=True)
class CallKey:
    """Facts that the compiled program depends on.

    Attributes:
        training: training mode of every module, in order.
        parameters: dtype and ``requires_grad`` of every parameter, in order.
        buffers: shape, dtype and ``requires_grad`` of every buffer, in order.
        autocast: ``(device, dtype)`` of each active autocast.
        leaves: shape, dtype, device, ``requires_grad`` and layout of tensors; other leaves as
            constants.
        structure: pytree structure of the arguments.
        attributes: those that the user set on the model's modules and that programs depend on, see
            :class:`~sp_compiler.runtime.keys.set_attributes.SetAttributes`.
        loss_only: whether the program returns nothing but the loss, as a step of a pipeline does.
        default_dtype: dtype of tensors that the forward creates without giving one.
        decisions: values that the forward reads from its inputs and buffers, with their lines.

    Grad mode is not part of it: a program is compiled with its backward, which is not recorded
    under ``no_grad``. Neither are devices of parameters and buffers, which may get their memory
    after they are compiled.
    """

    training: bytes
    parameters: tuple[tuple[torch.dtype, bool], ...]
    buffers: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    autocast: Autocast
    leaves: tuple[Any, ...]
    structure: Any
    attributes: tuple[tuple[Attribute, Constant], ...] = ()
    loss_only: bool = False
    default_dtype: torch.dtype = torch.float32
    decisions: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Computed once per key: it goes through all parameters and the tree of the arguments.
        return hash(tuple(getattr(self, name.name) for name in fields(self)))

    def without_decisions(self) -> CallKey:
        """Key of all calls that differ only in the values that the forward reads."""
        return replace(self, decisions=()) if self.decisions else self

    def without_sizes(self) -> CallKey:
        """Key that is the same for all sizes above 1, which can be left open together."""
        leaves = (
            # Sizes 0 and 1 stay as they are: operators broadcast them, and export specialises on
            # them.
            (tuple(min(size, 2) for size in leaf[0]), *leaf[1:])
            if isinstance(leaf, tuple)
            else leaf
            for leaf in self.leaves
        )
        return replace(self, leaves=tuple(leaves))

    def digest(self) -> str:
        """Return text that is the same for equal keys on every rank and in every process."""
        parts = (
            self.training,
            self.parameters,
            self.buffers,
            self.autocast,
            self.leaves,
            str(self.structure),
            self.attributes,
            self.loss_only,
            self.default_dtype,
            self.decisions,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def parts(self) -> dict[str, str]:
        """Return all parts except the inputs as text, by readable name."""
        return {
            "structure": str(self.structure),
            "autocast": str(list(self.autocast)),
            "mode": {"all": "train()", "none": "eval()"}.get(
                modes := _indices(self.training), f"train() of modules {modes}"
            ),
            "dtypes of parameters": str([dtype for dtype, _ in self.parameters]),
            "requires_grad of parameters": _indices(bytes(grad for _, grad in self.parameters)),
            "buffers": str(list(map(buffer_text, self.buffers))),
            **{
                f"attribute {'.'.join(filter(None, name))}": value.text
                for name, value in self.attributes
            },
            "returns the loss only": str(self.loss_only),
            "default dtype": str(self.default_dtype),
            "decisions": str(list(self.decisions)),
        }

    def describe(self) -> str:
        """Return the part that changes most often between calls, as text."""
        parts = [f"inputs {', '.join(map(leaf_text, self.leaves)) or 'none'}"]
        parts += [f"autocast {device} {dtype}" for device, dtype in self.autocast]
        parts += [f"{'.'.join(filter(None, name))} = {v.short()}" for name, v in self.attributes]
        return "; ".join([*parts, *self.decisions]).replace("torch.", "")


def call_key(
    modules: Iterable[nn.Module],
    parameters: Iterable[Tensor],
    buffers: Iterable[Tensor],
    leaves: Sequence[Any],
    structure: Any,
    attributes: tuple[tuple[Attribute, Constant], ...] = (),
    dtypes: Mapping[int, torch.dtype] | None = None,
    *,
    loss_only: bool = False,
) -> CallKey:
    """Return the key of a call with these flattened inputs, in the current mode.

    ``dtypes`` has, by ``id``, the compute dtypes of parameters if they differ from their own.
    """
    # Lists inside: generators take twice as long in every call, and models have hundreds of both.
    # Attributes of DTensors are read without a search for __torch_function__, which takes longer.
    with torch._C.DisableTorchFunctionSubclass():
        kinds = [
            (dtypes.get(id(p), p.dtype) if dtypes else p.dtype, p.requires_grad) for p in parameters
        ]
    return CallKey(
        bytes([module.training for module in modules]),
        tuple(kinds),
        tuple([(buffer.shape, buffer.dtype, buffer.requires_grad) for buffer in buffers]),
        autocast_state(),
        tuple([_leaf(leaf) for leaf in leaves]),
        structure,
        attributes,
        loss_only,
        torch.get_default_dtype(),
    )


def buffer_text(facts: tuple[tuple[int, ...], torch.dtype, bool]) -> str:
    """Return an element of :attr:`CallKey.buffers` in words."""
    shape, dtype, requires_grad = facts
    return f"{dtype_name(dtype)} {tuple(shape)}{', requires grad' if requires_grad else ''}"


def leaf_text(leaf: Any) -> str:
    """Return a leaf of :attr:`CallKey.leaves` in words."""
    if isinstance(leaf, Constant):
        return leaf.short()
    shape, dtype, device, requires_grad, layout = leaf
    grad = "requires grad" if requires_grad else "requires no grad"
    kind = "" if layout == torch.strided else f", {str(layout).removeprefix('torch.')}"
    return f"{dtype_name(dtype)} {tuple(shape)} on {device}, {grad}{kind}"


def _indices(flags: bytes) -> str:
    chosen = [index for index, flag in enumerate(flags) if flag]
    # Positions, not names: a large model has thousands of modules and usually one mode.
    return "all" if len(chosen) == len(flags) else str(chosen or "none")


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.requires_grad, leaf.layout
    return Constant(leaf)
