"""The bounded cache of programs, and the key of a call of the module."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from sp_compiler.base.autocast import Autocast, autocast_state
from sp_compiler.base.decisions import Decision, hold
from sp_compiler.base.warn import warn
from sp_compiler.ir.symbolic import Sizes

Value = TypeVar("Value")
# How many programs of open sizes are compiled for calls that differ in their sizes only.
_MAX_TRIES = 4
# From how many programs on that differ in decisions only a warning is given: two questions with
# two answers each are four.
_MANY_DECISIONS = 5
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
        return isinstance(self.value, _PLAIN) or _equal(self.value, other.value)

    def __repr__(self) -> str:
        return self.text


def _equal(first: Any, second: Any) -> bool:
    # Arrays compare elementwise or raise; then identity is all there is.
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
    # An address differs between ranks; equality of the objects themselves still decides.
    text = repr(value)
    return f"{type(value).__qualname__} object" if " at 0x" in text else text


@dataclass(frozen=True)
class CallKey:
    """Facts that the compiled program depends on.

    Attributes:
        training: training mode of every module, in order.
        parameters: dtype and ``requires_grad`` of every parameter, in order.
        autocast: ``(device, dtype)`` of each active autocast.
        leaves: shape, dtype, device and ``requires_grad`` of tensors; other leaves as constants.
        structure: pytree structure of the arguments.
        attributes: (module path, name) and value of attributes that the user set on the model's
            modules.
        loss_only: whether the program returns nothing but the loss, as a step of a pipeline does.
        decisions: numbers that the forward reads from its inputs and buffers, with their lines.

    Grad mode is not part of it: a program is compiled with its backward, which is not recorded
    under ``no_grad``.
    """

    training: bytes
    parameters: tuple[tuple[torch.dtype, bool], ...]
    autocast: Autocast
    leaves: tuple[Any, ...]
    structure: Any
    attributes: tuple[tuple[tuple[str, str], Constant], ...] = ()
    loss_only: bool = False
    decisions: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Once for each key: it goes through all parameters and the tree of the arguments.
        return hash(tuple(getattr(self, name.name) for name in fields(self)))

    def without_decisions(self) -> CallKey:
        """Key of all calls that differ only in the numbers that the forward reads."""
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
            self.autocast,
            self.leaves,
            str(self.structure),
            self.attributes,
            self.loss_only,
            self.decisions,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def parts(self) -> dict[str, str]:
        """Return all parts except the inputs as text, by readable name."""
        return {
            "structure": str(self.structure),
            "autocast": str(list(self.autocast)),
            "modules in training mode": _indices(self.training),
            "dtypes of parameters": str([dtype for dtype, _ in self.parameters]),
            "requires_grad of parameters": _indices(bytes(grad for _, grad in self.parameters)),
            "attributes": str(dict(self.attributes)),
            "returns the loss only": str(self.loss_only),
            "decisions": str(list(self.decisions)),
        }

    def describe(self) -> str:
        """Return the part that changes most often between calls, as text."""
        attributes = f", attributes {dict(self.attributes)}" if self.attributes else ""
        decisions = f", decisions {list(self.decisions)}" if self.decisions else ""
        return f"inputs {list(self.leaves)}, autocast {list(self.autocast)}{attributes}{decisions}"


def call_key(
    modules: Iterable[nn.Module],
    parameters: Iterable[Tensor],
    leaves: Sequence[Any],
    structure: Any,
    attributes: Mapping[tuple[str, str], Constant] | None = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
    *,
    loss_only: bool = False,
) -> CallKey:
    """Return the key of a call with these flattened inputs, in the current mode.

    ``dtypes`` has, by ``id``, the compute dtypes of parameters if they differ from their own.
    """
    # Lists inside: generators take twice as long, in every call, and models have hundreds of both.
    return CallKey(
        bytes([module.training for module in modules]),
        tuple(
            [
                (dtypes.get(id(p), p.dtype) if dtypes else p.dtype, p.requires_grad)
                for p in parameters
            ]
        ),
        autocast_state(),
        tuple([_leaf(leaf) for leaf in leaves]),
        structure,
        tuple((attributes or {}).items()),
        loss_only,
    )


def _indices(flags: bytes) -> str:
    chosen = [index for index, flag in enumerate(flags) if flag]
    # Positions, for a large model has thousands of modules and usually one mode.
    return "all" if len(chosen) == len(flags) else str(chosen or "none")


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.requires_grad)
    return Constant(leaf)


@dataclass
class _CachedValue(Generic[Value]):
    """A program, and the calls for which it is valid.

    Attributes:
        value: the program.
        alike: its key for all sizes above 1, without decisions.
        sizes: its open sizes.
        decisions: numbers that its forward reads.
    """

    value: Value
    alike: CallKey
    sizes: Sizes | None
    decisions: Sequence[Decision]


class ProgramCache(Generic[Value]):
    """The ``size`` most recently used programs; warns once when it has to drop one.

    A program with open sizes is found by every call for which it is valid.
    """

    def __init__(self, size: int = 16) -> None:
        self.size = size
        self._entries: OrderedDict[CallKey, _CachedValue[Value]] = OrderedDict()
        self._closed: set[CallKey] = set()
        # Most models read no numbers: their calls need not look for what was decided.
        self._decide = False
        self._warned = False

    def __len__(self) -> int:
        return len(self._entries)

    def mapped(self, function: Callable[[Value], Value]) -> ProgramCache[Value]:
        """Return a cache of the same size with ``function`` of every program."""
        result = ProgramCache[Value](self.size)
        # What could not be left open for the original cannot be for a copy.
        result._closed |= self._closed
        result._decide = self._decide
        for key, entry in self._entries.items():
            result._entries[key] = replace(entry, value=function(entry.value))
        return result

    def rekeyed(self, function: Callable[[CallKey], CallKey]) -> ProgramCache[Value]:
        """Return a cache of the same programs, with ``function`` of their keys."""
        result = self.mapped(lambda value: value)
        result._closed = set(map(function, self._closed))
        result._entries = OrderedDict(
            (function(key), replace(entry, alike=function(entry.alike)))
            for key, entry in self._entries.items()
        )
        return result

    def decided(
        self, key: CallKey, leaves: Sequence[Any], buffers: Mapping[str, Tensor]
    ) -> CallKey:
        """Return ``key`` with what the forward reads from these inputs and buffers.

        Numbers are filled in if the cache has a program that is valid for them; otherwise ``key``,
        that of a call to be compiled, is returned unchanged.
        """
        if not self._decide:
            return key
        # The latest first: what is read changes less often than it stays.
        for name, entry in reversed(self._alike(key)):
            fits = name.without_decisions() == key or (
                entry.sizes is not None and entry.sizes.rejection(leaves) is None
            )
            if fits and hold(entry.decisions, leaves, buffers):
                return replace(key, decisions=name.decisions)
        return key

    def get(self, key: CallKey, leaves: Sequence[Any] = ()) -> Value | None:
        """Return the program for a call with these flattened inputs, if there is one.

        ``key`` is that of :meth:`decided`.
        """
        match = self._entries.get(key)
        if match is None:
            # The latest first: it was specialised because the earlier ones did not hold.
            for name, entry in reversed(self._alike(key)):
                if name.decisions != key.decisions or entry.sizes is None:
                    continue
                if entry.sizes.rejection(leaves) is None:
                    key, match = name, entry
                    break
        if match is None:
            return None
        # The order is that of last use: the front is what is thrown away.
        self._entries.move_to_end(key)
        return match.value

    def has_other_sizes(self, key: CallKey) -> bool:
        """Return whether there is a program for calls that differ from this one in sizes only."""
        return bool(self._of_other_sizes(key))

    def opens(self, key: CallKey, leaves: Sequence[Any]) -> bool:
        """Return whether to leave sizes open in the program for a call that has none yet.

        This is so if another size came before, unless open sizes failed or several such programs
        were specialised anyway: they take longer to compile. Warns of the reason for the last
        specialisation.
        """
        others = self._of_other_sizes(key)
        reasons = [e.sizes.rejection(leaves) for e in others if e.sizes is not None]
        # Where there is none the sizes fit, and the forward reads another number.
        tried = [reason for reason in reasons if reason is not None]
        if tried:
            warn(
                f"compiled again, {len(others) + 1} programs now for inputs that differ in nothing "
                f"but their sizes ({key.describe()}): the last is specialised, {tried[-1]}"
            )
        closed = key.without_decisions().without_sizes() in self._closed
        return bool(others) and len(tried) < _MAX_TRIES and not closed

    def put(
        self,
        key: CallKey,
        value: Value,
        sizes: Sizes | None = None,
        decisions: Sequence[Decision] = (),
    ) -> None:
        """Store the program that was compiled for ``key`` and holds for these."""
        alike = key.without_decisions().without_sizes()
        # Left open on request and specialised all the same: asking again would cost as much again.
        if sizes is None and self._of_other_sizes(key):
            self._closed.add(alike)
        self._entries[key] = _CachedValue(value, alike, sizes, decisions)
        self._decide |= bool(decisions)
        if decisions:
            self._warn_of_decisions(key)
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

    def _warn_of_decisions(self, key: CallKey) -> None:
        same = key.without_decisions()
        programs = [name for name in self._entries if name.without_decisions() == same]
        if len(programs) < _MANY_DECISIONS:
            return
        # Behind the first number that differs the forward takes another path.
        pairs = zip(*(name.decisions for name in programs[-2:]), strict=False)
        differ = next(pair for pair in pairs if len(set(pair)) > 1)
        warn(
            f"compiled again, {len(programs)} programs now for inputs that differ in nothing but a "
            f"number that the forward reads ({', then '.join(differ)}). Compute with the tensor "
            "itself (torch.where) instead, or read numbers that take few values"
        )

    def _of_other_sizes(self, key: CallKey) -> list[_CachedValue[Value]]:
        same = key.without_decisions()
        return [e for name, e in self._alike(key) if name.without_decisions() != same]

    def _alike(self, key: CallKey) -> list[tuple[CallKey, _CachedValue[Value]]]:
        """Return the entries that differ from ``key`` only in sizes above 1 and decisions, the
        latest last."""
        alike = key.without_decisions().without_sizes()
        return [item for item in self._entries.items() if item[1].alike == alike]
