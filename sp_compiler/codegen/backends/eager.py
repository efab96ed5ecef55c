"""One Python module in which each operator is a call of torch; this text is what runs."""

from __future__ import annotations

from collections.abc import Sequence

from sp_compiler.codegen.backends import LoadedProgram
from sp_compiler.codegen.module_text import CompiledRegion, load_classes, module_source


def compile_regions(regions: Sequence[CompiledRegion]) -> LoadedProgram:
    """Load the classes of all regions from one text."""
    # One module for all: a traceback then shows one file, the text that a user can read.
    texts = [region.text for region in regions]
    source = module_source(texts)
    namespace = load_classes(source, texts)
    return LoadedProgram(
        source,
        {each.region.name: namespace[each.text.name] for each in regions},
        {each.region.name: each.text.names for each in regions},
    )
