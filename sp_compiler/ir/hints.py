"""Placements of parameters that a user asks for: ``hints=`` of :func:`sp_compiler.compile`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import I, Placement, S

_ALLOWED = (
    "Shard(dim), Replicate() (of torch.distributed.tensor), or sp_compiler.forbid(...) of them"
)


@dataclass(frozen=True)
class Forbid:
    """Any placement except these; created by :func:`forbid`."""

    placements: tuple[Shard | Replicate, ...]


Hint = Shard | Replicate | Forbid
Parameters = Mapping[str, tuple[str, tuple[int, ...]]]
"""Every name of a parameter, with the name that it is stored under and its shape."""


def forbid(*placements: Shard | Replicate) -> Forbid:
    """Return a hint that rules out placements and leaves the choice among all others.

    >>> sp_compiler.compile(model, tp=8, hints={"lm_head": sp_compiler.forbid(Shard(0))})

    Args:
        placements: at least one ``torch.distributed.tensor.Shard(dim)`` or ``Replicate()``.

    Raises:
        ArgumentError: no placement is given, or a value is not a placement.
    """
    if not placements or any(type(item) not in (Shard, Replicate) for item in placements):
        given = ", ".join(map(repr, placements))
        raise ArgumentError(f"forbid({given}): expected one or more of Shard(dim), Replicate()")
    return Forbid(placements)


@dataclass(frozen=True)
class Wish:
    """Union of all hints for one parameter; they do not contradict each other.

    Attributes:
        hints: the patterns that match the parameter, with their hints.
        rank: number of dims of the parameter, for dims counted from the end.
    """

    hints: tuple[tuple[str, Hint], ...]
    rank: int

    def allows(self, placement: Placement) -> bool:
        """Return whether a parameter may have this placement, regardless of segments."""
        return all(self._allows(hint, placement) for _, hint in self.hints)

    def _allows(self, hint: Hint, placement: Placement) -> bool:
        if isinstance(hint, Forbid):
            return not any(self._allows(item, placement) for item in hint.placements)
        if isinstance(hint, Replicate):
            return placement.is_replicated
        return placement.kind == "S" and placement.dim == hint.dim % self.rank

    @property
    def allowed(self) -> tuple[bool, ...]:
        """Return whether it may be replicated, then whether it may be sharded on each dim."""
        return tuple(map(self.allows, (I, *map(S, range(self.rank)))))

    def __str__(self) -> str:
        return " and ".join(f"hints[{key!r}]={hint_text(hint)}" for key, hint in self.hints)


def hint_text(hint: Hint) -> str:
    """Return a hint in the user's notation."""
    if isinstance(hint, Forbid):
        return f"forbid({', '.join(map(hint_text, hint.placements))})"
    return f"Shard({hint.dim})" if isinstance(hint, Shard) else "Replicate()"


def placement_text(placement: Placement) -> str:
    """Return a parameter's stored placement in the user's notation for hints."""
    return f"Shard({placement.dim})" if placement.is_sharded else "Replicate()"


def checked_hints(hints: Any) -> dict[str, Hint]:
    """Return ``hints`` if they are names with placements.

    Raises:
        ArgumentError: not a mapping, a key that is not a name, or a value that is not a placement.
    """
    if not isinstance(hints, Mapping):
        raise ArgumentError(
            f'hints={hints!r}: expected a dict of names, such as {{"layers.*.mlp.up": Shard(0)}}'
        )
    for key, hint in hints.items():
        if not isinstance(key, str) or not key:
            raise ArgumentError(
                f"hints[{key!r}]: expected the name of a module or of a parameter as key"
            )
        if type(hint) not in (Shard, Replicate, Forbid):
            raise ArgumentError(f"hints[{key!r}]={hint!r}: expected {_ALLOWED}")
    return dict(hints)


def parameters_of(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return all parameter names of ``model``; tied parameters are stored under their first
    name."""
    first_name: dict[int, str] = {}
    # Duplicates too: a hint may use any name of a tied parameter.
    return {
        name: (first_name.setdefault(id(parameter), name), tuple(parameter.shape))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def unmatched(hints: Mapping[str, Hint], parameters: Parameters) -> list[str]:
    """Return the patterns that match no parameter."""
    return [key for key in hints if not any(_matches(key, name) for name in parameters)]


def wishes_of(hints: Mapping[str, Hint], parameters: Parameters) -> dict[str, Wish]:
    """Return the union of the hints for each parameter that has any, by stored name.

    Raises:
        ArgumentError: a pattern matches nothing, a parameter has no such dim, or two hints for a
            parameter (perhaps under two of its names) contradict each other.
    """
    for key in unmatched(hints, parameters):
        raise ArgumentError(
            f"hints[{key!r}] matches nothing: expected the name of a parameter, or of a module "
            "that has a weight, where * stands for anything between two dots; "
            f"similar names: {', '.join(near(key, parameters)) or 'none'}"
        )
    # By stored name, so that a contradiction of hints for two names of a tied parameter is found.
    by_stored_name: dict[str, dict[str, Hint]] = {}
    shapes = dict(parameters.values())
    for name, (stored, _) in parameters.items():
        matching = {key: hint for key, hint in hints.items() if _matches(key, name)}
        if matching:
            by_stored_name.setdefault(stored, {}).update(matching)
    return {name: _wish(name, shapes[name], asked) for name, asked in by_stored_name.items()}


def _wish(name: str, shape: tuple[int, ...], hints: Mapping[str, Hint]) -> Wish:
    rank = len(shape)
    for key, hint in hints.items():
        for item in hint.placements if isinstance(hint, Forbid) else (hint,):
            if isinstance(item, Shard) and not -rank <= item.dim < rank:
                raise ArgumentError(
                    f"hints[{key!r}]={hint_text(hint)}: parameter {name!r} has {rank} dims, "
                    f"{shape}; expected a dim from {-rank} to {rank - 1}"
                )
    wish = Wish(tuple(hints.items()), rank)
    if not any(wish.allowed):
        raise ArgumentError(
            f"{wish} contradict each other: no placement is left for parameter {name!r} {shape}; "
            "drop one of them"
        )
    return wish


def _matches(pattern: str, name: str) -> bool:
    # ``lm_head`` means its weight, not its bias, which may be sharded on another dim. Any other
    # parameter must be named.
    return _glob(pattern, name) or _glob(pattern, _module_with_weight(name))


def _glob(pattern: str, name: str) -> bool:
    # Part by part: otherwise "*" would match dots, and "layers.*.up" would match an expert's.
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def named_or_inside(pattern: str, parameters: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches, and those inside modules that it matches.

    Raises:
        ArgumentError: there are none; the message suggests similar names.
    """
    names = list(parameters)
    is_text = isinstance(pattern, str)
    count = len(pattern.split(".")) if is_text else 0
    found = [n for n in names if is_text and _glob(pattern, ".".join(n.split(".")[:count]))]
    if not found:
        close = near(pattern, names) if is_text else []
        raise ArgumentError(
            f"explain({pattern!r}): expected the name of a parameter, or of a module that has "
            "some, where * stands for anything between two dots; "
            f"similar names: {', '.join(close) or 'none'}"
        )
    return found


def _module_with_weight(name: str) -> str:
    return name.removesuffix(".weight")


def near(name: str, parameters: Iterable[str]) -> list[str]:
    """Return up to three similar names, of parameters or modules with a weight, for error
    messages."""
    names = list(parameters)
    # If it is the name of a container, the user means something inside it.
    inside = [other for other in names if _matches(f"{name}.*", other)]
    known = dict.fromkeys([*map(_module_with_weight, names), *names])
    return inside[:3] or difflib.get_close_matches(name, known, 3, 0.4)
