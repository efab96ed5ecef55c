"""Variants of a compiled program after each pass, to find the one that changed its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sp_compiler.base.pass_report import Pass
from sp_compiler.codegen.module_text import printed_regions
from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward, RegionCode
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.passes.memory.partition import partition
from sp_compiler.verification.interpret import PartitionedCode, ShardedCode


def variants_by_pass(compiled: CompiledProgram) -> dict[str, CompiledProgram]:
    """Return the program after each pass, by name of the pass: only the code of its regions
    differs."""
    regions = printed_regions(compiled).values()
    sharded: dict[str, RegionCode] = {
        item.region.name: ShardedCode(item.region, item.differentiable) for item in regions
    }
    variants: dict[str, CompiledProgram] = {
        # Sharding leaves a forward alone, and autograd finds the backward: a wrong joint graph
        # cannot hide in both.
        Pass.SHARD: replace(compiled, codes=sharded, loss_backwards={})
    }
    if Pass.OVERLAP in compiled.stages:
        losses = {name: loss.output for name, loss in compiled.loss_backwards.items()}
        # Partitioned once more, for the overlap pass reorders the graphs in place.
        parts = [partition(item.joint, losses.get(item.region.name)) for item in regions]
        variants[Pass.PARTITION] = _split(compiled, parts)
    # Without a schedule of its own the partition is what the code was made of.
    last = Pass.OVERLAP if Pass.OVERLAP in compiled.stages else Pass.PARTITION
    variants[last] = _split(compiled, [item.partitioned for item in regions])
    return {**variants, Pass.CODEGEN: compiled}


def _split(compiled: CompiledProgram, parts: Sequence[Partitioned]) -> CompiledProgram:
    """Return the program with these forwards and backwards, one per region."""
    codes = dict(zip(compiled.regions, map(PartitionedCode, parts), strict=True))
    from_loss = {
        name: LossBackward(loss.output, codes[name].loss_backward)
        for name, loss in compiled.loss_backwards.items()
    }
    return replace(compiled, codes=dict(codes), loss_backwards=from_loss)
