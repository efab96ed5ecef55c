"""The bounded cache of programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from sp_compiler.base.decisions import Decision, hold
from sp_compiler.base.warn import warn
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.runtime.keys.call_key import CallKey

Value = TypeVar("Value")
# Limit on programs with open sizes that are compiled for calls that differ only in their sizes.
_MAX_TRIES = 4
# A warning is given from this many programs on that differ only in decisions: two questions with
# two answers each make four.
_MANY_DECISIONS = 5


@dataclass
class _CachedValue(Generic[Value]):
    """A program, and the calls for which it is valid.

    Attributes:
        value: the program.
        alike: its key without decisions, the same for all sizes above 1.
        sizes: its open sizes.
        decisions: values that its forward reads.
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
        # Most models read no values: their calls need not look up decisions.
        self._decide = False
        self._warned = False

    def __len__(self) -> int:
        return len(self._entries)

    def mapped(self, function: Callable[[Value], Value]) -> ProgramCache[Value]:
        """Return a cache of the same size with ``function`` of every program."""
        result = ProgramCache[Value](self.size)
        # Sizes that could not be left open for the original cannot be for a copy.
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
        """Return ``key`` with the values that the forward reads from these inputs and buffers.

        They are filled in if the cache has a program that is valid for them; otherwise the call has
        to be compiled, and ``key`` is returned unchanged.
        """
        if not self._decide:
            return key
        # The latest first: a value that is read usually stays the same.
        for name, entry in reversed(self._alike(key)):
            fits = name.without_decisions() == key or (
                entry.sizes is not None and entry.sizes.rejection(leaves) is None
            )
            if fits and hold(entry.decisions, leaves, buffers):
                return replace(key, decisions=name.decisions)
        return key

    def get(self, key: CallKey, leaves: Sequence[Any] = ()) -> Value | None:
        """Return the program for a call with these flattened inputs, if there is one.

        ``key`` comes from :meth:`decided`.
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
        # In the order of last use: programs are dropped from the front.
        self._entries.move_to_end(key)
        return match.value

    def lacks_sizes(self, key: CallKey, leaves: Sequence[Any]) -> bool:
        """Return whether a call has no program because of its sizes alone."""
        others = self._of_other_sizes(key)
        # If the sizes fit, the program is not valid because the forward reads another value.
        return (
            bool(others)
            and len(others) == len(self._alike(key))
            and all(e.sizes is None or e.sizes.rejection(leaves) is not None for e in others)
        )

    def opens(self, key: CallKey, leaves: Sequence[Any]) -> bool:
        """Return whether to leave sizes open in the program for a call that has none yet.

        This is so if another size came before, unless open sizes failed or several such programs
        were specialised anyway: they take longer to compile.
        """
        closed = key.without_decisions().without_sizes() in self._closed
        tried = self._rejections(key, leaves)
        return bool(self._of_other_sizes(key)) and len(tried) < _MAX_TRIES and not closed

    def warn_of_sizes(self, key: CallKey, leaves: Sequence[Any], inputs: str) -> None:
        """Warn if open programs were specialised, so that this call needs another one.

        ``inputs``: what it is called with, in words.
        """
        tried = self._rejections(key, leaves)
        if tried:
            warn(
                f"compiled again, {len(self._of_other_sizes(key)) + 1} programs now for inputs "
                f"that differ only in their sizes ({inputs}): the last is specialised, "
                f"{tried[-1]}"
            )

    def _rejections(self, key: CallKey, leaves: Sequence[Any]) -> list[str]:
        """Return why open programs for other sizes are not valid for these."""
        others = self._of_other_sizes(key)
        reasons = [e.sizes.rejection(leaves) for e in others if e.sizes is not None]
        # None: the sizes fit, and the forward reads another value.
        return [reason for reason in reasons if reason is not None]

    def put(
        self,
        key: CallKey,
        value: Value,
        sizes: Sizes | None = None,
        decisions: Sequence[Decision] = (),
    ) -> None:
        """Store the program compiled for ``key``, valid for ``sizes`` and ``decisions``."""
        alike = key.without_decisions().without_sizes()
        # Left open on request and specialised anyway: trying again would cost as much again.
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
        # After the first value that differs, the forward takes another path.
        pairs = zip(*(name.decisions for name in programs[-2:]), strict=False)
        differ = next(pair for pair in pairs if len(set(pair)) > 1)
        warn(
            f"compiled again, {len(programs)} programs now for inputs that differ only in a value "
            f"that the forward reads ({', then '.join(differ)}). Compute with the tensor itself "
            "(torch.where) instead, or read numbers that take few values"
        )

    def _of_other_sizes(self, key: CallKey) -> list[_CachedValue[Value]]:
        same = key.without_decisions()
        return [e for name, e in self._alike(key) if name.without_decisions() != same]

    def _alike(self, key: CallKey) -> list[tuple[CallKey, _CachedValue[Value]]]:
        """Return the entries that differ from ``key`` only in sizes above 1 and decisions, the
        latest last."""
        alike = key.without_decisions().without_sizes()
        return [item for item in self._entries.items() if item[1].alike == alike]
