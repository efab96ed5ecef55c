"""The placement problem as plain data: vertices, their options, conversions of a choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sp_compiler.base.placement import Placement

ValueName = Any
"""Hashable; the solvers use nothing else of a value."""
ConversionCost = Callable[[Any, Placement, Placement], "float | None"]
"""Price in us of making a value's second placement from the first; ``None``: impossible."""


class NoChoiceError(ValueError):
    """No choice of options satisfies every need."""


@dataclass(frozen=True)
class Option:
    """One way to run a vertex: a placement for each needed and each made value, and a cost in
    us."""

    needs: tuple[Placement, ...]
    makes: tuple[Placement, ...]
    cost_us: float


@dataclass
class Vertex:
    """``needs`` and ``makes`` name values, in the order of the options' placements."""

    needs: tuple[ValueName, ...]
    makes: tuple[ValueName, ...]
    options: list[Option] = field(default_factory=list)


Conversion = tuple[ValueName, Placement, Placement]
"""A value, how it is made and how it is needed."""


def conversions(vertices: Sequence[Vertex], choices: Sequence[int]) -> list[Conversion]:
    """Return the conversions for the chosen options, each once."""
    chosen = [(v, v.options[i]) for v, i in zip(vertices, choices, strict=True)]
    made = {
        value: placement
        for vertex, option in chosen
        for value, placement in zip(vertex.makes, option.makes, strict=True)
    }
    needed = [
        (value, made[value], placement)
        for vertex, option in chosen
        for value, placement in zip(vertex.needs, option.needs, strict=True)
        if made[value] != placement
    ]
    # A dict, not a set: floats are summed in this order, and ranks must get the same sum.
    return list(dict.fromkeys(needed))
