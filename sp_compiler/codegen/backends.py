"""How the regions of a program become functions that run: the seam for other backends.

A backend is one function, ``backend(regions) -> LoadedProgram``, in a file of its own, and a row of
:data:`BACKENDS`. It reads ``partitioned.forward`` and ``.backward`` of each region; whatever it
makes of them keeps their signatures::

    forward(tp, *inputs) -> outputs, saved
    backward(tp, saved, *tangents) -> one gradient or None per input
    loss_backward(tp, saved, tangent)    # where ``partitioned.loss`` is not None
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sp_compiler.codegen.loading import load
from sp_compiler.codegen.module_text import CompiledRegion, module_source


@dataclass(frozen=True)
class LoadedProgram:
    """What runs.

    Attributes:
        source: text for people, which is what runs where the backend runs text.
        codes: by name of the region, an object with the functions.
        value_names: by name of the region, what ``source`` calls the values of its graphs' nodes.
    """

    source: str
    codes: Mapping[str, Any]
    value_names: Mapping[str, Mapping[str, str]]


class Backend(Protocol):
    """Makes functions of all regions of a program."""

    def __call__(self, regions: Sequence[CompiledRegion], /) -> LoadedProgram: ...


def eager(regions: Sequence[CompiledRegion]) -> LoadedProgram:
    """One Python module, each operator a call of torch; the text is what runs."""
    source = module_source([region.text for region in regions])
    namespace = load(source)
    return LoadedProgram(
        source,
        {each.region.name: namespace[each.text.name] for each in regions},
        {each.region.name: each.text.names for each in regions},
    )


BACKENDS: Mapping[str, Backend] = {"eager": eager}
