"""Programs for every size of the inputs, or only for the example's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sp_compiler.base.log import LOG
from sp_compiler.base.warn import warn
from sp_compiler.options import CompileOptions
from sp_compiler.passes.chunks.counts import OpenRowsError
from sp_compiler.passes.memory.tag import POLICIES
from sp_compiler.planning.planned_program import PlannedProgram


def compile_open_or_fixed(
    compile_with: Callable[..., PlannedProgram], options: CompileOptions, open_dims: bool
) -> PlannedProgram:
    """Compile with the sizes of the inputs left open, if that is asked for and possible."""
    # While a size is open, bytes are unknown, and so is whether a batch has equal halves.
    limited = options.budget_bytes is not None or options.device_bytes is not None
    if not open_dims or limited or options.half_batches:
        return compile_with(options, open_dims=False)
    unchunked = replace(options, loss_chunks=1, attention_chunks=1)
    may_chunk = any(options.chunk_counts) or POLICIES[options.recompute].chunks_rows
    try:
        # Only trying shows what torch.export and its shape guards can leave open.
        return compile_with(options if may_chunk else unchunked, open_dims=True)
    except Exception as error:  # from torch too: not all of it supports open sizes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        asks_rows = isinstance(error, OpenRowsError)
        LOG.debug("sizes cannot be left open", exc_info=True)
    compiled = compile_with(options, open_dims=False)
    forwards = [each.partitioned.forward for each in compiled.regions.values()]
    if asks_rows and not any("chunk" in node.meta for graph in forwards for node in graph.nodes):
        # Only chunks need to know the number of rows, and here they save too little to be used.
        return compile_open_or_fixed(compile_with, unchunked, open_dims=True)
    warn(
        "every size of the inputs is compiled separately, because the model cannot be compiled "
        f"with sizes left open: {reason}"
    )
    return compiled
