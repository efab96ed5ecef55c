"""Files with all results of a compilation, for ``SP_COMPILER_DUMP``."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.log import LOG
from sp_compiler.base.placement import legend_of
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.snapshot import Snapshot
from sp_compiler.ir.text import render

VARIABLE = "SP_COMPILER_DUMP"


def dump_folder() -> Path | None:
    """Create the folder in ``SP_COMPILER_DUMP``; return ``None`` if that is not set.

    Raises:
        ArgumentError: it cannot be created or written.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    # Created right away: an unusable path should not be found after minutes of compiling.
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"{VARIABLE}={name}: no folder can be made there: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ArgumentError(f"{VARIABLE}={name}: no permission to write there")
    return folder


def dump(compiled: CompiledProgram, folder: Path, plan: str) -> Path:
    """Write each stage, the code and the text ``plan`` of ``compiled`` into a separate folder."""
    own = own_folder(folder)
    for number, (name, stage) in enumerate(compiled.stages.items()):
        (own / f"{number:02}-{name}.txt").write_text(_stage_text(stage), encoding="utf-8")
    (own / "code.py").write_text(compiled.code, encoding="utf-8")
    (own / "plan.txt").write_text(f"{plan}\n", encoding="utf-8")
    LOG.info("wrote stages, code and plan to %s", own)
    return own


def own_folder(folder: Path, suffix: str = "") -> Path:
    """Create a folder in ``folder`` for one compilation on this rank; its name ends with
    ``suffix``."""
    rank = f"rank{os.environ['RANK']}-" if "RANK" in os.environ else ""
    # Numbers, not times: folders of two ranks, or of a repeated run, can be compared.
    numbered = (folder / f"{rank}{number:03}{suffix}" for number in itertools.count())
    for own in numbered:
        # A second compilation, or a second run, must not overwrite the first. Created without a
        # check: ranks that were started without RANK in the environment may do so simultaneously.
        with contextlib.suppress(FileExistsError):
            own.mkdir(parents=True)
            return own
    raise AssertionError("there is always a next number")


def _stage_text(stage: Snapshot) -> str:
    # Stages before the outline have calls without arguments: the region's name identifies them.
    wiring = stage.wiring or [region for _, region in stage.calls]
    pairs = zip(stage.calls, wiring, strict=True)
    calls = [f"{path or '(model)'}: {text}" for (path, _), text in pairs]
    graphs = [f"# {name}\n{render(graph)}" for name, graph in stage.graphs.items()]
    parts = [*graphs, *(["# calls\n" + "\n".join(calls)] if calls else [])]
    # As comments, like the titles of graphs.
    meanings = [f"# {line.strip()}" for line in legend_of(graphs) if line]
    return "\n\n".join([*parts, *(["\n".join(meanings)] if meanings else [])]) + "\n"
